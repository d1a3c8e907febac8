"""The explorer of a ring of attention: who has which tokens, and who waits for whom."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from html import escape

import numpy as np

from shardwise_book.figures import svg
from shardwise_book.figures.interactive import Control, Interactive, explorer, said

_SIDE, _LEFT, _WIDE, _ROW = 200, 58, 262, 24


def balance_explorer(
    work: Callable,
    orders: Mapping[str, Callable],
    masks: Mapping[str, tuple[Callable, Callable | None]],
    devices: Sequence[int],
    lengths: Sequence[int],
    sent: Callable,
    start: Mapping[str, int] | None = None,
) -> Interactive:
    """Choose order, devices, length and mask; see the scores that each device has in each hop.

    Args:
      work: a function such as `context.work`, called with (order, n, size, mask, documents).
      orders: {name: order}, functions of (size, n) such as `context.zigzag`.
      masks: {name: (mask, documents)}, where mask is a function of two `marks.Places`, and
        documents one of the size that returns each token's document, or None.
      devices: the numbers of devices on offer.
      lengths: the numbers of tokens on offer.
      sent: a function of (n, size) that returns {form: the bytes that a device sends, an int, or
        words that say why there are none}.
      start: {name: number of the option shown first}, of "order", "devices", "length" and "mask".
    """
    controls = {
        "order": Control("Order", list(orders)),
        "devices": Control("Devices", devices),
        "length": Control("Tokens", lengths),
        "mask": Control("Mask", list(masks)),
    }

    def visible(length, mask):
        """The mask, and the documents that tokens are of."""
        sees, documents = masks[mask]
        return sees, documents and documents(length)

    def every(devices, length, visible):
        """The scores by each order."""
        return {name: work(order, devices, length, *visible) for name, order in orders.items()}

    def result(scores, order, devices, length, mask):
        words = f"<b>{escape(order)}</b>, {length} tokens on {devices} devices, {escape(mask)}"
        listed = ", ".join(
            f"{size:,} bytes by {escape(form)}" if isinstance(size, int) else
            escape(f"{form}: {size}") for form, size in sent(devices, length).items()
        )  # fmt: skip
        takes, mean = int(scores.max(axis=0).sum()), scores.sum() / len(scores)
        return (
            f"{words}: {said('mean', round(mean))} scores for a device on average, and the ring "
            f"takes as long as {said('takes', str(takes))} of them. Devices wait for others "
            f"{said('waits', round(100 * (1 - mean / takes)))} % of the time. Each sends, forward: "
            f"{listed}."
        )

    def owners(order, devices, length):
        """The device of each token."""
        found = np.empty(length, int)
        found[orders[order](length, devices)] = np.repeat(np.arange(devices), length // devices)
        return found.tolist()

    def runs(length, visible):
        """For each query the keys that it sees: [(first, count), ...]."""
        found = []
        for query, row in enumerate(work(lambda n, _: np.arange(n), length, length, *visible)):
            keys = np.roll(row[::-1], query + 1)  # of step t at query - t
            edges = np.flatnonzero(np.diff([0, *keys, 0])).tolist()
            found.append([(a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=True)])
        return found

    alt = "A square of queries, from top to bottom, and keys, from left to right; what a query "
    alt += "sees has the colour of the device that has the query, and a strip above shows which "
    alt += "device has each key"
    layout = (
        f'<div class="pictures">{svg.picture("seen", _SIDE + 16, _SIDE + 28, alt, rem=15)}'
        f'<div id="@ring" style="flex: 1 1 19rem; max-width: 26rem"></div></div>'
    )
    functions = visible, every, result, owners, runs, _seen, _ring
    made = {"scores": lambda every, order: every[order]}
    return explorer(controls, layout, *functions, start=start, shows="ring", **made)


def _seen(owners, runs):
    """What each query sees, in the colour of its device; above, whose the keys are."""
    size, boxes = len(owners), {owner: [] for owner in sorted(set(owners))}
    for token, owner in enumerate(owners):
        boxes[owner] += [(token, -4, 1, 3), *((first, token, n, 1) for first, n in runs[token])]
    drawn = "".join(svg.path(found, svg.device(d), "") for d, found in boxes.items())
    turned = 'transform="translate(11 60) rotate(-90)"'
    frame = svg.box(0, 0, size, size, more=svg.EDGE + ' stroke-width=".2"')
    return (
        svg.text(15, 11, "keys")
        + svg.text(0, 0, "queries", "end", turned)
        + f'<g transform="translate(15 26) scale({_SIDE / size:.3f})">{drawn}{frame}</g>'
    )


def _ring(scores, every):
    """A row for each device over time; a step lasts as long as its slowest device."""
    starts = [0, *itertools.accumulate(scores.max(axis=0).tolist())]
    longest = max(int(one.max(axis=0).sum()) for one in every.values())
    high = _ROW * len(scores)
    names = rows = ""
    for device, row in enumerate(scores.tolist()):
        names += svg.text(0, device * _ROW + 32, f"device {device}")
        steps = [(x, count) for x, count in zip(starts, row, strict=False) if count]
        bars = [(x, device * _ROW + 3, count, 18) for x, count in steps]
        rows += svg.path(bars, svg.device(device), "")
    lines = "".join(f"M{x} 0v{high}" for x in starts)
    dashed = 'stroke-dasharray="2 2" vector-effect="non-scaling-stroke"'
    inside = (
        f"{svg.text(_LEFT, 11, 'time →')}{names}"
        f'<g transform="translate({_LEFT} 15) scale({_WIDE / longest:.3f} 1)">{rows}'
        f"{svg.line(lines, dashed)}</g>"
    )
    alt = "A row for each device over time: in each step of the ring a bar as long as its scores, "
    alt += "and a gap until the slowest device is ready"
    return svg.picture("", _LEFT + _WIDE, high + 18, alt, inside, 26)
