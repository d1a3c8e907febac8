"""Explorers of layouts on paper: what one device holds, and what the parts of a step take."""

import itertools
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from shardwise_book.figures import palette, svg
from shardwise_book.figures.interactive import RESULT, Control, Interactive, axes, explorer, said

_WIDE, _ROW, _LEFT = 322, 34, 4  # of the pictures, in their own units
_THIN = svg.EDGE + ' stroke-width=".5"'
_ROOM = 0.72  # of the width, where a device is full


class Load(NamedTuple):
    """What a split asks of one device: bytes that it holds, and seconds of compute in a step.

    `axes` maps the name of an axis to (bytes sent in a step, seconds on its links).
    """

    held: float
    compute: float
    axes: Mapping[str, tuple[float, float]]


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


def split_explorer(
    choices: Mapping[str, Sequence[str]],
    loads: Mapping[tuple[int, ...], Load | str],
    chosen: tuple[int, ...],
    room: float,
) -> Interactive:
    """Choose a model and a split of the devices; see what one holds, and which axis takes longest.

    `choices` maps the label of each control to its options; `loads` has a `Load` for each
    combination of their numbers, or a sentence that says why there is none. All have the same axes.
    `room` is the memory of a device in bytes. The figure first shows the combination `chosen`.

    Raises:
      ValueError: a combination is missing, or the one shown first is none.
    """

    def words(load):
        slowest, (_, seconds) = max(load.axes.items(), key=lambda one: one[1][1])
        fits = "fits" if load.held <= room else "does not fit"
        told = ", ".join(f"{escape(n)} {_three(b / 1e9)} GB" for n, (b, _) in load.axes.items())
        over = "more" if seconds > load.compute else "less"
        return (
            f"A device holds {said('held', _three(load.held / 1e9))} GB, which {fits} into "
            f"{room / 1e9:g} GB. In a step it sends: {told}. The axis that takes longest is "
            f"{said('slowest', slowest)}, with {_three(seconds)} s, {over} than the "
            f"{_three(load.compute)} s of compute."
        )

    def bars(load):
        seconds = {"compute": load.compute} | {name: s for name, (_, s) in load.axes.items()}
        colours = [palette.GREY, *(svg.device(2 * i + 1) for i in range(len(load.axes)))]
        return _bars(0, {name: (s, f"{_three(s)} s") for name, s in seconds.items()}, colours)

    alt = "Bars: the seconds of a step that one device computes, and that each axis sends"

    def high(load):
        return _ROW * (1 + len(load.axes))

    return _explorer(choices, loads, chosen, words, bars, high, alt, "split")


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

    def words(budget):
        keys = "".join(
            f'<span class="key"><span style="background:{svg.device(i)}"></span> '
            f"{escape(part)} {_three(size / 2**30)}</span>, "
            for i, (part, size) in enumerate(budget.memory.items())
        )
        total = sum(budget.memory.values())
        fits = "fits" if total <= budget.room else "does not fit"
        return (
            f"<b>{escape(budget.name)}</b>: {keys}in all {said('held', f'{total / 2**30:.1f}')} "
            f"GiB of {_three(budget.room / 2**30)}, which {said('fits', fits)}. A step takes "
            f"{_three(budget.step)} s, MFU at most {said('mfu', _three(100 * budget.mfu))} %; "
            f"{said('binds', max(budget.seconds, key=budget.seconds.get))} binds."
        )

    def bars(budget):
        scale, full = _ROOM * _WIDE / budget.room, _LEFT + _ROOM * _WIDE
        ends = [0, *itertools.accumulate(budget.memory.values())]
        ends = [round(min(_WIDE, end * scale), 1) for end in ends]
        parts = [
            svg.box(_LEFT + start, 18, end - start, 22, svg.device(i), _THIN)
            for i, (start, end) in enumerate(itertools.pairwise(ends))
        ]
        longest = max(budget.seconds.values())
        colours = [palette.GREY if s < longest else svg.device(3) for s in budget.seconds.values()]
        return (
            "".join(parts)
            + f'<path d="M{full:g} 14v30" {svg.EDGE} stroke-width="2"/>'
            + svg.text(full, 11, "full", "middle")
            + svg.text(_LEFT, 11, "Memory")
            + svg.text(_LEFT, 64, "Seconds of a step")
            + _bars(76, {name: (s, _three(s)) for name, s in budget.seconds.items()}, colours)
        )

    alt = "Above, a bar of the memory that a device needs, in parts, and a line where it is full; "
    alt += "below, a bar of seconds for each part of the machine"

    def high(budget):
        return 76 + _ROW * len(budget.seconds)

    return _explorer(choices, budgets, chosen, words, bars, high, alt, "plan")


def _explorer(choices, found, chosen, words, bars, high, alt, shows):
    """`words`, `bars` and the `high` picture that these need are functions of what is found."""
    if isinstance(found[chosen], str):
        raise ValueError(f"figures: chosen={chosen} is shown first, and is none: {found[chosen]}")
    axes(found, f"{shows}_explorer", [range(len(options)) for options in choices.values()])
    controls = {
        f"choice{i}": Control(label, {option: k for k, option in enumerate(options)})
        for i, (label, options) in enumerate(choices.items())
    }
    made = {
        "one": lambda **place: found[tuple(place.values())],
        "result": lambda one: (
            f'<span class="error">{escape(one)}</span>' if isinstance(one, str) else words(one)
        ),
        "bars": lambda one: "" if isinstance(one, str) else bars(one),
    }
    picture = svg.picture("bars", 330, high(found[chosen]), alt)
    layout = f'<div class="pictures">{picture}</div>{RESULT}'
    start = dict(zip(controls, chosen, strict=True))
    return explorer(controls, layout, start=start, shows=shows, **made)


def _bars(top, values, colours):
    """A bar for each of {name: (value, what is said of it)}, the longest as wide as the picture."""
    longest, parts = max(value for value, _ in values.values()) or 1, []
    for i, ((name, (value, told)), colour) in enumerate(zip(values.items(), colours, strict=True)):
        y = top + i * _ROW
        parts.append(svg.text(_LEFT, y + 12, f"{name}: {told}"))
        parts.append(svg.box(_LEFT, y + 17, round(_WIDE * value / longest), 12, colour, _THIN))
    return "".join(parts)


def _three(x):
    """Three digits of `x`, without an exponent."""
    return f"{float(f'{x:.3g}'):.4f}".rstrip("0").rstrip(".")
