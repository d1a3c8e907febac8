"""The explorer of two cut products: what it says and draws."""

import itertools
import re

import pytest
from explorers import Explorer

from shardwise_book import figures
from shardwise_book.figures import blocks, blocks_drawing

CUTS = "columns", "rows"
SENDS = {"between": ("reduce-scatter", 1536), "after": ("all-reduce", 768)}


def block(n, first, second, sequence):
    error = 0.0 if first == "columns" else n / 10
    unsent = 0.5 if second == "rows" else None
    return figures.Block(n, first, second, sequence, 8192 // n, SENDS, error, unsent)


BLOCKS = [block(*c) for c in itertools.product((2, 4, 8), CUTS, CUTS, (False, True))]


def test_words_say_the_blocks_numbers():
    said = blocks.describe(BLOCKS[10])
    numbers = dict(re.findall(r'data-name="(\w+)">([\d,]+)<', said))
    assert numbers == {"sent": "2,304", "held": "2,048"}
    assert "reduce-scatter between, all-reduce at the end" in said


def test_wrong_choices_are_said_to_be_wrong_by_the_measured_error():
    rows_first = BLOCKS[14]  # n = 4, rows, rows
    assert 'data-name="error">40%<' in blocks.describe(rows_first, 1)
    assert 'data-name="error">50%<' in blocks.describe(rows_first, 2)
    assert "Right too" in blocks.describe(BLOCKS[10], 1)  # columns first: nothing to sum
    assert "No result" in blocks.describe(BLOCKS[8], 2)  # columns last: no y to compare


def test_a_band_for_each_device_a_pile_for_a_sum_and_grey_for_what_is_whole():
    names = "x", "x", "up", "hidden", "hidden", "down", "y", "y"
    plain = blocks.states(block(4, "columns", "rows", False))
    assert dict(zip(names[2:4], plain[2:4], strict=True)) == {"up": "columns", "hidden": "columns"}
    assert plain[6:] == ("partial", "whole")
    cut = blocks.states(block(4, "rows", "columns", True))
    assert cut == ("rows", "columns", "rows", "partial", "whole", "columns", "columns", "rows")
    for state, drawn in zip(cut, blocks_drawing.matrices(4, cut), strict=True):
        boxes = re.findall(r'width="([\d.]+)" height="([\d.]+)" fill="([^"]+)"', drawn)
        assert len({colour for *_, colour in boxes}) == len(boxes) == (1 if state == "whole" else 4)


def test_wants_every_combination_in_order():
    with pytest.raises(ValueError, match=r"expected 24 blocks.*got 24, or another order"):
        figures.block_explorer(BLOCKS[::-1])
    with pytest.raises(ValueError, match=r"expected 24 blocks.*got 23"):
        figures.block_explorer(BLOCKS[:-1])


def expected(data, at):
    *place, order = at
    frame = data["frames"][
        sum(i * stride for i, stride in zip(place, data["strides"], strict=True))
    ]
    drawn = (*frame["pieces"], frame["labels"][order])
    return [frame["words"][order], "".join(data["pieces"][i] for i in drawn)]


EXPLORER = Explorer(
    lambda: figures.block_explorer(BLOCKS, start=10),
    start=[1, 0, 1, 0, 0],
    controls={
        "Devices": 3,
        "First matrix by": 2,
        "Second matrix by": 2,
        "Tokens outside": 2,
        "Collectives": 3,
    },
    states=lambda data: [*itertools.product(*map(range, (3, 2, 2, 2, 3)))],
    expected=expected,
    read=lambda texts: [texts[0], re.search(r'-block">(.*)</g>', texts[1])[1]],
    bytes=60_000,
    ids=8,
)
