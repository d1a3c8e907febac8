"""How often to save: the formula against a simulation, the browser against Python."""

import html
import math
import random

import pytest
from browser import (
    DESKTOP,
    NAME,
    PHONE,
    check_names_are_text,
    check_stands_alone,
    shown,
    shown_for_each,
    silent_page,
    write_page,
)

from shardwise import figures
from shardwise.figures import saving

STEPS = {"0.03 s": 0.03, "2 s": 2.0}
SAVES = {
    "5 ms, then 50 ms": (0.005, 0.05),
    "5 s, then 1 min": (5, 60),
    "1 min, then 1 h": (60, 3600),
}
FAILURES = {"20 min": 1200, "3.1 h": 54 * 24 / 419 * 3600}
CONTROLS = ["steps", "saves", "failures", "way", "interval"]


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


def test_is_small_fetches_nothing_and_may_stand_twice_on_a_page():
    check_stands_alone(*(explorer()._repr_html_() for _ in range(2)), 60_000, ids=9)


@pytest.fixture
def place(tmp_path):
    return write_page(tmp_path, explorer(), explorer())


def expected(data, values):
    choice = dict(zip(CONTROLS, values, strict=True))
    answer = saving.look(data, choice)
    drawn = saving.drawing.lanes_picture(data, answer)
    return [
        html.unescape(text)
        for text in (
            saving.describe(data, choice),
            drawn,
            saving.drawing.curve_picture(data, choice, answer),
        )
    ]


def test_random_choices_show_pythons_words_and_pictures(opened):
    draw, figure, data = (
        random.Random(0),
        opened.locator(".shardwise-figure").first,
        explorer().data,
    )
    sizes = [len(STEPS), len(SAVES), len(FAILURES), 2, len(saving.INTERVALS)]
    picked = [[draw.randrange(n) for n in sizes] for _ in range(120)]
    found = shown_for_each(figure, picked)
    for values, (lanes, curve, said) in zip(picked, map(_by_place, found), strict=True):
        assert [said, lanes, curve] == expected(data, values), values


def _by_place(texts):
    return texts[1], texts[2], texts[0]


def test_the_still_is_what_the_script_draws_first(browser, place, opened):
    alive = opened.locator(".shardwise-figure").first
    with silent_page(browser, viewport=DESKTOP, java_script_enabled=False) as page:
        page.goto(place)
        still = page.locator(".shardwise-figure").first
        assert still.get_by_role("status").is_visible()
        assert shown(still) == shown(alive)


def test_fits_a_phone_and_moves_by_keyboard(browser, place):
    with silent_page(browser, viewport=PHONE) as page:
        page.goto(place)
        figure = page.locator(".shardwise-figure").first
        moved = figure.get_by_role("slider", name="Steps between saves")
        moved.press("ArrowRight")
        assert figure.locator("[data-name=interval]").inner_text() == "200"
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_names_are_text(browser, tmp_path):
    figure = figures.saving_explorer({NAME: 1.0}, {NAME: (1, 2)}, {NAME: 3600}, 0)
    for _ in check_names_are_text(browser, tmp_path, figure):
        pass
