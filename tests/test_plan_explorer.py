"""The figure of a plan: its numbers and words."""

import itertools

import pytest
from browser import NAME
from explorers import Explorer

from shardwise_book import figures
from shardwise_book.figures import Budget, plans

CHOICES = {"Chips": ["8", "64"], "Tensor": ["1", "2", "8"]}
GIB = 2**30


def budget(chips, tensor):
    if (chips, tensor) == (0, 2):
        return "8 chips, and <tensor> asks for 16."
    memory = {"state": (9 + 20 * chips) * GIB, "kept": 3.14159 * GIB, "logits": tensor * GIB}
    seconds = {"arithmetic": 1.23456, "fsdp": 0.4 / (1 + chips), "tensor": 0.9 * tensor}
    return Budget(f"tensor {tensor}", memory, 15.75 * GIB, seconds, 2.5, 0.4567)


BUDGETS = {place: budget(*place) for place in itertools.product(range(2), range(3))}


def figure(choices=CHOICES, budgets=BUDGETS, chosen=(0, 1)):
    return figures.plan_explorer(choices, budgets, chosen)


def test_words_say_what_fits_and_what_binds():
    fits, full = (figure(chosen=place).still for place in ((0, 1), (1, 2)))
    assert '"held">13.1</b> GiB of 15.8' in fits and '"fits">fits</b>' in fits
    assert '"binds">arithmetic</b>' in fits and '"mfu">45.7</b> %' in fits
    assert '"held">34.1</b>' in full and '"fits">does not fit</b>' in full
    assert '"binds">tensor</b>' in full


def test_every_combination_is_there():
    data = plans.table(CHOICES, BUDGETS)
    assert len(data["frames"]) == 6 and data["told"][data["frames"][2]] == BUDGETS[0, 2]
    assert data["frames"][4][1:6] == [29, 3.14, 1, 15.8, 1.23]
    with pytest.raises(ValueError, match=r"no budget for \(1, 0\)"):
        figure(budgets={place: x for place, x in BUDGETS.items() if place != (1, 0)})
    with pytest.raises(ValueError, match="is no layout: 8 chips"):
        figure(chosen=(0, 2))


def test_what_is_too_large_is_drawn_to_the_edge_and_no_further():
    data = plans.table(CHOICES, BUDGETS)
    drawn = plans.drawn(data, data["frames"][5][1:])
    assert 'x="4" y="18" width="322"' in drawn and 'x="326" y="18" width="0"' in drawn


def expected(data, at):
    frame = data["frames"][3 * at[0] + at[1]]
    if isinstance(frame, int):
        return [f'<span class="error">{data["told"][frame]}</span>', ""]
    name, *numbers = frame
    return [plans.words(data, name, numbers), plans.drawn(data, numbers)]


NAMED = {(0,): Budget(NAME, {NAME: 1e9}, 2e9, {NAME: 1}, 2, 0.5), (1,): NAME}
EXPLORER = Explorer(
    figure,
    start=[0, 1],
    controls={"Chips": 2, "Tensor": 3},
    states=lambda data: [*BUDGETS],
    expected=expected,
    bytes=20_000,
    ids=5,
    named=lambda: figure({NAME: [NAME, NAME]}, NAMED, (0,)),
    told=lambda words: NAME in words,
)
