"""The explorer of meshes and specs: which device holds which block, or what JAX says against it."""

import itertools
from html import escape

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardwise import mesh
from shardwise_book.figures import svg
from shardwise_book.figures.interactive import Control, Interactive, explorer, said
from shardwise_book.figures.pieces import pieces

MESHES = (
    {"data": 8},
    {"data": 4, "model": 2},
    {"data": 2, "model": 4},
    {"stage": 2, "data": 2, "model": 2},
)
SIZES = (16, 8, 6)
ITEMSIZE = 4  # float32
LAYOUT = """<div id="@size"></div><div class="pictures sheets" id="@sheets">
<div><p id="@sides"></p><div class="sheet" id="@array" role="img"
aria-label="The array: its blocks, and the devices that hold each"></div></div>
<div><p id="@axes"></p><div class="memories" id="@memories"></div></div></div>"""


def mesh_explorer() -> Interactive:
    """Choose an array's shape, a mesh and a spec; see the blocks, their bytes, or JAX's refusal.

    Raises:
      RuntimeError: there are fewer than eight devices; `mesh.simulate(8)` makes them.
    """
    if (n := len(mesh.devices())) < 8:
        raise RuntimeError(
            f"The mesh explorer needs 8 devices and found {n}: call mesh.simulate(8) first, before "
            f"anything touches a device."
        )
    meshes = {
        f"{'×'.join(map(str, sizes.values()))} ({', '.join(sizes)})": mesh.make(**sizes)
        for sizes in MESHES
    }

    def looked(mesh, rows, columns, first, second):
        """What each device holds, and JAX's refusal if nothing."""
        try:
            return pieces(NamedSharding(mesh, PartitionSpec(first, second)), (rows, columns)), ""
        except Exception as error:  # the class of some, DuplicateSpecError, is not public
            return [], escape(str(error), False)

    def result(looked, rows, columns, first, second):
        (found, refusal), spec = looked, PartitionSpec(first, second)
        name = f"<code>{escape(repr(spec))}</code>"
        if refusal:
            message = f'<span data-name="error">{refusal}</span>'
            return f'<span class="error">JAX refuses {name}: {message}</span>'
        _, _, wide, high = found[0].box()
        return (
            f"{name}: each device holds {said('block', f'{high}×{wide}')} of "
            f"{rows}×{columns} float32 elements, {said('bytes', found[0].size * ITEMSIZE)} of "
            f"{rows * columns * ITEMSIZE} bytes. Each element lies on "
            f"{said('copies', 8 * found[0].size // (rows * columns))} of 8 devices."
        )

    controls = {
        "mesh": Control("Mesh", meshes),
        "rows": Control("Rows", SIZES),
        "columns": Control("Columns", SIZES),
        "first": Control("Rows cut by", _entries),
        "second": Control("Columns cut by", _entries),
    }
    parts = {
        "size": lambda rows, columns: (
            f"<style>#@sheets{{--rows:{rows};--columns:{columns}}}</style>"
        ),
        "sides": lambda rows, columns: f"{rows} rows, {columns} columns",
        "axes": lambda mesh: f"place in the mesh: ({', '.join(mesh.axis_names)})",
        "found": lambda looked: looked[0],
    }
    functions, start = (looked, result, _array, _memories), {"mesh": 1, "columns": 1, "first": 1}
    return explorer(controls, LAYOUT, *functions, start=start, shows="layout", **parts)


def _entries(mesh):
    """All that one array axis may be cut by: nothing, or mesh axes in any order."""
    names = mesh.axis_names
    joined = (some for n in (2, 3) for some in itertools.permutations(names, n))
    return {repr(entry): entry for entry in (None, *names, *joined)}


def _array(found):
    """The array as a grid of tiles, each in a strip for each device that holds it."""
    strips = dict.fromkeys(sorted(found), "")
    for device, block in enumerate(found):
        strips[block] += _strip(device, device)
    return _grid(found, "".join(f"<div>{tile}</div>" for tile in strips.values())) if found else ""


def _memories(mesh, found):
    """The memory of each device: the block it holds, inside the outline of the whole array."""
    for device, place in enumerate(np.ndindex(mesh.devices.shape)):
        tile, held = "", ""
        if found:
            block = found[device]
            row, column = (sorted({b[i] for b in found}).index(block[i]) + 1 for i in (0, 2))
            tile = _grid(found, _strip(device, "", f";grid-area:{row}/{column}"))
            held = block.words
        yield f'<div>device {device}<br>{place}<div class="sheet">{tile}</div>{held}</div>'


def _grid(found, tiles):
    """Tiles in a grid with a row and a column for each cut."""
    down, across = (len({block[edge] for block in found}) for edge in (0, 2))
    return f'<div class="tiles" style="grid:repeat({down},1fr)/repeat({across},1fr)">{tiles}</div>'


def _strip(device, number, more=""):
    style = f"background:{svg.device(device)};color:{svg.ink(device)}{more}"
    return f'<i style="{style}">{number}</i>'
