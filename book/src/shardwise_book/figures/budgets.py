"""Explorers of layouts on paper: what one device holds, and what the parts of a step take."""

import itertools
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from shardwise_book.figures import palette, svg
from shardwise_book.figures.interactive import Control, Interactive, Refusal, axes, explorer, said

_WIDE, _ROW, _LEFT, _ABOVE = 322, 34, 4, 76  # of the pictures, in their own units
_THIN = svg.EDGE + ' stroke-width=".5"'
_ROOM = 0.72  # of the width, where a device is full


class Load(NamedTuple):
    """What a split asks of one device.

    `held` is the bytes that it holds, `compute` the seconds that it computes in a step, and `axes`
    maps the name of an axis to (bytes sent in a step, seconds on its links).
    """

    held: float
    compute: float
    axes: Mapping[str, tuple[float, float]]

    @property
    def seconds(self) -> dict[str, float]:
        return {"compute": self.compute} | {name: s for name, (_, s) in self.axes.items()}


class Budget(NamedTuple):
    """What a layout, called `name`, asks of one device.

    `memory` maps what bytes are for to their number, and `room` is what the device has. `seconds`
    maps a term of a step to its seconds, and `step` is those of all of it; `mfu` is the share of
    the chips' peak that it reaches at most. All budgets of a figure have the same terms.
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

    `choices` maps the label of each control to its options; `loads` maps the options' numbers, a
    tuple with one for each control, to a `Load`, or to a sentence that says why there is none. All
    have the same axes. `room` is the memory of a device in bytes. The figure first shows the tuple
    `chosen`.

    Raises:
      ValueError: a combination is missing, or the one shown first is none.
    """

    def words(one):
        slowest, (_, seconds) = max(one.axes.items(), key=lambda axis: axis[1][1])
        fits = "fits" if one.held <= room else "does not fit"
        told = ", ".join(f"{escape(n)} {_three(b / 1e9)} GB" for n, (b, _) in one.axes.items())
        over = "more" if seconds > one.compute else "less"
        return (
            f"A device holds {said('held', _three(one.held / 1e9))} GB, which {fits} into "
            f"{room / 1e9:g} GB. In a step it sends: {told}. The axis that takes longest is "
            f"{said('slowest', slowest)}, with {_three(seconds)} s, {over} than the "
            f"{_three(one.compute)} s of compute."
        )

    def bars(one):
        colours = [palette.GREY, *(svg.device(2 * i + 1) for i in range(len(one.axes)))]
        return _bars(0, one.seconds, " s", colours)

    alt = "Bars: the seconds of a step that one device computes, and that each axis sends"
    return _explorer(choices, loads, chosen, words, bars, 0, alt, "split")


def plan_explorer(
    choices: Mapping[str, Sequence[str]],
    budgets: Mapping[tuple[int, ...], Budget | str],
    chosen: tuple[int, ...],
) -> Interactive:
    """Choose a model, chips and a layout; see whether a device has room, and what binds the step.

    `choices` maps the label of each control to its options; `budgets` maps the options' numbers, a
    tuple with one for each control, to a `Budget`, or to a sentence that says why there is none.
    The figure first shows the tuple `chosen`.

    Raises:
      ValueError: a combination is missing, or the one shown first is none.
    """

    def words(one):
        keys = "".join(
            f'<span class="key"><span style="background:{svg.device(i)}"></span> '
            f"{escape(part)} {_three(size / 2**30)}</span>, "
            for i, (part, size) in enumerate(one.memory.items())
        )
        total = sum(one.memory.values())
        fits = "fits" if total <= one.room else "does not fit"
        return (
            f"<b>{escape(one.name)}</b>: {keys}in all {said('held', f'{total / 2**30:.1f}')} "
            f"GiB of {_three(one.room / 2**30)}, which {said('fits', fits)}. A step takes "
            f"{_three(one.step)} s, MFU at most {said('mfu', _three(100 * one.mfu))} %; "
            f"{said('binds', max(one.seconds, key=one.seconds.get))} binds."
        )

    def bars(one):
        scale, full = _ROOM * _WIDE / one.room, _LEFT + _ROOM * _WIDE
        ends = [0, *itertools.accumulate(one.memory.values())]
        ends = [round(min(_WIDE, end * scale), 1) for end in ends]
        for i, (start, end) in enumerate(itertools.pairwise(ends)):
            yield svg.box(_LEFT + start, 18, end - start, 22, svg.device(i), _THIN)
        yield svg.line(f"M{full:g} 14v30", 'stroke-width="2"')
        yield svg.text(full, 11, "full", "middle")
        yield svg.text(_LEFT, 11, "Memory") + svg.text(_LEFT, 64, "Seconds of a step")
        longest = max(one.seconds.values())
        colours = [palette.GREY if s < longest else svg.device(3) for s in one.seconds.values()]
        yield from _bars(_ABOVE, one.seconds, "", colours)

    alt = "Above, a bar of the memory that a device needs, in parts, and a line where it is full; "
    alt += "below, a bar of seconds for each part of the machine"
    return _explorer(choices, budgets, chosen, words, bars, _ABOVE, alt, "plan")


def _explorer(choices, found, chosen, words, bars, top, alt, shows):
    """`words`, and `bars` of seconds from `top` on, are functions of what is found."""
    if isinstance(found[chosen], str):
        raise ValueError(f"figures: chosen={chosen} is shown first, and is none: {found[chosen]}")
    axes(found, f"{shows}_explorer", [range(len(options)) for options in choices.values()])
    controls = {
        f"choice{i}": Control(label, {option: k for k, option in enumerate(options)})
        for i, (label, options) in enumerate(choices.items())
    }

    def one(**place):
        at = tuple(place.values())
        return Refusal(found[at]) if isinstance(found[at], str) else found[at]

    picture = svg.picture("bars", 330, top + _ROW * len(found[chosen].seconds), alt)
    layout = f'<div class="pictures">{picture}</div>'
    start = dict(zip(controls, chosen, strict=True))
    return explorer(controls, layout, one, bars, start=start, shows=shows, result=words)


def _bars(top, seconds, unit, colours):
    """A bar for each of {name: seconds}, the longest as wide as the picture."""
    longest = max(seconds.values()) or 1
    for i, ((name, value), colour) in enumerate(zip(seconds.items(), colours, strict=True)):
        y = top + i * _ROW
        yield svg.text(_LEFT, y + 12, f"{name}: {_three(value)}{unit}")
        yield svg.box(_LEFT, y + 17, round(_WIDE * value / longest), 12, colour, _THIN)


def _three(x):
    """Three digits of `x`, without an exponent."""
    return f"{float(f'{x:.3g}'):.4f}".rstrip("0").rstrip(".")
