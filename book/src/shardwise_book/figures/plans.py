"""The figure of a plan: what a device needs beside what it has, and what binds a step."""

import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from shardwise_book.figures import palette
from shardwise_book.figures.interactive import STYLE, Data, Interactive, controls, select, status

OWN_STYLE = """<style>
.shardwise-figure .key { white-space: nowrap; }
.shardwise-figure .key span { display: inline-block; width: .75em; height: .75em;
  border: 1px solid; }
</style>"""
_WIDE, _ROW, _BAR = 322, 34, 12
_ROOM = 0.72  # of the picture's width, where a device is full
_TIMES = 76  # where the bars of time begin


class Budget(NamedTuple):
    """What a layout asks of one device: bytes by what they are for, seconds of a step by term.

    `room` is what the device has, in bytes. `name` tells the layout, `step` its seconds, `mfu` the
    share of the chips' peak that it reaches at most. All budgets of a figure have the same terms.
    """

    name: str
    memory: Mapping[str, float]
    room: float
    seconds: Mapping[str, float]
    step: float
    mfu: float


def plan_explorer(
    choices: Mapping[str, Sequence[str]],
    budgets: Mapping[tuple[int, ...], Budget | str],
    chosen: tuple[int, ...],
) -> Interactive:
    """Choose a model, chips and a layout; see whether a device has room, and what binds the step.

    `choices` maps the label of each control to its options; `budgets` has a `Budget` for each
    combination of their numbers, or a sentence that says why there is none. The figure first shows
    the combination `chosen`.

    Raises:
      ValueError: a combination is missing, or the one shown first is none.
    """
    data = table(choices, budgets)
    first = budgets[chosen]
    if isinstance(first, str):
        raise ValueError(f"figures.plan_explorer: chosen={chosen} is no layout: {first}")
    made = "".join(
        select(f"choice{i}", escape(label), options, at)
        for i, ((label, options), at) in enumerate(zip(choices.items(), chosen, strict=True))
    )
    high = _TIMES + _ROW * len(first.seconds)
    alt = "Above, one bar of the memory that a device needs, in parts, and a line where it is full"
    alt += "; below, a bar of seconds for each of " + ", ".join(first.seconds)
    picture = (
        f'<div class="pictures"><svg id="@bars" viewBox="0 0 330 {high}" role="img" '
        f'aria-label="{escape(alt)}">{drawn(data, _numbers(first))}</svg></div>'
    )
    still = controls(made, "plan") + picture + status(words(data, first.name, _numbers(first)))
    return Interactive("plans.js", data, STYLE + OWN_STYLE + still)


def table(
    choices: Mapping[str, Sequence[str]], budgets: Mapping[tuple[int, ...], Budget | str]
) -> Data:
    """What the script shows: for each combination [name, numbers] or a sentence, in order."""
    sizes = [len(options) for options in choices.values()]
    places = list(itertools.product(*map(range, sizes)))
    missing = [place for place in places if place not in budgets]
    if missing:
        raise ValueError(f"figures.plan_explorer: no budget for {missing[0]}, of sizes {sizes}.")
    found = [budgets[place] for place in places]
    one = next(b for b in found if not isinstance(b, str))
    told = list(dict.fromkeys(b for b in found if isinstance(b, str)))
    frames = [told.index(b) if isinstance(b, str) else [b.name, *_numbers(b)] for b in found]
    colours = [palette.device(i) for i in range(len(one.memory))]
    return {
        "sizes": sizes,
        "parts": [*one.memory],
        "terms": [*one.seconds],
        "told": told,
        "colours": colours,
        "grey": palette.GREY,
        "binding": palette.device(3),
        "frames": frames,
    }


def _numbers(budget):
    """GiB of each part and of the room, seconds of each term and of the step, MFU in percent."""
    gib = [size / 2**30 for size in (*budget.memory.values(), budget.room)]
    return [_three(x) for x in (*gib, *budget.seconds.values(), budget.step, 100 * budget.mfu)]


def _three(x):
    """`x` to three digits, short in JSON."""
    found = round(float(f"{x:.3g}"), 4)
    return int(found) if found == int(found) else found


def drawn(data: Data, numbers: Sequence[float]) -> str:
    """The bars, as plans.js draws them too."""
    parts, terms = data["parts"], data["terms"]
    held, room, seconds = numbers[: len(parts)], numbers[len(parts)], numbers[len(parts) + 1 : -2]
    scale, at, boxes = _ROOM * _WIDE / room, 0.0, []
    for size, colour in zip(held, data["colours"], strict=True):
        start, end = _point(min(_WIDE, at * scale)), _point(min(_WIDE, (at + size) * scale))
        boxes.append(_box(4 + start, 18, end - start, 22, colour))
        at += size
    full, longest = _point(4 + _ROOM * _WIDE), max(seconds)
    boxes.append(f'<path d="M{full:g} 14v30" stroke="currentColor" stroke-width="2"></path>')
    boxes.append(_text(full, 11, "full", ' text-anchor="middle"') + _text(4, 11, "Memory"))
    boxes.append(_text(4, 64, "Seconds of a step"))
    for i, (term, value) in enumerate(zip(terms, seconds, strict=True)):
        y, colour = _TIMES + i * _ROW, palette.GREY if value < longest else palette.device(3)
        boxes.append(_text(4, y + 9, f"{escape(term)}: {value:g}"))
        boxes.append(_box(4, y + 14, _point(_WIDE * value / longest), _BAR, colour))
    return "".join(boxes)


def _point(x):
    return int(x * 10 + 0.5) / 10


def _box(x, y, wide, high, colour):
    place = f'x="{_point(x):g}" y="{y}" width="{_point(wide):g}" height="{high}"'
    return f'<rect {place} fill="{colour}" stroke="currentColor" stroke-width=".5"></rect>'


def _text(x, y, words, more=""):
    return f'<text x="{x:g}" y="{y}"{more}>{words}</text>'


def words(data: Data, name: str, numbers: Sequence[float]) -> str:
    """The result in words; numbers carry names."""
    parts, terms = data["parts"], data["terms"]
    held, room, seconds = numbers[: len(parts)], numbers[len(parts)], numbers[len(parts) + 1 : -2]
    keys = "".join(
        f'<span class="key"><span style="background:{colour}"></span> {escape(part)} {size:g}'
        "</span>, "
        for part, size, colour in zip(parts, held, data["colours"], strict=True)
    )
    # Left to right, as the script adds: the sum of recent Pythons compensates for rounding.
    total, (step, mfu) = _point(functools.reduce(operator.add, held)), numbers[-2:]
    fits = "fits" if total <= room else "does not fit"
    return (
        f'<b>{escape(name)}</b>: {keys}in all <b data-name="held">{total:g}</b> GiB of {room:g}, '
        f'which <b data-name="fits">{fits}</b>. A step takes {step:g} s, MFU at most '
        f'<b data-name="mfu">{mfu:g}</b> %; <b data-name="binds">'
        f"{escape(terms[seconds.index(max(seconds))])}</b> binds."
    )
