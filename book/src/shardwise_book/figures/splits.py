"""The figure of a split on paper: what one device holds, and what each axis takes."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from shardwise_book.figures import palette
from shardwise_book.figures.interactive import STYLE, Data, Interactive, controls, select, status

_WIDE, _ROW, _LEFT = 330, 34, 4  # of the picture, in its own units


class Load(NamedTuple):
    """What a split asks of one device: bytes that it holds, and seconds of compute in a step.

    `axes` maps the name of an axis to (bytes sent in a step, seconds on its links).
    """

    held: float
    compute: float
    axes: Mapping[str, tuple[float, float]]


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
    data = table(choices, loads, room)
    first = loads[chosen]
    if isinstance(first, str):
        raise ValueError(f"figures.split_explorer: chosen={chosen} is no split: {first}")
    made = "".join(
        select(f"choice{i}", escape(label), options, at)
        for i, ((label, options), at) in enumerate(zip(choices.items(), chosen, strict=True))
    )
    names = ", ".join(first.axes)
    picture = (
        f'<div class="pictures"><svg viewBox="0 0 {_WIDE} {_ROW * (1 + len(first.axes))}" '
        f'role="img" aria-label="Bars: the seconds of a step that one device computes, and that '
        f'each axis sends: {escape(names)}">{_bars(data["names"], _seconds(first))}</svg></div>'
    )
    words = status(_words(first, room))
    return Interactive(
        "splits.js", data | {"start": chosen}, STYLE + controls(made, "split") + picture + words
    )


def table(
    choices: Mapping[str, Sequence[str]],
    loads: Mapping[tuple[int, ...], Load | str],
    room: float,
) -> Data:
    """What the script shows: for each combination [words, seconds], in the order of counting."""
    sizes = [len(options) for options in choices.values()]
    places = [_place(i, sizes) for i in range(math.prod(sizes))]
    missing = [place for place in places if place not in loads]
    if missing:
        raise ValueError(f"figures.split_explorer: no load for {missing[0]}, of sizes {sizes}.")
    found = [loads[place] for place in places]
    names = next(["compute", *load.axes] for load in found if not isinstance(load, str))
    frames = [
        load if isinstance(load, str) else [_three(x) for x in _numbers(load)] for load in found
    ]
    return {
        "names": names,
        "sizes": sizes,
        "room": room / 1e9,
        "wide": _WIDE - 2 * _LEFT,
        "frames": frames,
    }


def _place(i, sizes):
    place = []
    for size in reversed(sizes):
        i, digit = divmod(i, size)
        place.append(digit)
    return tuple(reversed(place))


def _numbers(load):
    """GB held, seconds of compute, and of each axis GB sent and seconds."""
    numbers = [load.held / 1e9, load.compute]
    for sent, seconds in load.axes.values():
        numbers += [sent / 1e9, seconds]
    return numbers


def _seconds(load):
    return [load.compute, *(seconds for _, seconds in load.axes.values())]


def _three(x):
    """`x` to three digits, short in JSON."""
    found = round(float(f"{x:.3g}"), 4)
    return int(found) if found == int(found) else found


def _bars(names, seconds):
    longest, parts = max(map(_three, seconds)), []
    for i, (name, value) in enumerate(zip(names, map(_three, seconds), strict=True)):
        y, wide = i * _ROW, round((_WIDE - 2 * _LEFT) * value / longest, 1)
        colour = palette.GREY if i == 0 else palette.device(2 * i - 1)
        parts.append(
            f'<text x="{_LEFT}" y="{y + 13}">{escape(name)}: <tspan id="@said{i}">{value:g} s'
            f'</tspan></text><rect id="@bar{i}" x="{_LEFT}" y="{y + 18}" width="{wide}" '
            f'height="12" fill="{colour}" stroke="currentColor" stroke-width=".5"></rect>'
        )
    return "".join(parts)


def _words(load, room):
    held, compute, *rest = map(_three, _numbers(load))
    sent, seconds = rest[::2], rest[1::2]
    names = list(load.axes)
    slowest = max(range(len(names)), key=lambda i: seconds[i])
    fits = "fits" if held <= room / 1e9 else "does not fit"
    told = ", ".join(f"{escape(n)} {s:g} GB" for n, s in zip(names, sent, strict=True))
    over = "more" if seconds[slowest] > compute else "less"
    return (
        f'A device holds <b data-name="held">{held:g}</b> GB, which {fits} into {room / 1e9:g} GB. '
        f"In a step it sends: {told}. The axis that takes longest is "
        f'<b data-name="slowest">{escape(names[slowest])}</b>, with {seconds[slowest]:g} s, '
        f"{over} than the {compute:g} s of compute."
    )
