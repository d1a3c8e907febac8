"""The explorers of sharded products: of one by two specs, of two in a row by two cuts."""

import itertools
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwise_book.figures import svg
from shardwise_book.figures.interactive import RESULT, Control, Interactive, axes, explorer, said
from shardwise_book.figures.pieces import Piece, pieces

_HEADS = "left", "right", "result"
_PRODUCT_KEY = """<p style="font-size: .88em">A bold frame marks what a device holds from the
start, full colour what it multiplies. A colour is a device: blocks in the colours of others came by
an all-gather, and a result in stripes is the sum over all devices, after an all-reduce. Pale is
what is held and not used.</p>"""
_SIDE, _PITCH, _LEFTS = 64, 82, (60, 148, 236)  # a matrix is at most this wide and high

CUTS = ("columns", "rows")
ORDERS = ("in their places", "relu before them", "last one left out")
_T, _E, _F = 64, 40, 80  # tokens, embed and the hidden width, as drawn
_PILE = 12  # by how much the last of a pile of summands is moved
_MATRICES = (  # name, left, top, width, height: x twice, up, hidden; then hidden, down, y twice
    ("x", 2, 34, _E, _T),
    ("x", 102, 34, _E, _T),
    ("up", 160, 46, _F, _E),
    ("hidden", 258, 34, _F, _T),
    ("hidden", 2, 160, _F, _T),
    ("down", 100, 152, _E, _F),
    ("y", 158, 160, _E, _T),
    ("y", 276, 160, _E, _T),
)
_LABELS = {"before": (72, 66), "between": (140, 122), "after": (244, 192)}
_ARROWS = "M48 66h46m-5 -4l5 4l-5 4", "M220 192h48m-5 -4l5 4l-5 4", "M130 108v22m-4 -5l4 5l4 -5"
_SIGNS = (151, 70, "×"), (249, 70, "="), (91, 196, "×"), (149, 196, "=")
_WHY = {  # an order is wrong, by its number
    1: "relu of a part of a sum is no part of relu of the sum. The sum must come first",
    2: "a device has its own summand of y, of the right shape, and others have others",
}
_KEY = """<p style="font-size: .88em">Grey is whole on every device. Bands are cut: each device has
the band of its colour. A pile is a sum that has not been taken: every device has a summand.</p>"""


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
    words = f'<div style="flex: 1 1 15rem">{RESULT}{_PRODUCT_KEY}</div>'
    made = {
        "product": lambda **chosen: found[tuple(chosen.values())],
        "result": describe_product,
        "blocks": lambda product: "".join(columns(mesh, product)),
    }
    layout = f'<div class="pictures">{picture}{words}</div>'
    shown = zip(controls, options, products[start], strict=False)
    numbers = {name: values.index(value) for name, values, value in shown}
    return explorer(controls, layout, start=numbers, shows="product", **made)


def describe_product(product: Product) -> str:
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


class Block(NamedTuple):
    """The numbers of y = relu(x @ up) @ down on n devices, with both matrices cut.

    `up` is cut by `first`, `down` by `second`, "rows" or "columns". With `sequence` tokens are cut
    outside the products, else x and y are whole. `held` is the bytes of both matrices on a device.
    `sends` maps "before", "between" and "after" to (collective, bytes that a device sends), where
    one is needed. `early` is the error if relu comes before the collective between, `unsent` that
    without the last collective, both relative to the largest entry; None where what a device then
    has is no y at all.
    """

    n: int
    first: str
    second: str
    sequence: bool
    held: int
    sends: Mapping[str, tuple[str, int]]
    early: float
    unsent: float | None


