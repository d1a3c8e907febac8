"""The explorer of sharded products: two specs in; layout, collective, bytes, HLO out."""

import itertools
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwise_book.figures import palette, svg
from shardwise_book.figures.interactive import RESULT, Control, Interactive, explorer

_HEADS = "left", "right", "result"
_KEY = """<p style="font-size: .88em">A bold frame is what a device holds from the start; it
multiplies what is in full colour. A colour is a device: blocks in the colours of others came by an
all-gather, and a result in stripes is the sum over all devices, after an all-reduce. Pale is what
is held and not used.</p>"""
_SIDE, _PITCH, _LEFTS = 64, 82, (60, 148, 236)  # a matrix is at most this wide and high


class Product(NamedTuple):
    """A compiled product of an i×j and a j×k matrix: its layouts, and what each device sends.

    `collective` is the kind, or "" where nothing is sent; `line` is its instruction in HLO.
    """

    sizes: tuple[int, int, int]
    left: PartitionSpec
    right: PartitionSpec
    result: PartitionSpec
    collective: str
    payload_bytes: int
    ring_bytes: int
    line: str


def product_explorer(mesh: Mesh, products: Sequence[Product], start: int = 0) -> Interactive:
    """Choose sizes and the layouts of both factors; see what the compiled product holds and sends.

    `mesh` has one axis. `products` holds each of the same pairs of specs for each of the sizes; the
    figure first shows number `start`. Raises ValueError if not.
    """
    sizes, lefts, rights = (list(dict.fromkeys(p[kind] for p in products)) for kind in range(3))
    found = {product[:3]: product for product in products}
    if len(found) != len(sizes) * len(lefts) * len(rights):
        raise ValueError(
            f"figures.product_explorer: expected products of each of {len(lefts)} specs times each "
            f"of {len(rights)} for each of {len(sizes)} sizes; got {len(found)}."
        )
    controls = {
        "sizes": Control("Sizes", {f"{i}×{j} times {j}×{k}": (i, j, k) for i, j, k in sizes}),
        "left": Control("Left factor", {_name(spec): spec for spec in lefts}),
        "right": Control("Right factor", {_name(spec): spec for spec in rights}),
    }
    parts = {
        "result": lambda **chosen: describe(found[tuple(chosen.values())]),
        "blocks": lambda **chosen: "".join(columns(mesh, found[tuple(chosen.values())])),
    }
    first = zip(controls, (sizes, lefts, rights), products[start][:3], strict=True)
    numbers = {name: values.index(chosen) for name, values, chosen in first}
    return explorer(controls, _layout(mesh), parts, numbers, shows="product")


def describe(product: Product) -> str:
    """What the compiler made of a product, as HTML; numbers carry names."""
    left, right, result = (f"<code>{_name(spec)}</code>" for spec in product[1:4])
    made = f'{left} times {right} gives <span data-name="spec">{result}</span>. '
    if not product.collective:
        return f'{made}<b data-name="collective">Nothing</b> is sent.'
    what = {0: "the left factor", 1: "the right factor", None: "the sum"}[_gathered(product)]
    return (
        f'{made}One <b data-name="collective">{product.collective}</b> of '
        f"{product.payload_bytes:,} bytes ({what}), for which each device sends "
        f'<b data-name="sent">{product.ring_bytes:,}</b> in a ring. In HLO: '
        f'<code style="overflow-wrap: anywhere">{escape(product.line, False)}</code>'
    )


def _gathered(product):
    """0 if the left factor was gathered, 1 if the right: the one whose cut the result lacks."""
    if product.collective != "all-gather":
        return None
    cut, kept = (tuple((*spec, None, None)[:2]) for spec in (product.left, product.result))
    return 0 if cut not in ((None, None), (kept[0], None)) else 1


def columns(mesh: Mesh, product: Product) -> list[str]:
    """SVG of the left factor, the right one and the result, device by device from top to bottom."""
    i, j, k = product.sizes
    shapes = (i, j), (j, k), (i, k)
    held = [_blocks(mesh, *of) for of in zip(product[1:4], shapes, strict=True)]
    return [_column(product, held, number, shapes[number]) for number in range(3)]


def _column(product, held, number, shape):
    scale, x = _SIDE / max(product.sizes), _LEFTS[number]
    fills: dict[tuple[str, float], str] = {}  # one path for each colour
    outlines = frames = ""
    for device, block in enumerate(held[number]):
        y = device * _PITCH + 26
        for owner, piece, strength in _pieces(product, held, number, device):
            key = palette.device(owner), strength
            fills[key] = fills.get(key, "") + _path(x, y, scale, piece)
        outlines += _path(x, y, scale, (0, shape[0], 0, shape[1]))
        frames += _path(x, y, scale, block) if number < 2 else ""
    drawn = [f'<path fill="{c}" fill-opacity="{o}" d="{d}"/>' for (c, o), d in fills.items()]
    line = 'fill="none" stroke="currentColor"'
    drawn.append(f'<path {line} stroke-opacity=".6" d="{outlines}"/>')
    return "".join(drawn) + f'<path {line} stroke-width="2" d="{frames}"/>'


def _pieces(product, held, number, device):
    """(device that it comes from, block, opacity) of what a device multiplies, or has made."""
    blocks, block = held[number], held[number][device]
    summed = product.collective == "all-reduce"
    if _gathered(product) == number:
        return [(owner, piece, 1) for owner, piece in enumerate(blocks)]
    if summed and number == 2:
        n = len(blocks)  # twice as many stripes as blocks, so that they look like none
        return [(i % n, strip, 1) for i, strip in enumerate(_strips(block, 2 * n))]
    if summed:  # only what meets the other factor's block, along the axis that is summed
        (top, bottom, first, last), (start, stop, left, right) = held[0][device], held[1][device]
        first, last = max(first, start), min(last, stop)
        used = [(top, bottom, first, last), (first, last, left, right)][number]
        return [(device, block, 0.3), (device, used, 1)] if used != block else [(device, block, 1)]
    return [(device, block, 1)]


def _blocks(mesh, spec, shape):
    """(top, bottom, left, right) of what each device holds, in the order of the mesh."""
    index = NamedSharding(mesh, spec).devices_indices_map(shape)
    return [
        tuple(edge for s, size in zip(index[d], shape, strict=True) for edge in s.indices(size)[:2])
        for d in mesh.devices.flat
    ]


def _strips(block, n):
    top, bottom, left, right = block
    edges = np.linspace(left, right, n + 1).tolist()
    return [(top, bottom, *pair) for pair in itertools.pairwise(edges)]


def _path(x, y, scale, block):
    top, bottom, left, right = (edge * scale for edge in block)
    return f"M{x + left:g} {y + top:g}h{right - left:g}v{bottom - top:g}h{left - right:g}z"


def _name(spec):
    return f"P({', '.join(repr(entry) for entry in (*spec, None, None)[:2])})"


def _layout(mesh):
    drawn = "".join(svg.text(x, 14, head) for x, head in zip(_LEFTS, _HEADS, strict=True))
    for device in range(mesh.size):
        y = device * _PITCH + 30 + _SIDE // 2
        drawn += svg.text(0, y, f"device {device}") + svg.text(132, y, "×") + svg.text(220, y, "=")
    alt = "The blocks of both factors and of the result on each device"
    inside = f'{drawn}<g id="@blocks"></g>'
    picture = svg.picture("", 304, mesh.size * _PITCH + 16, alt, inside)
    return f'<div class="pictures">{picture}<div style="flex: 1 1 15rem">{RESULT}{_KEY}</div></div>'
