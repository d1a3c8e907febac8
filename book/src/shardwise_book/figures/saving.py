"""The explorer of how often to save: lanes of one save, and the share of time lost."""

import math
from collections.abc import Mapping

from shardwise_book.figures import palette, svg
from shardwise_book.figures.interactive import Control, Interactive, explorer, said

INTERVALS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)  # steps
WAYS = {"in the background": False, "while training waits": True}
_LEFT, _WIDE, _FOOT, _HIGH = 44, 300, 150, 110  # of the pictures
_FILLS = {  # the top of a kind's lane, its colour and opacity
    "steps": (22, palette.DEVICES[1], ""),
    "lost": (22, palette.DEVICES[1], 'fill-opacity=".35"'),
    "copy": (50, palette.DEVICES[5], ""),
    "write": (78, palette.DEVICES[4], ""),
}


def share_lost(
    interval: float, copy: float, write: float, mtbf: float, restart: float = 0.0
) -> float:
    """The expected share of a long run that failures and saving take, between 0 and 1.

    All times are in one unit. After each `interval` of training, it stops for `copy`; a thread then
    takes `write`, and the step counts when it has ended. The next copy waits for it. Failures come
    at random, one in `mtbf` on average, also while restarting, which takes `restart`; what was done
    after the last step that counts is done again. With `write=0` this is the complete model of
    Daly (2006), from which Young's interval, √(2 · copy · mtbf) (1974), follows to first order.
    """
    cycle = max(interval, write) + copy
    first = restart + interval + copy + write  # until the first step counts
    return 1 - interval / mtbf * math.exp(-first / mtbf) / -math.expm1(-cycle / mtbf)


def saving_explorer(
    steps: Mapping[str, float],
    saves: Mapping[str, tuple[float, float]],
    failures: Mapping[str, float],
    restart: float,
    start: Mapping[str, int] | None = None,
) -> Interactive:
    """Choose what saving takes and how often failures come; see what saving every k steps costs.

    All times are in seconds. `steps` maps the words for a step's time to it, `saves` those for a
    save to (copying to the host, writing), `failures` those for the mean time between failures to
    it. `start` has the number of the option first shown, for "steps", "saves", "failures", "way" or
    "interval".
    """
    controls = {
        "steps": Control("A step takes", steps),
        "saves": Control("A save takes", saves),
        "failures": Control("Mean time between failures", failures),
        "way": Control("It is written", WAYS),
        "interval": Control("Steps between saves", INTERVALS, "range"),
    }

    def paid(saves, way):
        """(what training waits for, what is written behind it)."""
        return (sum(saves), 0.0) if way else saves

    def shares(steps, paid, failures):
        return [share_lost(n * steps, *paid, failures, restart) for n in INTERVALS]

    def result(shares, young, steps, paid, interval):
        cycle, least = max(interval * steps, paid[1]) + paid[0], min(shares)
        said_young = f"{young:,.0f}" if young >= 1 else "less than 1"
        return (
            f"A save every {said('interval', interval)} steps, or {span(interval * steps)} of "
            f"training: {said('lost', _percent(shares[INTERVALS.index(interval)]))} of the time is "
            f"lost. Training waits for saving in "
            f"{said('stall', _percent(1 - interval * steps / cycle))} of it; the rest goes to "
            f"failures. Of the intervals here, {said('best', INTERVALS[shares.index(least)])} "
            f"steps lose least, {said('least', _percent(least))}. Young's formula gives "
            f"{said('young', said_young)} steps."
        )

    def dot(points, interval):
        x, y = points[INTERVALS.index(interval)]
        return f'<circle cx="{x}" cy="{y}" r="5" fill="{palette.LINES[1]}"/>'

    told = "Two saves over time: training, copying to the host, writing, and a failure"
    lost = "The share of time lost, over the steps between saves"
    pictures = svg.picture("lanes", 372, 108, told, rem=27)
    pictures += svg.picture("", 372, 184, lost, '<g id="@curve"></g><g id="@dot"></g>', 27)
    layout = f'<div class="pictures">{pictures}</div>'
    made = {
        "young": lambda steps, paid, failures: math.sqrt(2 * paid[0] * failures) / steps,
        "start": {"interval": 6} | dict(start or {}),
    }
    return explorer(controls, layout, paid, shares, result, dot, _lanes, _points, _curve, **made)


