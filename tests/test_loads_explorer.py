"""Loads of experts: the browser against Python, and the page's numbers against the package's."""

import html
import random

import pytest
from browser import (
    DESKTOP,
    PHONE,
    check_stands_alone,
    shown,
    shown_for_each,
    silent_page,
    write_page,
)

from shardwise import figures
from shardwise.figures import loads

OFFERED = {
    "experts": {"4": 4, "16": 16},
    "per_token": {"1": 1, "2": 2},
    "capacity": {"1": 1.0, "none": None},
    "skew": {"even": 0, "skewed": 3},
    "devices": {"2": 2, "4": 4},
}
CONTROLS = list(loads.LABELS)


def route(count, k, capacity, skew):
    wanted = [10 * k + skew * i for i in range(count)]
    slots = None if capacity is None else 12 * k
    return wanted, [min(w, 1000 if slots is None else slots) for w in wanted], slots


def sent(count, k, capacity, devices):
    return (0 if capacity is None else 1000 * count * k), 5000 * devices * k


def explorer():
    return figures.loads_explorer(OFFERED, route, sent, {"experts": 1, "skew": 1})


def test_the_words_count_what_was_routed():
    data = explorer().data
    words = loads.describe(data, dict.fromkeys(CONTROLS, 0) | {"skew": 1})
    assert 'data-name="choices">58<' in words and 'data-name="dropped">12</b> (20.7 %)' in words
    assert 'data-name="exchanged">4,000<' in words and 'data-name="less">all-to-all<' in words
    words = loads.describe(data, dict.fromkeys(CONTROLS, 0) | {"capacity": 1})
    assert 'data-name="dropped">0</b> (0.0 %)' in words and 'data-name="less">gather<' in words
    assert "no all-to-all of fixed size" in words


def test_is_small_fetches_nothing_and_may_stand_twice_on_a_page():
    check_stands_alone(*(explorer()._repr_html_() for _ in range(2)), 30_000, ids=8)


@pytest.fixture
def place(tmp_path):
    return write_page(tmp_path, explorer(), explorer())


def test_every_choice_shows_pythons_words_and_picture(opened):
    data, draw = explorer().data, random.Random(0)
    picked = [[draw.randrange(2) for _ in CONTROLS] for _ in range(40)]
    found = shown_for_each(opened.locator(".shardwise-figure").first, picked)
    for values, (said, drawn) in zip(picked, found, strict=True):
        choice = dict(zip(CONTROLS, values, strict=True))
        expected = loads.describe(data, choice), loads.picture(data, choice)
        assert [said, drawn] == [html.unescape(text) for text in expected], values


def test_the_still_is_what_the_script_draws_first(browser, place, opened):
    alive = opened.locator(".shardwise-figure").first
    with silent_page(browser, viewport=DESKTOP, java_script_enabled=False) as page:
        page.goto(place)
        assert shown(page.locator(".shardwise-figure").first) == shown(alive)


def test_fits_a_phone_and_moves_by_keyboard(browser, place):
    with silent_page(browser, viewport=PHONE) as page:
        page.goto(place)
        figure = page.locator(".shardwise-figure").first
        chosen = figure.get_by_role("combobox", name="Capacity")
        chosen.press("ArrowDown")
        assert figure.locator("[data-name=less]").inner_text() == "gather"
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
