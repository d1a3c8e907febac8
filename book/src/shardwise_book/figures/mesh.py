"""The explorer of meshes and specs: which device holds which block, or what JAX says against it."""

import functools
import itertools
from collections.abc import Sequence
from html import escape

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardwise_book.figures import palette
from shardwise_book.figures.interactive import RESULT, Control, Interactive, explorer, said

MESHES = ((8,), (4, 2), (2, 4), (2, 2, 2))
NAMES = {1: ("data",), 2: ("data", "model"), 3: ("stage", "data", "model")}
SIZES = (16, 8, 6)
ITEMSIZE = 4  # float32
LAYOUT = f"""<div id="@size"></div><div class="pictures" id="@sheets">
<div><p id="@sides"></p><div class="sheet" id="@array" role="img"
aria-label="The array: its blocks, and the devices that hold each"></div></div>
<div><p id="@axes"></p><div class="memories" id="@memories"></div></div></div>{RESULT}"""


def mesh_explorer() -> Interactive:
    """Choose an array's shape, a mesh and a spec; see the blocks, their bytes, or JAX's refusal.

    Raises:
      RuntimeError: there are fewer than eight CPU devices; `mesh.simulate(8)` makes them.
    """
    devices = jax.local_devices(backend="cpu")[:8]
    if len(devices) < 8:
        raise RuntimeError(
            f"The mesh explorer needs 8 CPU devices and found {len(devices)}: call "
            f"mesh.simulate(8) first, before anything touches a device."
        )
    meshes = {}
    for sizes in MESHES:
        axes = NAMES[len(sizes)]
        grid = np.array(devices).reshape(sizes)
        label = f"{'×'.join(map(str, sizes))} ({', '.join(axes)})"
        meshes[label] = Mesh(grid, axes, axis_types=(AxisType.Auto,) * len(axes))
    look = functools.cache(blocks)

    def held(*layout):
        found = look(*layout)
        return [] if isinstance(found, str) else found

    def result(mesh, rows, columns, first, second):
        return describe(look(mesh, rows, columns, first, second), rows, columns, first, second)

    controls = {
        "mesh": Control("Mesh", meshes),
        "rows": Control("Rows", SIZES),
        "columns": Control("Columns", SIZES),
        "first": Control("Rows cut by", lambda mesh: _entries(mesh)),
        "second": Control("Columns cut by", lambda mesh: _entries(mesh)),
    }
    parts = {
        "result": result,
        "size": lambda rows, columns: (
            f"<style>#@sheets{{--rows:{rows};--columns:{columns}}}</style>"
        ),
        "sides": lambda rows, columns: f"{rows} rows, {columns} columns",
        "axes": lambda mesh: f"place in the mesh: ({', '.join(mesh.axis_names)})",
        "array": lambda mesh, rows, columns, first, second: _array(
            held(mesh, rows, columns, first, second)
        ),
        "memories": lambda mesh, rows, columns, first, second: _memories(
            mesh, held(mesh, rows, columns, first, second)
        ),
    }
    return explorer(controls, LAYOUT, parts, {"mesh": 1, "columns": 1, "first": 1}, "layout")


def entries(names: Sequence[str]) -> list[str | tuple[str, ...] | None]:
    """All that one array axis may be cut by: nothing, or mesh axes in any order."""
    return [None, *names, *(o for n in (2, 3) for o in itertools.permutations(names, n))]


def _entries(mesh):
    return {repr(entry): entry for entry in entries(mesh.axis_names)}


def blocks(
    mesh: Mesh,
    rows: int,
    columns: int,
    first: str | tuple[str, ...] | None,
    second: str | tuple[str, ...] | None,
) -> list[tuple[int, int, int, int]] | str:
    """What JAX says: top, bottom, left and right of each device's block, or why there is none."""
    try:
        sharding = NamedSharding(mesh, PartitionSpec(first, second))
        held = sharding.devices_indices_map((rows, columns))
    except Exception as error:  # the class of some, DuplicateSpecError, is not public
        return str(error)
    cuts = [zip(held[device], (rows, columns), strict=True) for device in mesh.devices.flat]
    return [tuple(edge for cut, n in cut2 for edge in cut.indices(n)[:2]) for cut2 in cuts]


def describe(
    found: list[tuple[int, int, int, int]] | str, rows: int, columns: int, *spec: object
) -> str:
    """The result in one sentence of HTML; numbers carry names."""
    name = f"<code>{escape(repr(PartitionSpec(*spec)))}</code>"
    if isinstance(found, str):
        message = f'<span data-name="error">{escape(found, False)}</span>'
        return f'<span class="error">JAX refuses {name}: {message}</span>'
    top, bottom, left, right = found[0]
    size = (bottom - top) * (right - left)
    return (
        f"{name}: each device holds {said('block', f'{bottom - top}×{right - left}')} of "
        f"{rows}×{columns} float32 elements, {said('bytes', size * ITEMSIZE)} of "
        f"{rows * columns * ITEMSIZE} bytes. Each element lies on "
        f"{said('copies', 8 * size // (rows * columns))} of 8 devices."
    )


def _array(found):
    """The array as a grid of tiles, each in a strip for each device that holds it."""
    holders = {}
    for device, block in enumerate(found):
        holders.setdefault(block, []).append(device)
    tiles = "".join(
        f"<div>{''.join(_strip(device, device) for device in holders[block])}</div>"
        for block in sorted(holders)
    )
    return _grid(found, tiles) if found else ""


def _memories(mesh, found):
    """The memory of each device: the block it holds, inside the outline of the whole array."""
    drawn = ""
    for device, place in enumerate(np.ndindex(mesh.devices.shape)):
        tile, held = "", ""
        if found:
            block = top, bottom, left, right = found[device]
            row, column = (sorted({b[i] for b in found}).index(block[i]) + 1 for i in (0, 2))
            tile = _grid(found, _strip(device, "", f";grid-area:{row}/{column}"))
            held = f"[{top}:{bottom}, {left}:{right}]"
        drawn += f'<div>device {device}<br>{place}<div class="sheet">{tile}</div>{held}</div>'
    return drawn


def _grid(found, tiles):
    """Tiles in a grid with a row and a column for each cut."""
    down, across = (len({block[edge] for block in found}) for edge in (0, 2))
    return f'<div class="tiles" style="grid:repeat({down},1fr)/repeat({across},1fr)">{tiles}</div>'


def _strip(device, number, more=""):
    colour = palette.device(device)
    style = f"background:{colour};color:{palette.ink(colour)}{more}"
    return f'<i style="{style}">{number}</i>'
