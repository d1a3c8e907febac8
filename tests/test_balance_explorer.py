"""The explorer of balance: its numbers are `context.work`'s, and the browser shows Python's."""

import html
import itertools
import re

import numpy as np
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

from shardwise import context, figures, marks
from shardwise.figures import balance

ORDERS = {"contiguous": context.contiguous, "zigzag": context.zigzag}
DEVICES, LENGTHS = (2, 4), (16, 64)
MASKS = {
    "causal": (marks.causal, None),
    "packed": (marks.causal, lambda size: np.arange(size) // (size // 2)),
    "prefix": (lambda q, k: marks.causal(q, k) | (k.positions < 3) | (k.index == 9), None),
}
START = {"devices": 1, "length": 1}


def explorer(**changes):
    given = {"orders": ORDERS, "masks": MASKS, "start": START} | changes
    sent = lambda n, size: {"ring": 1000 * n + size, "Ulysses": "too few"}  # noqa: E731
    return figures.balance_explorer(
        context.work, devices=DEVICES, lengths=LENGTHS, sent=sent, **given
    )


def choices(data):
    for values in itertools.product(*(range(len(options)) for options in data["options"])):
        yield values, dict(zip(balance.KEYS, values, strict=True))


def test_says_the_work_on_the_critical_path():
    figure = explorer()
    said = balance.describe(figure.data, figure.data["start"])
    for name, text in {"mean": "520", "takes": "904", "waits": "42"}.items():
        assert f'data-name="{name}">{text}<' in said
    assert "4,064 bytes by ring, Ulysses: too few" in said and said in figure._repr_html_()
    zigzag = balance.describe(figure.data, figure.data["start"] | {"order": 1})
    assert 'data-name="takes">520<' in zigzag and 'data-name="waits">0<' in zigzag


def test_draws_what_is_seen_and_by_whom():
    data = explorer().data
    for _, choice in choices(data):
        n, size = DEVICES[choice["devices"]], LENGTHS[choice["length"]]
        order = [*ORDERS.values()][choice["order"]]
        mask, documents = [*MASKS.values()][choice["mask"]]
        drawn = np.full((size, size), -1)
        paths = re.findall(r'<path fill="#\w+" d="([^"]*)"', balance.seen(data, choice))
        for device, path in enumerate(paths):
            for first, row, count in re.findall(r"M(\d+) (\d+)h(\d+)v1", path):
                drawn[int(row), int(first) : int(first) + int(count)] = device
            keys = [int(key) for key in re.findall(r"M(\d+) -4", path)]
            assert keys == sorted(order(size, n).reshape(n, -1)[device])
            scores = context.work(order, n, size, mask, documents and documents(size))
            assert (drawn == device).sum() == scores[device].sum()
        index = np.arange(size)
        if choice["mask"] == 0:
            np.testing.assert_array_equal(drawn >= 0, index[None] <= index[:, None])


def test_a_bar_is_as_long_as_its_scores():
    data = explorer().data
    for _, choice in choices(data):
        scores = balance._chosen(data, choice)
        starts = np.cumsum([0, *np.max(scores, axis=0)])
        paths = re.findall(r'<path fill="#\w+" d="([^"]*)"', balance.ring(data, choice))
        for row, path in zip(scores, paths, strict=True):
            bars = [(int(x), int(n)) for x, n in re.findall(r"M(\d+) \d+h(\d+)v18", path)]
            expected = [(x, n) for x, n in zip(starts[:-1], row, strict=True) if n]
            assert bars == expected


def test_is_small_fetches_nothing_and_may_stand_twice_on_a_page():
    one, two = (explorer()._repr_html_() for _ in range(2))
    check_stands_alone(one, two, 60_000, ids=8)


@pytest.fixture
def place(tmp_path):
    return write_page(tmp_path, explorer())


def test_every_choice_shows_pythons_words_and_pictures(opened):
    data = explorer().data
    figure = opened.locator(".shardwise-figure").first
    every = [*choices(data)]
    texts = shown_for_each(figure, [values for values, _ in every])
    for (_, choice), found in zip(every, texts, strict=True):
        expected = [draw(data, choice) for draw in (balance.describe, balance.seen, balance.ring)]
        assert sorted(found) == sorted(map(html.unescape, expected)), choice


def test_the_still_is_what_the_script_draws_first(browser, place, opened):
    alive = opened.locator(".shardwise-figure").first
    with silent_page(browser, viewport=DESKTOP, java_script_enabled=False) as page:
        page.goto(place)
        assert shown(page.locator(".shardwise-figure").first) == shown(alive)


@pytest.mark.parametrize("width", [360, PHONE["width"]])
def test_fits_a_phone(browser, place, width):
    with silent_page(browser, viewport=PHONE | {"width": width}) as page:
        page.goto(place)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_names_are_text(browser, tmp_path):
    for _ in check_names_are_text(
        browser, tmp_path, explorer(orders={NAME: context.zigzag} | ORDERS)
    ):
        pass
