"""The interactive figure of two products on n devices: cuts in; collectives, bytes, errors out."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardwise_book.figures import blocks_drawing as drawing
from shardwise_book.figures.interactive import STYLE, Data, Interactive, controls, select, status

CUTS = ("columns", "rows")
ORDERS = (
    "in their places",
    "relu before them",
    "last one left out",
)
_NAMES = ("devices", "first", "second", "sequence")


class Block(NamedTuple):
    """relu(x @ up) @ down on n devices, with `up` cut by `first` and `down` by `second`.

    With `sequence` tokens are cut outside the products, else x and y are whole. `held` is bytes of
    both matrices on a device. `sends` maps "before", "between" and "after" to (collective, bytes
    that a device sends), where one is needed. `early` is the error if the nonlinearity comes first,
    `unsent` that without the last collective, both relative to the largest entry; None where what
    a device then has is no y at all.
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

    `blocks` has each combination of n, first, second and sequence, in this order; the figure first
    shows number `start`.

    Raises:
      ValueError: a combination is missing, or stands elsewhere.
    """
    data = table(blocks)
    frame, chosen = data["frames"][start], start
    labels = "Devices", "First matrix by", "Second matrix by", "Tokens outside"
    numbers = [f"{n}" for n in dict.fromkeys(block.n for block in blocks)]
    options = numbers, CUTS, CUTS, ("whole", "cut")
    made = ""
    for name, label, offered, stride in zip(_NAMES, labels, options, data["strides"], strict=True):
        made += select(name, label, offered, chosen // stride)
        chosen %= stride
    made += select("order", "Collectives", ORDERS, 0)
    drawn = "".join(data["pieces"][i] for i in (*frame["pieces"], frame["labels"][0]))
    still = controls(made, "choice") + drawing.picture(drawn, status(frame["words"][0]))
    return Interactive("blocks.js", data, STYLE + still)


def table(blocks: Sequence[Block]) -> Data:
    """Frames with the numbers of their pieces, which many share, and a sentence for each order."""
    sizes = list(dict.fromkeys(block.n for block in blocks))
    every = [(n, f, s, q) for n in sizes for f in CUTS for s in CUTS for q in (False, True)]
    if every != [block[:4] for block in blocks]:
        raise ValueError(
            f"figures.block_explorer: expected {len(every)} blocks, for each n both cuts of the "
            f"first matrix, of the second, and tokens whole and cut; got {len(blocks)}, or another "
            f"order."
        )
    pieces: dict[str, int] = {}

    def number(piece):
        return pieces.setdefault(piece, len(pieces))

    frames = [
        {
            "pieces": [number(piece) for piece in drawing.matrices(block.n, states(block))],
            "labels": [number(drawing.labels(block.sends, order)) for order in range(3)],
            "words": [describe(block, order) for order in range(3)],
        }
        for block in blocks
    ]
    strides = [8, 4, 2, 1]
    return {"frames": frames, "pieces": list(pieces), "names": _NAMES, "strides": strides}


def states(block: Block) -> tuple[str, ...]:
    """How each matrix lies, in the order in which they are drawn: "whole", "rows", "columns" or
    "partial"; of an activation, as it is and as the next product, or what follows, needs it.
    """
    outside = "rows" if block.sequence else "whole"
    needs = {"columns": "whole", "rows": "columns"}
    gives = {"columns": "columns", "rows": "partial"}
    first, second = block.first, block.second
    up = outside, needs[first], first, gives[first]
    return *up, needs[second], second, gives[second], outside


def describe(block: Block, order: int = 0) -> str:
    """What a choice costs, or what is wrong with it, as HTML; numbers carry names."""
    if order == 1:
        return _early(block)
    if order == 2:
        return _unsent(block)
    sent = sum(size for _, size in block.sends.values())
    words = {"before": "before the first product", "between": "between", "after": "at the end"}
    listed = ", ".join(f"{kind} {words[place]}" for place, (kind, _) in block.sends.items())
    return (
        f'<b data-name="verdict">Right.</b> Forward, a device sends '
        f'<b data-name="sent">{sent:,}</b> bytes: {listed}. Of both matrices it holds '
        f'<b data-name="held">{block.held:,}</b> bytes.'
    )


def _early(block):
    if block.early == 0:
        return (
            '<b data-name="verdict">Right too.</b> A device has finished entries of the hidden '
            "matrix, and the nonlinearity acts on each by itself."
        )
    return (
        f'<b data-name="verdict">Wrong</b> by <b data-name="error">{block.early:.0%}</b> of the '
        f"largest entry: relu of a part of a sum is no part of relu of the sum. The sum must come "
        f"first."
    )


def _unsent(block):
    if block.unsent is None:
        return (
            '<b data-name="verdict">No result.</b> A device has its columns of y, where what '
            f"follows expects {'its tokens' if block.sequence else 'all of them'}."
        )
    return (
        f'<b data-name="verdict">Wrong</b> by <b data-name="error">{block.unsent:.0%}</b> of the '
        f"largest entry: a device has its own summand of y, of the right shape, and others have "
        f"others."
    )
