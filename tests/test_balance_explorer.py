"""The explorer of balance: its numbers are `context.work`'s."""

import itertools
import re

import numpy as np
from browser import NAME
from explorers import Explorer

from shardwise import context, marks
from shardwise_book import figures
from shardwise_book.figures import balance

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


def expected(data, at):
    choice = dict(zip(balance.KEYS, at, strict=True))
    return [draw(data, choice) for draw in (balance.describe, balance.seen, balance.ring)]


EXPLORER = Explorer(
    explorer,
    start=[0, 1, 1, 0],
    controls={"Order": 2, "Devices": 2, "Tokens": 2, "Mask": 3},
    states=lambda data: [at for at, _ in choices(data)],
    expected=expected,
    bytes=60_000,
    ids=8,
    named=lambda: explorer(orders={NAME: context.zigzag} | ORDERS),
)
