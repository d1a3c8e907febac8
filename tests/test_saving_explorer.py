"""How often to save: the formula against a simulation."""

import itertools
import math
import random

import pytest
from browser import NAME
from explorers import Explorer

from shardwise_book import figures
from shardwise_book.figures import saving

STEPS = {"0.03 s": 0.03, "2 s": 2.0}
SAVES = {
    "5 ms, then 50 ms": (0.005, 0.05),
    "5 s, then 1 min": (5, 60),
    "1 min, then 1 h": (60, 3600),
}
FAILURES = {"20 min": 1200, "3.1 h": 54 * 24 / 419 * 3600}
CONTROLS = {
    "steps": "A step takes",
    "saves": "A save takes",
    "failures": "Mean time between failures",
    "way": "It is written",
    "interval": "Steps between saves",
}
SIZES = [len(STEPS), len(SAVES), len(FAILURES), 2, len(saving.INTERVALS)]


def simulated(interval, copy, write, mtbf, restart, failures=40_000, seed=0):
    """The share of time lost in a run with so many failures, event by event."""
    draw, useful, total = random.Random(seed), 0.0, 0.0
    for _ in range(failures):
        fails = draw.expovariate(1 / mtbf)
        total += fails
        now, written = restart, 0.0
        while True:
            now = max(now + interval, written) + copy
            written = now + write
            if written > fails:
                break
            useful += interval
    return 1 - useful / total


@pytest.mark.parametrize(
    "times",
    [(60, 5, 0, 1200, 0), (60, 5, 40, 1200, 90), (20, 2, 100, 900, 30), (600, 1, 5, 400, 9)],
)
def test_the_formula_is_what_happens(times):
    assert figures.share_lost(*times) == pytest.approx(simulated(*times), abs=0.006)


@pytest.mark.parametrize("copy", [0.1, 5.0])
def test_young_is_near_the_least(copy):
    mtbf = 50_000.0
    young = math.sqrt(2 * copy * mtbf)
    least = min(figures.share_lost(young * 1.02**i, copy, 10, mtbf) for i in range(-200, 200))
    first_order = math.sqrt(2 * copy / mtbf) + 10 / mtbf
    assert figures.share_lost(young, copy, 10, mtbf) == pytest.approx(least, rel=0.01)
    assert least == pytest.approx(first_order, rel=0.03)


def test_writing_behind_training_loses_less():
    for interval in 100, 1000, 10_000:
        behind = figures.share_lost(interval, 5, 60, 11_000, 300)
        assert 0 < behind < figures.share_lost(interval, 65, 0, 11_000, 300) < 1
    assert figures.share_lost(1e9, 1, 1, 10) == 1  # and no overflow


def explorer():
    return figures.saving_explorer(STEPS, SAVES, FAILURES, 300, {"steps": 1, "saves": 1})


def expected(data, at):
    choice = dict(zip(CONTROLS, at, strict=True))
    answer = saving.look(data, choice)
    return [
        saving.describe(data, choice),
        saving.drawing.lanes_picture(data, answer),
        saving.drawing.curve_picture(data, choice, answer),
    ]


EXPLORER = Explorer(
    explorer,
    start=[1, 1, 0, 0, 6],
    controls=dict(zip(CONTROLS.values(), SIZES, strict=True)),
    states=lambda data: [*itertools.product(*map(range, SIZES))],
    expected=expected,
    bytes=60_000,
    ids=9,
    named=lambda: figures.saving_explorer({NAME: 1.0}, {NAME: (1, 2)}, {NAME: 3600}, 0),
)
