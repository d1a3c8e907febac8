"""The ring stepper: Python against real permutes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from browser import DESKTOP, NAME, silent_page, write_page
from explorers import Explorer
from jax.sharding import PartitionSpec as P

from shardwise import mesh
from shardwise_book import figures
from shardwise_book.figures import ring

SIZES = range(2, 9)
PASSES = {"gather": 1, "reduce": 1, "all-reduce": 2, "exchange": 1}


def moves(blocks, slots, hop, add=False):
    """Every device sends its block `slots[0]` on, and puts what arrives into `slots[1]`."""
    n = len(blocks)
    pairs = [(d, (d + hop) % n) for d in range(n)]
    arrived = jax.lax.ppermute(blocks[slots[0] % n], "x", pairs)
    place = blocks.at[slots[1] % n]
    return place.add(arrived) if add else place.set(arrived)


def histories(marks):
    n, me = len(marks), jax.lax.axis_index("x")
    found = {name: [marks] for name in PASSES}
    found["gather"] = [jnp.where(jnp.arange(n) == me, marks, 0)]
    for k in range(n - 1):
        summing = (me - k - 1, me - k - 2)
        for name in "reduce", "all-reduce":
            found[name].append(moves(found[name][-1], summing, 1, add=True))
        found["exchange"].append(moves(found["exchange"][-1], (k + 1, k + 1), k + 1))
    for k in range(n - 1):
        for name in "gather", "all-reduce":
            found[name].append(moves(found[name][-1], (me - k, me - k - 1), 1))
    return {name: jnp.stack(states)[:, None] for name, states in found.items()}


@functools.cache
def runs():
    found = {name: {} for name in PASSES}
    for n in SIZES:
        specs = {"in_specs": P("x"), "out_specs": P(None, "x"), "check_vma": False}
        program = jax.jit(jax.shard_map(histories, mesh=mesh.make(x=n), **specs))
        marks = np.repeat(1 << np.arange(n), n).astype(np.int32)
        for name, history in program(marks).items():
            hops = range(1, n) if name == "exchange" else [1] * (len(history) - 1)
            pairs = [[(d, (d + hop) % n) for d in range(n)] for hop in hops]
            found[name][n] = np.array(history), pairs
    return found


@functools.cache
def table():
    return ring.table(runs())


def choices(data):
    """Everything that the controls can say."""
    for kind, found in enumerate(data["kinds"]):
        for n, run in zip(data["sizes"], found["runs"], strict=True):
            for step in range(len(run["held"])):
                yield {"kind": kind, "n": n, "step": step}


def test_bytes_are_those_of_the_formula():
    data = table()
    for choice in choices(data):
        answer, n = ring.look(data, choice), choice["n"]
        passes = PASSES[data["kinds"][choice["kind"]]["name"]]
        assert answer["steps"] == passes * (n - 1)
        assert answer["all"] * n == passes * data["payload"] * (n - 1)
        assert answer["sent"] == choice["step"] * answer["block"]


def test_moves_are_what_the_permutes_moved():
    """Play the moves on the first state, by hand, and arrive at the last."""
    data = table()
    for kind, (name, found) in enumerate(runs().items()):
        for n, (history, _) in found.items():
            held, adds = history[0].copy(), data["kinds"][kind]["adds"]
            for step in range(1, len(history)):
                before = held.copy()
                answer = ring.look(data, {"kind": kind, "n": n, "step": step})
                assert sorted(move[0] for move in answer["moves"]) == list(range(n))
                for source, target, slot, count in answer["moves"]:
                    mark = int(before[source, slot])
                    assert mark.bit_count() == count
                    held[target, slot] = mark | (before[target, slot] if adds else 0)
                np.testing.assert_array_equal(held, history[step], err_msg=f"{name}, {n}, {step}")
            whole = {"gather": n, "reduce": 1, "all-reduce": n, "exchange": n}[name]
            complete = held == 2**n - 1 if adds else held > 0
            assert set(complete.sum(axis=1)) == {whole}


def test_a_ring_that_does_not_close_is_refused():
    history, pairs = runs()["gather"][4]
    broken = history.copy()
    broken[2, 0] = [0, 0, 8, 0]  # device 0 has another's block, of one that did not send it
    with pytest.raises(ValueError, match=r"reduce on 4 devices, step 1: .*device 3.* held"):
        ring.table({"reduce": {4: (broken, pairs)}})


def test_still_says_the_right_numbers():
    still = (
        figures.ring_stepper(runs(), name="reduce", devices=8)._repr_html_().split("<script>")[0]
    )
    said = dict(re.findall(r'data-name="(\w+)">([^<]+)<', still))
    assert said == {
        "step": "1",
        "steps": "7",
        "sent": "105,000",
        "all": "735,000",
        "block": "105,000",
    }
    assert still.count('class="block"') == 64 and still.count('class="move"') == 8


def expected(data, at):
    choice = {"kind": at[0], "n": data["sizes"][at[1]], "step": at[2]}
    return [draw(data, choice) for draw in (ring.describe, ring.ring_picture)]


EXPLORER = Explorer(
    lambda: figures.ring_stepper(runs(), name="reduce"),
    start=[1, 2, 1],
    controls={"Collective": 4, "Devices": 7, "Step": 8},
    states=lambda data: [
        (choice["kind"], data["sizes"].index(choice["n"]), choice["step"])
        for choice in choices(data)
    ],
    expected=expected,
    bytes=100_000,
    ids=9,
    named=lambda: figures.ring_stepper({NAME: runs()["reduce"]}, name=NAME),
    told=lambda words: words.startswith(f"{NAME} on 4 devices"),
    steps=True,
)


# In the browser


def test_plays_to_the_end_and_pauses(browser, tmp_path):
    made = EXPLORER.figure()

    def step():
        return EXPLORER.agrees(figure, made.data)[-1]

    with silent_page(browser, viewport=DESKTOP) as page:
        page.clock.install()
        page.goto(write_page(tmp_path, made))
        figure = page.locator(".shardwise-figure")
        play = figure.locator("button").nth(1)
        page.clock.run_for(10_000)
        assert step() == 1  # nothing moves by itself
        play.press("Enter")
        assert play.inner_text() == "Pause"
        page.clock.run_for(1_000)
        assert step() == 2
        play.press("Enter")
        page.clock.run_for(10_000)
        assert step() == 2 and play.inner_text() == "Play"
        play.press("Enter")
        page.clock.run_for(10_000)
        assert step() == 3 and play.inner_text() == "Play"
        play.press("Enter")  # at the end: from the start
        assert step() == 0
        page.clock.run_for(1_000)
        figure.get_by_role("button", name="Back").click()  # the reader takes over
        page.clock.run_for(10_000)
        assert step() == 0 and play.inner_text() == "Play"


def test_less_motion_is_stepped_by_hand(browser, tmp_path):
    with silent_page(browser, reduced_motion="reduce") as page:
        page.goto(write_page(tmp_path, EXPLORER.figure()))
        buttons = page.locator(".shardwise-figure button:visible")
        assert buttons.all_inner_texts() == ["Back", "Next"]


def test_a_name_keeps_its_capitals(browser, tmp_path):
    named = {"all-Reduce v2": runs()["all-reduce"]}
    figure = figures.ring_stepper(named, name="all-Reduce v2")
    place = write_page(tmp_path, figure)
    with silent_page(browser) as page:
        page.goto(place)
        said = page.get_by_role("status").inner_text()
        assert said.startswith("All-Reduce v2 on 4 devices")
    assert "All-Reduce v2 on 4 devices" in figure.still
