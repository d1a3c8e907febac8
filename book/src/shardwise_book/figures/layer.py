"""The explorer of one layer under several layouts: what a device holds and receives."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwise_book.figures import svg
from shardwise_book.figures.interactive import RESULT, Control, Interactive, explorer, said

Specs = Mapping[str, PartitionSpec]  # by the name of a matrix
_WIDE, _GAP, _LEFT = 330, 24, 4  # of the picture, in its own units


class Matrix(NamedTuple):
    """A weight of shape `shape`, of which the first `inputs` axes are contracted: its rows."""

    shape: tuple[int, ...]
    inputs: int = 1

    @property
    def drawn(self) -> tuple[int, int]:
        return math.prod(self.shape[: self.inputs]), math.prod(self.shape[self.inputs :])


def layer_explorer(
    mesh: Mesh,
    rows: Mapping[str, Mapping[str, tuple[tuple[int, ...], int]]],
    layouts: Mapping[str, tuple[Specs, Specs, Sequence]],
    chosen: int = 0,
) -> Interactive:
    """Choose a layout and a device; see which block of each matrix it holds, and which it receives.

    `rows` maps the title of each row of the picture to its matrices in order of use, {name: the
    fields of a `Matrix`}; `layouts` maps names to (how matrices are held, how they lie where they
    are used, rows of what a device sends for the layer: pass, collective, arrays, bytes). The
    figure first shows layout number `chosen`, for device 0.

    Raises:
      ValueError: a spec whose block is no rectangle of the matrix as drawn.
    """
    rows = {title: {name: Matrix(*m) for name, m in row.items()} for title, row in rows.items()}
    places, outlines, height = _arranged(rows)
    matrices = {name: matrix for row in rows.values() for name, matrix in row.items()}
    whole = 4 * sum(math.prod(m.drawn) for m in matrices.values())  # bytes, of float32

    def blocks_of(specs):
        return {name: _blocks(mesh, m, specs[name]) for name, m in matrices.items()}

    def of_device(found, device):
        return {name: every[device] for name, every in found.items()}

    def result(layout, device, mine, needed):
        place = np.unravel_index(device, tuple(mesh.shape.values()))
        where = ", ".join(f"{name} {int(n)}" for name, n in zip(mesh.shape, place, strict=True))
        mine, needed = (
            4 * sum((bottom - top) * (right - left) for top, bottom, left, right in some.values())
            for some in (mine, needed)
        )
        more = f"receives {said('received', needed - mine)} bytes before their use"
        received = more if needed > mine else "receives none"
        return (
            f"{escape(layout)}, device {device} ({where}): of the {whole:,} bytes of these "
            f"matrices it holds {said('held', mine)}, {received}, and "
            f"never sees {said('unseen', whole - needed)}."
        )

    def sums(used):
        summed = [n for n, m in matrices.items() if used[n][0][1] - used[n][0][0] < m.drawn[0]]
        at = [places[name][3:] for name in summed]
        return "".join(svg.text(x, y + 6, "Σ", "middle", 'font-size="18"') for x, y in at)

    controls = {
        "layout": Control("Layout", {title: title for title in layouts}),
        "device": Control(f"Device, 0 to {mesh.size - 1}", range(mesh.size), "range"),
    }
    alt = "The matrices of one layer: filled where the device holds them, pale with a dashed edge "
    alt += "where it receives them before use, empty elsewhere"
    inside = f'{outlines}<g id="@sums"></g><g id="@blocks"></g>'
    layout = f'<div class="pictures">{svg.picture("", _WIDE, height, alt, inside)}</div>{RESULT}'
    made = {
        "blocks": lambda mine, needed, device: _filled(places, mine, needed, svg.device(device)),
        "sends": lambda layout: _sends(layouts[layout][2]),
        "held": lambda layout: blocks_of(layouts[layout][0]),
        "used": lambda layout: blocks_of(layouts[layout][1]),
        "mine": lambda held, device: of_device(held, device),
        "needed": lambda used, device: of_device(used, device),
    }
    layout += '<div id="@sends"></div>'
    start = {"layout": chosen}
    return explorer(controls, layout, result, sums, start=start, shows="layout", **made)


def _arranged(rows):
    """({name: (x, y, scale)}, what every frame shows, the picture's height)."""
    scale = min(
        (_WIDE - _LEFT - _GAP * len(row)) / sum(m.drawn[1] for m in row.values())
        for row in rows.values()
    )
    places, parts, y = {}, [], 0
    for title, row in rows.items():
        parts.append(svg.text(0, y + 14, title, more='font-weight="bold"'))
        x, y = _LEFT, y + 40
        for name, matrix in row.items():
            high, wide = (round(n * scale, 1) for n in matrix.drawn)
            parts += svg.text(x, y - 6, name), svg.box(x, y, wide, high)
            places[name] = x, y, scale, x + wide + 12, y + high / 2
            x = round(x + wide + _GAP, 1)
        y = round(y + max(m.drawn[0] for m in row.values()) * scale + 14, 1)
    return places, "".join(parts), y


def _filled(places, held, used, colour):
    """What the device receives, pale, and above it what it holds."""

    def path(blocks, more):
        boxes = []
        for name, block in blocks.items():
            x, y, scale, *_ = places[name]
            top, bottom, left, right = (n * scale for n in block)
            boxes.append((x + left, y + top, right - left, bottom - top))
        return svg.path(boxes, colour, f"{svg.EDGE} {more}")

    dashed = 'class="used" fill-opacity=".28" stroke-dasharray="3 3"'
    return path(used, dashed) + path(held, 'class="held" stroke-width="1.5"')


def _sends(rows):
    head = "<tr><th>pass</th><th>collective</th><th>arrays</th><th>bytes sent</th></tr>"
    body = "".join(
        f"<tr><td>{escape(when)}</td><td>{escape(what)}</td><td>{count}</td><td>{size:,}</td></tr>"
        for when, what, count, size in rows
    )
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def _blocks(mesh, matrix, spec):
    """(top, bottom, left, right) of each device's block, in the order of the mesh."""
    indices = NamedSharding(mesh, spec).devices_indices_map(matrix.shape)
    cut = matrix.inputs
    return [
        (*_range(index[:cut], matrix.shape[:cut]), *_range(index[cut:], matrix.shape[cut:]))
        for index in (indices[device] for device in mesh.devices.flat)
    ]


def _range(index, sizes):
    """First and end of the entries at `index`, of axes that are drawn as one."""
    found = np.arange(math.prod(sizes)).reshape(sizes)[index].ravel()
    first, end = int(found[0]), int(found[-1]) + 1
    if end - first != found.size:
        raise ValueError(
            f"figures.layer_explorer: of axes {sizes} drawn as one, a block {index} is no "
            f"interval; cut the first of them alone."
        )
    return first, end
