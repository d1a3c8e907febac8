"""The explorer of sharded products: two specs in; layout, collective, bytes, HLO out."""

import itertools
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwise_book.figures import svg
from shardwise_book.figures.interactive import RESULT, Control, Interactive, axes, explorer
from shardwise_book.figures.pieces import Piece, pieces

_HEADS = "left", "right", "result"
_KEY = """<p style="font-size: .88em">A bold frame is what a device holds from the start; it
multiplies what is in full colour. A colour is a device: blocks in the colours of others came by an
all-gather, and a result in stripes is the sum over all devices, after an all-reduce. Pale is what
is held and not used.</p>"""
_SIDE, _PITCH, _LEFTS = 64, 82, (60, 148, 236)  # a matrix is at most this wide and high


class Product(NamedTuple):
    """A compiled product of an i×j and a j×k matrix, and what each device sends for it.

    `sizes` is (i, j, k). `left`, `right` and `result` are PartitionSpecs. `collective` is the kind
    of what is sent, or "", and `line` its instruction in HLO. `payload_bytes` is the size of the
    full array, `ring_bytes` what a device sends of it in a ring.
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

    `mesh` has one axis. `products` has, for each of the sizes, a `Product` of each of the same
    pairs of specs; the figure first shows number `start`.

    Raises:
      ValueError: a pair is missing for some sizes.
    """
    found = {product[:3]: product for product in products}
    sizes, lefts, rights = options = axes(found, "product_explorer")
    controls = {
        "sizes": Control("Sizes", {f"{i}×{j} times {j}×{k}": (i, j, k) for i, j, k in sizes}),
        "left": Control("Left factor", {_name(spec): spec for spec in lefts}),
        "right": Control("Right factor", {_name(spec): spec for spec in rights}),
    }
    drawn = "".join(svg.text(x, 14, head) for x, head in zip(_LEFTS, _HEADS, strict=True))
    for device in range(mesh.size):
        y = device * _PITCH + 30 + _SIDE // 2
        drawn += svg.text(0, y, f"device {device}") + svg.text(132, y, "×") + svg.text(220, y, "=")
    alt = "The blocks of both factors and of the result on each device"
    picture = svg.picture("", 304, mesh.size * _PITCH + 16, alt, f'{drawn}<g id="@blocks"></g>')
    words = f'<div style="flex: 1 1 15rem">{RESULT}{_KEY}</div>'
    made = {
        "product": lambda **chosen: found[tuple(chosen.values())],
        "result": describe,
        "blocks": lambda product: "".join(columns(mesh, product)),
    }
    layout = f'<div class="pictures">{picture}{words}</div>'
    shown = zip(controls, options, products[start], strict=False)
    numbers = {name: values.index(value) for name, values, value in shown}
    return explorer(controls, layout, start=numbers, shows="product", **made)


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
    specs = zip(product[1:4], shapes, strict=True)
    held = [pieces(NamedSharding(mesh, spec), shape) for spec, shape in specs]
    scale, drawn = _SIDE / max(product.sizes), []
    for number, (rows, columns) in enumerate(shapes):
        fills: dict[tuple[str, float], list] = {}  # one path for each colour
        whole, frames = [], []
        for device, block in enumerate(held[number]):
            corner = _LEFTS[number], device * _PITCH + 26, scale
            whole.append(Piece(0, rows, 0, columns).box(*corner))
            frames += [block.box(*corner)] if number < 2 else []
            for owner, piece, strength in _pieces(product, held, number, device):
                key = svg.device(owner), strength
                fills.setdefault(key, []).append(Piece(*piece).box(*corner))
        paths = [svg.path(d, colour, f'fill-opacity="{o}"') for (colour, o), d in fills.items()]
        paths.append(svg.path(whole, more=svg.EDGE + ' stroke-opacity=".6"'))
        paths.append(svg.path(frames, more=svg.EDGE + ' stroke-width="2"'))
        drawn.append("".join(paths))
    return drawn


def _pieces(product, held, number, device):
    """(device that it comes from, block, opacity) of what a device multiplies, or has made."""
    blocks, block = held[number], held[number][device]
    summed = product.collective == "all-reduce"
    if _gathered(product) == number:
        return [(owner, piece, 1) for owner, piece in enumerate(blocks)]
    if summed and number == 2:
        n, (top, bottom, left, right) = len(blocks), block
        edges = np.linspace(left, right, 2 * n + 1).tolist()  # so that stripes look like no blocks
        strips = ((top, bottom, *pair) for pair in itertools.pairwise(edges))
        return [(i % n, strip, 1) for i, strip in enumerate(strips)]
    if summed:  # only what meets the other factor's block, along the axis that is summed
        (top, bottom, first, last), (start, stop, left, right) = held[0][device], held[1][device]
        first, last = max(first, start), min(last, stop)
        used = [(top, bottom, first, last), (first, last, left, right)][number]
        return [(device, block, 0.3), (device, used, 1)] if used != block else [(device, block, 1)]
    return [(device, block, 1)]


def _name(spec):
    return f"P({', '.join(repr(entry) for entry in (*spec, None, None)[:2])})"
