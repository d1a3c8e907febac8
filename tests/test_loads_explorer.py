"""Loads of experts: the numbers of the page against the package's."""

import itertools

from browser import NAME
from explorers import Explorer

from shardwise_book import figures
from shardwise_book.figures import loads

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


def explorer(offered=OFFERED):
    return figures.loads_explorer(offered, route, sent, {"experts": 1, "skew": 1})


def test_the_words_count_what_was_routed():
    data = explorer().data
    words = loads.describe(data, dict.fromkeys(CONTROLS, 0) | {"skew": 1})
    assert 'data-name="choices">58<' in words and 'data-name="dropped">12</b> (20.7 %)' in words
    assert 'data-name="exchanged">4,000<' in words and 'data-name="less">all-to-all<' in words
    words = loads.describe(data, dict.fromkeys(CONTROLS, 0) | {"capacity": 1})
    assert 'data-name="dropped">0</b> (0.0 %)' in words and 'data-name="less">gather<' in words
    assert "no all-to-all of fixed size" in words


def expected(data, at):
    choice = dict(zip(CONTROLS, at, strict=True))
    return [loads.describe(data, choice), loads.picture(data, choice)]


EXPLORER = Explorer(
    explorer,
    start=[1, 0, 0, 1, 0],
    controls={label: 2 for label in loads.LABELS.values()},
    states=lambda data: [*itertools.product(range(2), repeat=len(CONTROLS))],
    expected=expected,
    bytes=30_000,
    ids=8,
    named=lambda: explorer(OFFERED | {"skew": {"even": 0, NAME: 3}}),
)
