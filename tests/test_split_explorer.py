"""The figure of splits on paper: its numbers and words."""

import itertools
import re

import pytest
from browser import NAME
from explorers import Explorer, shown

from shardwise_book import figures
from shardwise_book.figures import Load, splits

CHOICES = {"Devices": ["8", "64"], "Tensor": ["1", "2", "8"]}
ROOM = 80e9


def load(devices, tensor):
    if (devices, tensor) == (0, 2):
        return "8 devices, and <tensor> asks for 16."
    sent = {"tensor": (tensor * 123.456e9, 0.2744 * tensor), "fsdp": (7e9, 1 / (1 + devices))}
    return Load(60e9 * (1 + devices), 0.75, sent)


LOADS = {place: load(*place) for place in itertools.product(range(2), range(3))}


def figure(choices=CHOICES, loads=LOADS, chosen=(0, 1)):
    return figures.split_explorer(choices, loads, chosen, ROOM)


def test_words_say_what_fits_and_what_is_slowest():
    fits, full = (figure(chosen=place).still for place in ((0, 1), (1, 2)))
    assert '"held">60</b> GB, which fits into 80 GB' in fits
    assert "tensor 123 GB, fsdp 7 GB" in fits
    assert '"slowest">fsdp</b>, with 1 s, more than the 0.75 s' in fits
    assert '"held">120</b> GB, which does not fit' in full
    assert '"slowest">tensor</b>, with 0.549 s, less than' in full


def test_every_combination_is_there():
    frames = splits.table(CHOICES, LOADS, ROOM)["frames"]
    assert len(frames) == 6 and frames[2] == LOADS[0, 2]
    assert frames[4] == [120, 0.75, 123, 0.274, 7, 0.5]
    with pytest.raises(ValueError, match=r"no load for \(1, 0\)"):
        figure(loads={place: x for place, x in LOADS.items() if place != (1, 0)})
    with pytest.raises(ValueError, match="is no split: 8 devices"):
        figure(chosen=(0, 2))


def expected(data, at):
    told = LOADS[tuple(at)]
    if isinstance(told, str):
        return [f'<span class="error">{told}</span>', [0.0] * 3, [""] * 3]
    return read([splits._words(told, ROOM), splits._bars(data["names"], splits._seconds(told))])


def read(texts):
    """The words, the widths of the bars, and the seconds that stand beside them."""
    widths = [float(width) for width in re.findall(r' width="([^"]+)"', texts[1])]
    return [texts[0], widths, re.findall("<tspan[^>]*>([^<]*)", texts[1])]


NAMED = {(0,): Load(1e9, 1, {NAME: (1e9, 2)}), (1,): NAME}
EXPLORER = Explorer(
    figure,
    start=[0, 1],
    controls={"Devices": 2, "Tensor": 3},
    states=lambda data: [*LOADS],
    expected=expected,
    read=read,
    same=lambda figure: read(shown(figure)),
    bytes=20_000,
    ids=10,
    named=lambda: figure({NAME: [NAME, NAME]}, NAMED, (0,)),
    told=lambda words: NAME in words,
)
