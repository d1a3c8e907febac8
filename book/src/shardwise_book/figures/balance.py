"""The interactive figure of a ring of attention: who has which tokens, and who waits for whom."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from html import escape

import numpy as np

from shardwise_book.figures import palette
from shardwise_book.figures.interactive import (
    STYLE,
    Choice,
    Data,
    Interactive,
    controls,
    select,
    status,
)

OWN_STYLE = """<style>
.shardwise-figure svg.seen { max-width: 15rem; }
.shardwise-figure svg.ring { max-width: 26rem; flex: 1 1 19rem; }
</style>"""
_SIDE, _LEFT, _WIDE, _ROW = 200, 58, 262, 24
KEYS = ("order", "devices", "length", "mask")


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
      work: (order, n, size, mask, documents) to scores int [n, n], of a device in a step.
      orders: functions of (size, n) that permute a sequence.
      masks: for each name, a function of two places, and one of the size that gives each token's
        document, or None.
      sent: (n, size) to {form: bytes that a device sends, or why there are none}.
      start: number of the option shown first, for "order", "devices", "length" or "mask".
    """
    data = {
        "options": [[*orders], [f"{n}" for n in devices], [f"{s}" for s in lengths], [*masks]],
        "devices": list(devices),
        "lengths": list(lengths),
        "owners": [
            [[_owners(order, n, s) for s in lengths] for n in devices] for order in orders.values()
        ],
        "runs": [[_runs(work, mask, s) for mask in masks.values()] for s in lengths],
        "work": [
            [[[_work(work, order, n, s, m) for m in masks.values()] for s in lengths]
             for n in devices]
            for order in orders.values()
        ],
        "sent": [[_listed(sent(n, s)) for s in lengths] for n in devices],
        "colours": list(palette.DEVICES[: max(devices)]),
        "start": dict.fromkeys(KEYS, 0) | dict(start or {}),
    }  # fmt: skip
    labels = ("Order", "Devices", "Tokens", "Mask")
    made = "".join(
        select(key, label, options, data["start"][key])
        for key, label, options in zip(KEYS, labels, data["options"], strict=True)
    )
    shown = data["start"]
    pictures = (
        f'<div class="pictures"><svg id="@seen" class="seen" viewBox="0 0 {_SIDE + 16} '
        f'{_SIDE + 28}" role="img" aria-label="A square of queries, from top to bottom, and keys, '
        f"from left to right; what a query sees has the colour of the device that has the query, "
        f'and a strip above shows which device has each key">{seen(data, shown)}</svg>'
        f'<svg id="@ring" class="ring" viewBox="0 0 {_LEFT + _WIDE} {_height(data, shown)}" '
        f'role="img" aria-label="A row for each device over time: in each step of the ring a bar '
        f'as long as its scores, and a gap until the slowest device is ready">'
        f"{ring(data, shown)}</svg></div>"
    )
    still = controls(made, "ring") + pictures + status(describe(data, shown))
    return Interactive("balance.js", data, STYLE + OWN_STYLE + still)


def describe(data: Data, choice: Choice) -> str:
    """The result in words; numbers carry names."""
    at = [choice[key] for key in KEYS]
    scores = _chosen(data, choice)
    n, takes = len(scores), sum(max(step) for step in zip(*scores, strict=True))
    total = sum(map(sum, scores))
    mean, waits = _rounded(total, n), _rounded(100 * (n * takes - total), n * takes)
    order, _, length, mask = (
        escape(options[i]) for options, i in zip(data["options"], at, strict=True)
    )
    listed = data["sent"][at[1]][at[2]]
    return (
        f"<b>{order}</b>, {length} tokens on {n} devices, {mask}: "
        f'<b data-name="mean">{mean}</b> scores for a device on average, and the ring takes '
        f'as long as <b data-name="takes">{takes}</b> of them. Devices wait for others '
        f'<b data-name="waits">{waits}</b> % of the time. Each sends, '
        f"forward: {listed}."
    )