def span(seconds: float) -> str:
    """A time in words, to two digits or whole."""
    units = (86400, "d"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")
    size, unit = next((one for one in units if seconds >= one[0]), units[-1])
    value = seconds / size
    return f"{value:.0f} {unit}" if value >= 9.95 else f"{value:.1f} {unit}"


def _percent(share):
    return f"{100 * share:.2f} %"


def _lanes(steps, saves, way, interval):
    """Two saves, and a failure as the second is about to count."""
    (copy, write), train = saves, interval * steps
    saved = train + copy  # the first copy is there
    again = saved + write if way else saved
    ready = max(again + train, saved + write)  # the second copy begins
    end = ready + copy + write
    boxes = [
        ("steps", 0, train),
        ("copy", train, copy),
        ("write", saved, write),
        ("lost", again, train),
        ("copy", ready, copy),
        ("write", ready + copy, write),
    ]
    if not way:
        boxes.append(("lost", ready + copy, min(write, train)))
    for name, y in (("train", 37), ("copy", 65), ("write", 93)):
        yield svg.text(0, y, name)
    for kind, begin, time in boxes:
        top, colour, more = _FILLS[kind]
        x, wide = round(_LEFT + _WIDE / end * begin), max(2, round(_WIDE / end * time))
        yield svg.box(x, top, wide, 22, colour, more)
    yield svg.line(f"M{_LEFT + _WIDE} 16V104", 'stroke-width="2"')
    yield svg.text(_LEFT + _WIDE, 12, "failure: the pale part is lost", "end")


def _place(steps):
    """Where so many steps are on the curve's logarithmic axis; beyond its ends, at the end."""
    steps = min(max(steps, INTERVALS[0]), INTERVALS[-1])
    return _LEFT + round(_WIDE * math.log(steps) / math.log(INTERVALS[-1]))


def _top(shares):
    """Where the curve is clipped: at four times its least."""
    return max(4 * min(shares), 1e-4)


def _points(shares):
    heights = (round(_HIGH * min(1, share / _top(shares))) for share in shares)
    return [(_place(n), _FOOT - high) for n, high in zip(INTERVALS, heights, strict=True)]


def _curve(shares, points, young):
    """The share lost over the interval, with the least, and Young's interval."""
    yield svg.text(0, 12, "% of the time lost, cut off at the top")
    for high in (0, 0.5, 1):
        mark = f"{100 * high * _top(shares):.2f}"
        yield svg.text(_LEFT - 4, _FOOT - high * _HIGH + 4, mark, "end")
    yield svg.line(f"M{_LEFT} {_FOOT}H{_LEFT + _WIDE}")
    for n in INTERVALS[::3]:
        yield svg.text(_place(n), _FOOT + 15, f"{n:,}", "middle")
    yield svg.text(_LEFT + _WIDE, _FOOT + 30, "steps between saves", "end")
    yield svg.line(f"M{_place(young)} 34V{_FOOT}", 'stroke-dasharray="3 4"')
    yield svg.text(_place(young), 30, "Young", "middle")
    course = "L".join(f"{x} {y}" for x, y in points)
    yield f'<path d="M{course}" fill="none" stroke="{palette.LINES[0]}" stroke-width="2.5"/>'
    x, y = points[shares.index(min(shares))]
    yield f'<circle cx="{x}" cy="{y}" r="6" fill="none" {svg.EDGE} stroke-width="1.5"/>'
