"""How the figure of saving is drawn: lanes of two saves, and a curve over the interval."""

import math
from collections.abc import Sequence

from shardwise_book.figures import palette
from shardwise_book.figures.interactive import Choice, Data

# The top of a kind's lane, and how it is filled; saving.js draws by the same list.
KINDS = {
    "steps": [22, f'fill="{palette.DEVICES[1]}"'],
    "lost": [22, f'fill="{palette.DEVICES[1]}" fill-opacity=".35"'],
    "copy": [50, f'fill="{palette.DEVICES[5]}"'],
    "write": [78, f'fill="{palette.DEVICES[4]}"'],
}
LINES = palette.LINES[:2]  # of the curve, and of the choice on it

_LEFT, _WIDE, _TALL = 44, 300, 22
_FOOT, _HIGH = 150, 110  # of the curve


def lanes(interval: float, copy: float, write: float, waits: bool) -> list[int]:
    """[place of the failure, then kind, x and width of each box]: two saves, and a failure.

    It comes as the second save is about to count: what was trained since the first is lost.
    """
    kind = list(KINDS).index
    saved = interval + copy  # the first copy is there
    again = saved + write if waits else saved
    ready = max(again + interval, saved + write)  # the second copy begins
    end = ready + copy + write
    boxes = [
        (kind("steps"), 0.0, interval),
        (kind("copy"), interval, copy),
        (kind("write"), saved, write),
        (kind("lost"), again, interval),
        (kind("copy"), ready, copy),
        (kind("write"), ready + copy, write),
    ]
    if not waits:
        boxes.append((kind("lost"), ready + copy, min(write, interval)))
    found = [_LEFT + _WIDE]
    for which, start, time in boxes:
        x = _LEFT + math.floor(_WIDE * start / end)
        found += [which, x, max(2, math.floor(_WIDE * time / end))]
    return found


def place(steps: float, offered: Sequence[int]) -> int:
    """Where so many steps are on the curve's logarithmic axis; beyond its ends, at the end."""
    steps = min(max(steps, offered[0]), offered[-1])
    return _LEFT + round(_WIDE * math.log(steps / offered[0]) / math.log(offered[-1] / offered[0]))


def lanes_picture(data: Data, answer: Data) -> str:
    """The lanes as the inside of an SVG."""
    end, *boxes = answer["lanes"]
    parts = [
        f'<text x="0" y="{top + 15}">{name}</text>'
        for name, (top, _) in zip(("train", "copy", "write"), data["kinds"][1:], strict=True)
    ]
    for i in range(0, len(boxes), 3):
        top, style = data["kinds"][boxes[i]]
        parts.append(
            f'<rect x="{boxes[i + 1]}" y="{top}" width="{boxes[i + 2]}" height="{_TALL}" '
            f"{style}></rect>"
        )
    parts.append(
        f'<path d="M{end} 16V104" stroke="currentColor" stroke-width="2"></path>'
        f'<text x="{end}" y="12" text-anchor="end">failure: the pale part is lost</text>'
    )
    return "".join(parts)


def curve_picture(data: Data, choice: Choice, answer: Data) -> str:
    """The share lost over the interval, clipped at four times its least."""
    shares, xs, i = answer["shares"], data["xs"], choice["interval"]
    most = max(4 * shares[answer["best"]], 1)
    ys = [_FOOT - _HIGH * min(share, most) // most for share in shares]
    line = "L".join(f"{x} {y}" for x, y in zip(xs, ys, strict=True))
    x, y, young, best = xs[i], ys[i], answer["young"][1], answer["best"]
    ticks = "".join(
        f'<text x="{xs[j]}" y="{_FOOT + 15}" text-anchor="middle">{data["intervals"][j]}</text>'
        for j in (0, 3, 6, 9, 12)
    )
    marks = "".join(
        f'<text x="{_LEFT - 4}" y="{_FOOT - y + 4}" text-anchor="end">'
        f"{n // 100}.{n % 100:02d}</text>"
        for y, n in ((0, 0), (_HIGH // 2, most // 2), (_HIGH, most))
    )
    return (
        f'<text x="0" y="12">% of the time lost, cut off at the top</text>{marks}'
        f'<path d="M{_LEFT} {_FOOT}H{_LEFT + _WIDE}" stroke="currentColor"></path>{ticks}'
        f'<text x="{_LEFT + _WIDE}" y="{_FOOT + 30}" text-anchor="end">steps between saves</text>'
        f'<path d="M{young} 34V{_FOOT}" stroke="currentColor" stroke-dasharray="3 4"></path>'
        f'<text x="{young}" y="30" text-anchor="middle">Young</text>'
        f'<path d="M{line}" fill="none" stroke="{LINES[0]}" stroke-width="2.5"></path>'
        f'<circle cx="{xs[best]}" cy="{ys[best]}" r="6" fill="none" stroke="currentColor" '
        f'stroke-width="1.5"></circle><circle class="chosen" cx="{x}" cy="{y}" r="5" '
        f'fill="{LINES[1]}"></circle>'
    )


def pictures(data: Data, choice: Choice, answer: Data) -> str:
    """Both pictures of a choice."""
    inside = {
        "lanes": ("0 0 372 108", lanes_picture(data, answer)),
        "curve": ("0 0 372 184", curve_picture(data, choice, answer)),
    }
    labels = {
        "lanes": "Two saves over time: training, copying to the host, writing, and a failure",
        "curve": "The share of time lost, over the steps between saves",
    }
    both = "".join(
        f'<svg id="@{name}" viewBox="{view}" style="max-width: 27rem" role="img" '
        f'aria-label="{labels[name]}">{drawn}</svg>'
        for name, (view, drawn) in inside.items()
    )
    return f'<div class="pictures">{both}</div>'