def seen(data: Data, choice: Choice) -> str:
    """What each query sees, in the colour of its device; above, whose the keys are."""
    size = data["lengths"][choice["length"]]
    owners = data["owners"][choice["order"]][choice["devices"]][choice["length"]]
    runs = data["runs"][choice["length"]][choice["mask"]]
    paths = [""] * data["devices"][choice["devices"]]
    for token, owner in enumerate(owners):
        paths[owner] += f"M{token} -4h1v3h-1z"
        for first, count in zip(runs[token][::2], runs[token][1::2], strict=True):
            paths[owner] += f"M{first} {token}h{count}v1h-{count}z"
    drawn = "".join(
        f'<path fill="{colour}" d="{path}"></path>'
        for colour, path in zip(data["colours"], paths, strict=False)
    )
    return (
        f'<text x="15" y="11">keys</text><text transform="translate(11 60) rotate(-90)" '
        f'text-anchor="end">queries</text><g transform="translate(15 26) scale({_SIDE // size}.'
        f'{_SIDE * 1000 // size % 1000:03d})">{drawn}<path d="M0 0h{size}v{size}h-{size}z" '
        f'fill="none" stroke="currentColor" stroke-width=".2"></path></g>'
    )


def ring(data: Data, choice: Choice) -> str:
    """A row for each device; a step lasts as long as its slowest device."""
    scores, longest = _chosen(data, choice), 0
    for order in range(len(data["work"])):
        others = _chosen(data, choice | {"order": order})
        longest = max(longest, sum(max(step) for step in zip(*others, strict=True)))
    steps = [max(step) for step in zip(*scores, strict=True)]
    starts = [0, *itertools.accumulate(steps)]
    high = _ROW * len(scores)
    lines = "".join(f"M{x} 0v{high}" for x in starts)
    rows = "".join(
        f'<path fill="{data["colours"][r]}" d="'
        + "".join(
            f"M{x} {r * _ROW + 3}h{count}v18h-{count}z"
            for x, count in zip(starts, row, strict=False)
            if count
        )
        + '"></path>'
        for r, row in enumerate(scores)
    )
    names = "".join(
        f'<text x="0" y="{r * _ROW + 32}">device {r}</text>' for r in range(len(scores))
    )
    thousandths = _WIDE * 1000 // longest
    scale = f"{thousandths // 1000}.{thousandths % 1000:03d}"
    return (
        f'<text x="{_LEFT}" y="11">time →</text>{names}<g transform="translate({_LEFT} 15) '
        f'scale({scale} 1)">{rows}<path d="{lines}" fill="none" stroke="currentColor" '
        f'stroke-dasharray="2 2" vector-effect="non-scaling-stroke"></path></g>'
    )


def _height(data, choice):
    return _ROW * data["devices"][choice["devices"]] + 18


def _rounded(numerator, denominator):
    """To the nearest integer, as the script does it too."""
    return (2 * numerator + denominator) // (2 * denominator)


def _chosen(data, choice):
    found = data["work"]
    for key in KEYS:
        found = found[choice[key]]
    return found


def _owners(order, n, size):
    found = np.empty(size, int)
    found[order(size, n)] = np.repeat(np.arange(n), size // n)
    return found.tolist()


def _work(work, order, n, size, mask):
    visible, documents = mask
    return work(order, n, size, visible, documents and documents(size)).tolist()


def _runs(work, mask, size):
    """For each query the keys that it sees: [first, count, first, count, ...]."""
    visible, documents = mask
    each = work(lambda size, n: np.arange(size), size, size, visible, documents and documents(size))
    found = []
    for query, row in enumerate(each):
        keys = np.roll(row[::-1], query + 1)  # of step t at query - t
        edges = np.flatnonzero(np.diff([0, *keys, 0]))
        starts, ends = edges[::2].tolist(), edges[1::2].tolist()
        pairs = zip(starts, ends, strict=True)
        found.append([x for a, b in pairs for x in (a, b - a)])
    return found


def _listed(sent):
    return ", ".join(
        f"{size:,} bytes by {escape(form)}" if isinstance(size, int) else escape(f"{form}: {size}")
        for form, size in sent.items()
    )
