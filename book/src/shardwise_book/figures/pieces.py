"""The pieces into which a sharding cuts an array, as rectangles of a matrix, and who has which.

One explorer is of meshes and specs: which device holds which block, or what JAX says against it.
The other is of one layer under several layouts: what a device holds and receives.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardwise import mesh
from shardwise_book.figures import svg
from shardwise_book.figures.interactive import RESULT, Control, Interactive, explorer, said

MESHES = dict(data=8), dict(data=4, model=2), dict(data=2, model=4), dict(stage=2, data=2, model=2)
SIZES = (16, 8, 6)
ITEMSIZE = 4  # float32
LAYOUT = """<div id="@size"></div><div class="pictures sheets" id="@sheets">
<div><p id="@sides"></p><div class="sheet" id="@array" role="img"
aria-label="The array: its blocks, and the devices that hold each"></div></div>
<div><p id="@axes"></p><div class="memories" id="@memories"></div></div></div>"""

Specs = Mapping[str, PartitionSpec]  # by the name of a matrix
_WIDE, _GAP, _LEFT = 330, 24, 4  # of the picture, in its own units


class Piece(NamedTuple):
    """A rectangle of a matrix, by its edges: rows and columns from the first on, before the end."""

    top: float
    bottom: float
    left: float
    right: float

    @property
    def size(self) -> float:
        """The number of its entries."""
        return (self.bottom - self.top) * (self.right - self.left)

    @property
    def words(self) -> str:
        return f"[{self.top}:{self.bottom}, {self.left}:{self.right}]"

    def box(self, x: float = 0, y: float = 0, scale: float = 1) -> tuple[float, ...]:
        """(left, top, width, height) in a picture whose matrix begins at (x, y)."""
        wide, high = self.right - self.left, self.bottom - self.top
        return x + scale * self.left, y + scale * self.top, scale * wide, scale * high


def pieces(sharding: Sharding, shape: Sequence[int], inputs: int = 1) -> list[Piece]:
    """What each device holds of an array whose first `inputs` axes are drawn as rows.

    The others are its columns. Devices come in the order of the sharding, which is the mesh's.
    ValueError tells of a block that is no rectangle of the matrix.
    """
    return [
        Piece(*_range(index[:inputs], shape[:inputs]), *_range(index[inputs:], shape[inputs:]))
        for index in sharding.devices_indices_map(tuple(shape)).values()
    ]


def _range(index, sizes):
    """First and end of the entries at `index`, of axes that are drawn as one."""
    first = last = 0
    entries = 1
    for cut, size in zip(index, sizes, strict=True):
        start, stop, _ = cut.indices(size)
        first, last = first * size + start, last * size + stop - 1
        entries *= stop - start
    if last + 1 - first != entries:
        raise ValueError(
            f"figures: of axes {tuple(sizes)} drawn as one, a block {index} is no interval; cut "
            f"the first of them alone."
        )
    return first, last + 1


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


def layer_explorer(
    mesh: Mesh,
    rows: Mapping[str, Mapping[str, tuple[tuple[int, ...], int]]],
    layouts: Mapping[str, tuple[Specs, Specs, Sequence]],
    chosen: int = 0,
) -> Interactive:
    """Choose a layout and a device; see which block of each matrix it holds, and which it receives.

    `rows` maps the title of each row of the picture to its matrices in order of use, {name: (shape,
    how many of its first axes a product contracts)}. `layouts` maps a name to three things: the
    PartitionSpecs by which matrices are held, {name: spec}; those by which they lie where they are
    used; and what a device sends for the layer, rows of (pass, collective, number of arrays,
    bytes). The figure first shows layout number `chosen`, for device 0.

    Raises:
      ValueError: a spec whose block is no rectangle of the matrix as drawn.
    """
    places, outlines, height = _arranged(rows)
    matrices = {name: matrix for row in rows.values() for name, matrix in row.items()}
    whole = ITEMSIZE * sum(math.prod(shape) for shape, _ in matrices.values())

    def cut(specs):
        at = {name: NamedSharding(mesh, specs[name]) for name in matrices}
        return {name: pieces(at[name], *matrix) for name, matrix in matrices.items()}

    def result(layout, device, mine, needed):
        place = np.unravel_index(device, mesh.devices.shape)
        where = ", ".join(f"{name} {n}" for name, n in zip(mesh.shape, place, strict=True))
        mine, needed = (ITEMSIZE * sum(p.size for p in some.values()) for some in (mine, needed))
        more = f"receives {said('received', needed - mine)} bytes before their use"
        received = more if needed > mine else "receives none"
        return (
            f"{escape(layout)}, device {device} ({where}): of the {whole:,} bytes of these "
            f"matrices it holds {said('held', mine)}, {received}, and never sees "
            f"{said('unseen', whole - needed)}."
        )

    def sums(used):
        for name, matrix in matrices.items():
            if used[name][0].bottom - used[name][0].top < _sides(*matrix)[0]:
                x, y = places[name][3:]
                yield svg.text(x, y + 6, "Σ", "middle", 'font-size="18"')

    controls = {
        "layout": Control("Layout", list(layouts)),
        "device": Control(f"Device, 0 to {mesh.size - 1}", range(mesh.size), "range"),
    }
    alt = "The matrices of one layer: filled where the device holds them, pale with a dashed edge "
    alt += "where it receives them before use, empty elsewhere"
    inside = f'{outlines}<g id="@sums"></g><g id="@blocks"></g>'
    picture = svg.picture("", _WIDE, height, alt, inside)
    layout = f'<div class="pictures">{picture}</div>{RESULT}<div id="@sends"></div>'
    made = {
        "sends": lambda layout: _sends(layouts[layout][2]),
        "held": lambda layout: cut(layouts[layout][0]),
        "used": lambda layout: cut(layouts[layout][1]),
        "mine": lambda held, device: {name: every[device] for name, every in held.items()},
        "needed": lambda used, device: {name: every[device] for name, every in used.items()},
    }
    more = {"start": {"layout": chosen}, "shows": "layout", "fixed": {"places": places}}
    return explorer(controls, layout, result, sums, _blocks, **more, **made)


def _sides(shape, inputs):
    """Rows and columns of a weight as drawn; a product contracts the first `inputs` axes."""
    return math.prod(shape[:inputs]), math.prod(shape[inputs:])


def _arranged(rows):
    """({name: (x, y, scale)}, what every frame shows, the picture's height)."""
    scale = min(
        (_WIDE - _LEFT - _GAP * len(row)) / sum(_sides(*m)[1] for m in row.values())
        for row in rows.values()
    )
    places, parts, y = {}, [], 0
    for title, row in rows.items():
        parts.append(svg.text(0, y + 14, title, more='font-weight="bold"'))
        x, y = _LEFT, y + 40
        for name, matrix in row.items():
            high, wide = (round(n * scale, 1) for n in _sides(*matrix))
            parts += svg.text(x, y - 6, name), svg.box(x, y, wide, high)
            places[name] = x, y, scale, x + wide + 12, y + high / 2
            x = round(x + wide + _GAP, 1)
        y = round(y + max(_sides(*m)[0] for m in row.values()) * scale + 14, 1)
    return places, "".join(parts), y


def _blocks(places, mine, needed, device):
    """What the device receives, pale, and above it what it holds."""
    dashed = 'class="used" fill-opacity=".28" stroke-dasharray="3 3"'
    for found, more in (needed, dashed), (mine, 'class="held" stroke-width="1.5"'):
        boxes = [piece.box(*places[name][:3]) for name, piece in found.items()]
        yield svg.path(boxes, svg.device(device), f"{svg.EDGE} {more}")


def _sends(rows):
    yield "<table><thead><tr><th>pass</th><th>collective</th><th>arrays</th><th>bytes sent</th>"
    yield "</tr></thead><tbody>"
    for when, what, *numbers in rows:
        cells = escape(when), escape(what), *(f"{number:,}" for number in numbers)
        yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    yield "</tbody></table>"
