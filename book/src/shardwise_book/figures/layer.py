"""The explorer of one layer under several layouts: what a device holds and receives."""

import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwise_book.figures import svg
from shardwise_book.figures.interactive import RESULT, Control, Interactive, explorer, said
from shardwise_book.figures.pieces import pieces

Specs = Mapping[str, PartitionSpec]  # by the name of a matrix
_WIDE, _GAP, _LEFT = 330, 24, 4  # of the picture, in its own units


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
    whole = 4 * sum(math.prod(shape) for shape, _ in matrices.values())  # bytes, of float32

    def cut(specs):
        at = {name: NamedSharding(mesh, specs[name]) for name in matrices}
        return {name: pieces(at[name], *matrix) for name, matrix in matrices.items()}

    def result(layout, device, mine, needed):
        place = np.unravel_index(device, mesh.devices.shape)
        where = ", ".join(f"{name} {n}" for name, n in zip(mesh.shape, place, strict=True))
        mine, needed = (4 * sum(one.size for one in some.values()) for some in (mine, needed))
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
