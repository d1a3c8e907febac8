"""The interactive figure of how often to save: lanes of one save, and the share of time lost."""

import math
from collections.abc import Mapping

from shardwise_book.figures import saving_drawing as drawing
from shardwise_book.figures.interactive import (
    STYLE,
    Choice,
    Data,
    Interactive,
    controls,
    select,
    slider,
    status,
)

INTERVALS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)  # steps
WAYS = ("in the background", "while training waits")


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
    options = steps, saves, failures
    words = ("steps", "saves", "failures")
    shown = {name: 0 for name in words} | {"way": 0, "interval": 6} | dict(start or {})
    data = {
        "offered": {name: list(given) for name, given in zip(words, options, strict=True)},
        "intervals": [f"{n:,}" for n in INTERVALS],
        "spans": [[span(n * t) for n in INTERVALS] for t in steps.values()],
        "shares": _each(options, lambda *times: _shares(*times, restart)),
        "young": _each(options, _young),
        "stalls": _each(options[:2], _stalls),
        "lanes": _each(options[:2], _lanes),
        "xs": [drawing.place(n, INTERVALS) for n in INTERVALS],
        "kinds": list(drawing.KINDS.values()),
        "line": drawing.LINES,
        "start": shown,
    }
    said = status(describe(data, shown))
    return Interactive("saving.js", data, STYLE + _controls(data) + _still(data) + said)


def _each(options, made):
    """`made(way, ...)` for both ways of writing, and each of the times on offer."""
    ways = range(len(WAYS))
    return [_nest(options, lambda *times, way=way: made(way, *times)) for way in ways]


def _nest(options, made):
    if not options:
        return made()
    first, *rest = options
    return [_nest(rest, lambda *t, value=value: made(value, *t)) for value in first.values()]


def _paid(way, save):
    """(what training waits for, what is written behind it)."""
    copy, write = save
    return (copy + write, 0.0) if way else (copy, write)


def _shares(way, step, save, mtbf, restart):
    """In ten-thousandths, for each interval."""
    paid = _paid(way, save)
    return [round(1e4 * share_lost(n * step, *paid, mtbf, restart)) for n in INTERVALS]


def _young(way, step, save, mtbf):
    """[steps in words, place on the axis] of Young's interval."""
    n = math.sqrt(2 * _paid(way, save)[0] * mtbf) / step
    return [f"{n:,.0f}" if n >= 1 else "less than 1", drawing.place(n, INTERVALS)]


def _stalls(way, step, save):
    copy, write = _paid(way, save)
    found = []
    for n in INTERVALS:
        cycle = max(n * step, write) + copy
        found.append(round(1e4 * (1 - n * step / cycle)))
    return found


def _lanes(way, step, save):
    return [drawing.lanes(n * step, *save, bool(way)) for n in INTERVALS]


def span(seconds: float) -> str:
    """A time in words, to two digits or whole."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if seconds >= size or unit == "ms":
            value = seconds / size
            return f"{value:.0f} {unit}" if value >= 9.95 else f"{value:.1f} {unit}"
    raise AssertionError


def percent(share: int) -> str:
    """A share in ten-thousandths, in words."""
    return f"{share // 100}.{share % 100:02d} %"


def look(data: Data, choice: Choice) -> Data:
    """All about a choice, as saving.js finds it too."""
    way, step, save, failure = (choice[n] for n in ("way", "steps", "saves", "failures"))
    shares = data["shares"][way][step][save][failure]
    return {
        "shares": shares,
        "best": shares.index(min(shares)),
        "stall": data["stalls"][way][step][save][choice["interval"]],
        "young": data["young"][way][step][save][failure],
        "lanes": data["lanes"][way][step][save][choice["interval"]],
    }


def describe(data: Data, choice: Choice) -> str:
    """The result in words; numbers carry names."""
    answer, i = look(data, choice), choice["interval"]
    best = answer["best"]
    return (
        f'A save every <b data-name="interval">{data["intervals"][i]}</b> steps, or '
        f"{data['spans'][choice['steps']][i]} of training: "
        f'<b data-name="lost">{percent(answer["shares"][i])}</b> of the time is lost. Training '
        f'waits for saving in <b data-name="stall">{percent(answer["stall"])}</b> of it; the rest '
        f"goes to failures. Of the intervals here, "
        f'<b data-name="best">{data["intervals"][best]}</b> steps lose least, '
        f'<b data-name="least">{percent(answer["shares"][best])}</b>. Young\'s formula gives '
        f'<b data-name="young">{answer["young"][0]}</b> steps.'
    )


def _still(data):
    return drawing.pictures(data, data["start"], look(data, data["start"]))


def _controls(data):
    labels = {
        "steps": "A step takes",
        "saves": "A save takes",
        "failures": "Mean time between failures",
    }
    made = [select(n, labels[n], data["offered"][n], data["start"][n]) for n in labels]
    made.append(select("way", "It is written", WAYS, data["start"]["way"]))
    last = len(INTERVALS) - 1
    made.append(slider("interval", "Steps between saves", last, data["start"]["interval"]))
    return controls("".join(made), "choice")
