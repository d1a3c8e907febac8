"""The figure of one layer under several layouts: what a device holds, receives and never sees."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwise_book.figures import palette
from shardwise_book.figures.interactive import (
    STYLE,
    Data,
    Interactive,
    controls,
    select,
    slider,
    status,
)

Specs = Mapping[str, PartitionSpec]  # by the name of a matrix
_WIDE, _GAP, _LEFT = 330, 24, 4  # of the picture, in its own units


class Matrix(NamedTuple):
    """A weight of shape `shape`, of which the first `inputs` axes are contracted: its rows."""

    shape: tuple[int, ...]
    inputs: int = 1

    @property
    def drawn(self) -> tuple[int, int]:
        return math.prod(self.shape[: self.inputs]), math.prod(self.shape[self.inputs :])


class Layout(NamedTuple):
    """How the matrices are held, how they lie where they are used, and what a device sends.

    `sends` has rows (pass, collective, arrays, bytes that a device sends), all for one layer.
    """

    held: Specs
    used: Specs
    sends: Sequence[tuple[str, str, int, int]]


def layer_explorer(
    mesh: Mesh,
    rows: Mapping[str, Mapping[str, tuple[tuple[int, ...], int]]],
    layouts: Mapping[str, tuple[Specs, Specs, Sequence]],
    chosen: int = 0,
    itemsize: int = 4,
) -> Interactive:
    """Choose a layout and a device; see which block of each matrix it holds, and which it receives.

    `rows` maps the title of each row of the picture to its matrices in order of use, {name:
    `Matrix`}; `layouts` maps names to `Layout`s; plain tuples will do for both. The figure first
    shows layout number `chosen`, for device 0.

    Raises:
      ValueError: a spec whose block is no rectangle of the matrix as drawn.
    """
    data = table(mesh, rows, layouts, itemsize) | {"start": [chosen, 0]}
    first = data["frames"][chosen]
    made = select("layout", "Layout", list(layouts), chosen)
    made += slider("device", f"Device, 0 to {mesh.size - 1}", mesh.size - 1, 0)
    picture = (
        f'<div class="pictures"><svg id="@picture" viewBox="0 0 {_WIDE} {data["height"]}" '
        f'role="img" aria-label="The matrices of one layer: filled where the device holds them, '
        f'pale with a dashed edge where it receives them before use, empty elsewhere">'
        f'{data["outlines"]}<g id="@sums">{first["sums"]}</g>'
        f'<g id="@blocks">{first["devices"][0]["blocks"]}</g></svg></div>'
    )
    words = status(first["devices"][0]["words"]) + f'<div id="@sends">{first["sends"]}</div>'
    return Interactive("layer.js", data, STYLE + controls(made, "layout") + picture + words)


def table(
    mesh: Mesh,
    rows: Mapping[str, Mapping[str, tuple[tuple[int, ...], int]]],
    layouts: Mapping[str, tuple[Specs, Specs, Sequence]],
    itemsize: int = 4,
) -> Data:
    """All as HTML: by layout what is sent and summed, and by device its blocks and the words."""
    rows = {title: {name: Matrix(*m) for name, m in row.items()} for title, row in rows.items()}
    places, outlines, height = _arranged(rows)
    matrices = {name: matrix for row in rows.values() for name, matrix in row.items()}
    frames = []
    for title, layout in layouts.items():
        layout = Layout(*layout)
        held, used = (
            {name: _blocks(mesh, m, specs[name]) for name, m in matrices.items()}
            for specs in (layout.held, layout.used)
        )
        summed = [n for n, m in matrices.items() if _height(used[n][0]) < m.drawn[0]]
        sums = "".join(_sum(places[name]) for name in summed)
        devices = []
        for i in range(mesh.size):
            mine = [{name: blocks[name][i] for name in matrices} for blocks in (held, used)]
            words = _words(mesh, title, i, matrices, *mine, itemsize)
            blocks = _filled(places, *mine, palette.device(i))
            devices.append({"blocks": blocks, "words": words})
        frames.append({"sends": _sends(layout.sends), "sums": sums, "devices": devices})
    return {"frames": frames, "outlines": outlines, "height": height}


def _arranged(rows):
    """({name: (x, y, scale)}, what every frame shows, the picture's height)."""
    scale = min(
        (_WIDE - _LEFT - _GAP * len(row)) / sum(m.drawn[1] for m in row.values())
        for row in rows.values()
    )
    places, parts, y = {}, [], 0
    for title, row in rows.items():
        parts.append(f'<text x="0" y="{y + 14}" font-weight="bold">{escape(title)}</text>')
        x, y = _LEFT, y + 40
        for name, matrix in row.items():
            places[name] = x, y, scale
            high, wide = (round(n * scale, 1) for n in matrix.drawn)
            parts.append(f'<text x="{x}" y="{y - 6}">{escape(name)}</text>')
            parts.append(
                f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" fill="none" '
                f'stroke="currentColor"></rect>'
            )
            places[name] = (*places[name], x + wide + 12, y + high / 2)
            x = round(x + wide + _GAP, 1)
        y = round(y + max(m.drawn[0] for m in row.values()) * scale + 14, 1)
    return places, "".join(parts), y


def _sum(place):
    *_, x, y = place
    return f'<text class="sum" x="{x}" y="{y + 6}" text-anchor="middle" font-size="18">Σ</text>'


def _filled(places, held, used, colour):
    """What the device receives, pale, and above it what it holds."""

    def path(blocks, more):
        lines = []
        for name, block in blocks.items():
            x, y, scale, *_ = places[name]
            top, bottom, left, right = (round(n * scale, 1) for n in block)
            corner, wide = f"M{x + left:.1f} {y + top:.1f}", f"{right - left:.1f}"
            lines.append(f"{corner}h{wide}v{bottom - top:.1f}h-{wide}z")
        return f'<path d="{"".join(lines)}" fill="{colour}" stroke="currentColor" {more}></path>'

    dashed = 'class="used" fill-opacity=".28" stroke-dasharray="3 3"'
    return path(used, dashed) + path(held, 'class="held" stroke-width="1.5"')


def _words(mesh, title, i, matrices, held, used, itemsize):
    place = np.unravel_index(i, tuple(mesh.shape.values()))
    where = ", ".join(f"{name} {int(n)}" for name, n in zip(mesh.shape, place, strict=True))
    whole = sum(math.prod(m.drawn) for m in matrices.values()) * itemsize
    mine, needed = (sum(map(_area, blocks.values())) * itemsize for blocks in (held, used))
    received = needed - mine
    told = f'receives <b data-name="received">{received:,}</b> bytes before their use'
    return (
        f"{escape(title)}, device {i} ({where}): of the {whole:,} bytes of these matrices it holds "
        f'<b data-name="held">{mine:,}</b>, '
        f"{told if received else 'receives none'}, "
        f'and never sees <b data-name="unseen">{whole - needed:,}</b>.'
    )


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


def _height(block):
    return block[1] - block[0]


def _area(block):
    return _height(block) * (block[3] - block[2])