def block_explorer(blocks: Sequence[Block], start: int = 0) -> Interactive:
    """Choose devices, both cuts, whether tokens are cut, and where the collectives stand.

    `blocks` has a `Block` for each combination of n, first, second and sequence; the figure first
    shows number `start`.

    Raises:
      ValueError: a combination is missing.
    """
    found = {block[:4]: block for block in blocks}
    devices = dict.fromkeys(block.n for block in blocks)
    options = axes(found, "block_explorer", (devices, CUTS, CUTS, (False, True)))
    controls = {
        "n": Control("Devices", options[0]),
        "first": Control("First matrix by", options[1]),
        "second": Control("Second matrix by", options[2]),
        "sequence": Control("Tokens outside", {"whole": False, "cut": True}),
        "order": Control("Collectives", {name: i for i, name in enumerate(ORDERS)}),
    }

    alt = "Two products of matrices: for each matrix how it lies on the devices, and on the arrows "
    alt += "the collectives between"
    inside = "".join(svg.line(arrow, 'stroke-width="1.3"') for arrow in _ARROWS)
    inside += "".join(svg.text(*sign, "middle") for sign in _SIGNS)
    inside += '<g id="@matrices"></g><g id="@labels"></g>'
    layout = (
        f'<div class="pictures">{svg.picture("", 352, 250, alt, inside, 27)}'
        f'<div style="flex: 1 1 15rem">{RESULT}{_KEY}</div></div>'
    )

    def block(n, first, second, sequence):
        return found[n, first, second, sequence]

    shown = zip(controls, options, blocks[start], strict=False)  # the order is first at 0
    at = {name: values.index(value) for name, values, value in shown}
    return explorer(controls, layout, block, _matrices, _labels, start=at, result=describe_block)


def states(first: str, second: str, sequence: bool) -> tuple[str, ...]:
    """How each matrix lies, in the order in which they are drawn: "whole", "rows", "columns" or
    "partial"; of an activation, as it is and as the next product, or what follows, needs it.
    """
    outside = "rows" if sequence else "whole"
    needs = {"columns": "whole", "rows": "columns"}
    gives = {"columns": "columns", "rows": "partial"}
    up = outside, needs[first], first, gives[first]
    down = needs[second], second, gives[second], outside
    return up + down


def describe_block(block: Block, order: int = 0) -> str:
    """What a choice costs, or what is wrong with it, as HTML; numbers carry names."""
    if order == 1 and block.early == 0:
        return (
            f"{said('verdict', 'Right too.')} A device has finished entries of the hidden matrix, "
            f"and the nonlinearity acts on each by itself."
        )
    if order == 2 and block.unsent is None:
        return (
            f"{said('verdict', 'No result.')} A device has its columns of y, where what follows "
            f"expects {'its tokens' if block.sequence else 'all of them'}."
        )
    if order:
        error = said("error", f"{block.early if order == 1 else block.unsent:.0%}")
        return f"{said('verdict', 'Wrong')} by {error} of the largest entry: {_WHY[order]}."
    words = {"before": "before the first product", "between": "between", "after": "at the end"}
    listed = ", ".join(f"{kind} {words[place]}" for place, (kind, _) in block.sends.items())
    sent = sum(size for _, size in block.sends.values())
    return (
        f"{said('verdict', 'Right.')} Forward, a device sends {said('sent', sent)} bytes: {listed}"
        f". Of both matrices it holds {said('held', block.held)} bytes."
    )


def _matrices(n, first, second, sequence):
    for place, state in zip(_MATRICES, states(first, second, sequence), strict=True):
        yield matrix(n, state, *place)


def matrix(n: int, state: str, name: str, left: int, top: int, wide: int, high: int) -> str:
    """A matrix on n devices, in grey, in bands, or piled."""
    thin, drawn = svg.EDGE + ' stroke-width=".7"', svg.text(left, top - 6, name)
    if state == "whole":
        return drawn + svg.box(left, top, wide, high, "currentColor", f'{thin} fill-opacity=".22"')
    for i in reversed(range(n)):  # the first of a pile lies on top
        place = {
            "partial": (left + i * _PILE / (n - 1), top + i * _PILE / (n - 1), wide, high),
            "columns": (left + i * wide / n, top, wide / n, high),
            "rows": (left, top + i * high / n, wide, high / n),
        }[state]
        drawn += svg.box(*place, svg.device(i), thin)
    return drawn


def _labels(block, order):
    """The collectives beside their arrows; order 2 leaves the last out."""
    for place, (x, y) in _LABELS.items():
        kind, _ = block.sends.get(place, ("", 0))
        if place == "between":
            steps = ["relu", kind] if order == 1 else [kind, "relu"]
            yield svg.text(x, y, ", then ".join(filter(None, steps)))
            continue
        first, dash, last = kind.rpartition("-")
        lines = [first + dash, last] if dash else [last]
        lines = ["left", "out"] if order == 2 and place == "after" else lines
        yield from (svg.text(x, y - 22 + 13 * i, line, "middle") for i, line in enumerate(lines))
