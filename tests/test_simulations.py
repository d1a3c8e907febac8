"""The simulations behind figures: overlap, a step of sharded training, and how often to save."""

import itertools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardwise import fsdp, layouts, marks, measure, mesh, objective
from shardwise_book import figures

LAYERS, FORWARD, BACKWARD = 5, 1.0, 2.0
WAYS = [("data", 0), ("data", 1), ("fsdp", 0), ("fsdp", 1), ("fsdp", 2)]


def run(strategy, ahead, message, layers=LAYERS):
    """A step whose messages all take as long; an all-reduce sends twice what a gather does."""
    reduce = message * (2 if strategy == "data" else 1)
    return figures.overlap(strategy, ahead, layers, FORWARD, BACKWARD, reduce, gather=message)


@pytest.mark.parametrize(("strategy", "ahead"), WAYS)
@pytest.mark.parametrize("message", [0.0, 0.3, 1.0, 1.7, 6.0])
@pytest.mark.parametrize("layers", [1, 2, LAYERS])
def test_a_step_is_never_shorter_than_either_lane(strategy, ahead, message, layers):
    found = run(strategy, ahead, message, layers)
    assert found.compute == pytest.approx(layers * (FORWARD + BACKWARD))
    assert found.network == pytest.approx(layers * message * (2 if strategy == "data" else 3))
    assert found.step >= max(found.compute, found.network) - 1e-9
    assert found.exposed == pytest.approx(0) or message
    for lane in found.passes, sorted(found.messages, key=lambda task: task.start):
        for before, after in itertools.pairwise(lane):
            assert after.start >= before.end - 1e-9


@pytest.mark.parametrize("message", [0.5, 1.0, 4.0])
def test_without_overlap_every_message_is_waited_for(message):
    assert run("data", 0, message).exposed == pytest.approx(LAYERS * 2 * message)
    alone = run("fsdp", 0, message)
    forward = alone.passes[LAYERS - 1].end  # no gradient travels yet
    assert forward == pytest.approx(LAYERS * (FORWARD + message))
    assert alone.whole == 1
    hidden = run("fsdp", 0, 0.5)  # each reduce-scatter fits behind a backward pass, but the last
    assert hidden.exposed == pytest.approx(2 * LAYERS * 0.5 + 0.5)


def test_messages_hide_where_compute_is_longer():
    """Only what has nothing to hide behind is waited for: the first gather, the last reduction."""
    assert run("data", 1, 1.0).exposed == pytest.approx(2.0)
    assert run("fsdp", 1, 1.0).exposed == pytest.approx(1.0 + 1.0)
    assert run("data", 1, 1.2).exposed > 2.4


@pytest.mark.parametrize("message", [0.5, 1.0, 2.0])
def test_looking_further_ahead_holds_more_and_waits_no_longer(message):
    runs = [run("fsdp", ahead, message) for ahead in (0, 1, 2)]
    assert [r.whole for r in runs][:2] == [1, 2] and runs[2].whole <= 3
    assert runs[0].exposed > runs[1].exposed >= runs[2].exposed - 1e-9
    for r, ahead in zip(runs, (0, 1, 2), strict=True):
        gathers, uses = r.messages, r.passes
        for place in range(ahead + 1, 2 * LAYERS):  # room first, then a gather
            assert gathers[place].start >= uses[place - ahead - 1].end - 1e-9
            assert gathers[place].end <= uses[place].start + 1e-9


def test_an_unknown_strategy_is_named():
    with pytest.raises(ValueError, match="strategy='zero', layers=2, ahead=0; expected one of"):
        figures.overlap("zero", 0, 2, 1, 2, 1)


# A step of sharded training

SIZES = {f"layer {i}": 4096 for i in range(3)}
PSI = 3 * 4096


def test_bytes_are_those_of_the_paper():
    """n = 4, and Ψ bytes of parameters: what is held at the start, at the peak, and sent."""
    for number, again, start, peak, passes in [
        (0, True, 3, 4, 2),
        (1, True, 3 / 4, 2 + 3 / 4, 2),
        (2, True, 3 / 4, 1 + 3 / 4 + 1 / 3 + 1 / 4 * 2 / 3, 2),
        (3, True, 3 / 4, 3 / 4 + 1 / 3 + 1 / 3 + 1 / 4 * 2 / 3, 3),
        (3, False, 3 / 4, 3 / 4 + 1 + 1 / 3, 2),
    ]:
        frames = figures.training_step([*SIZES.values()], 4, number, again)
        assert frames[0].held == frames[-1].held == start * PSI
        assert max(f.held for f in frames) == pytest.approx(peak * PSI)
        assert frames[-1].sent == passes * PSI * 3 / 4


def test_a_layer_is_whole_only_while_it_is_used():
    frames = figures.training_step([*SIZES.values()], 4, 3)
    assert max(sum(f.gathered) for f in frames) == 1
    computed = [f for f in frames if f.event.endswith("compute")]
    assert [f.layers[0] for f in computed] == [0, 1, 2, 2, 1, 0]
    assert all(f.gathered[f.layers[0]] for f in computed if f.event.startswith("forward"))
    assert sum(f.event.endswith("reduce-scatter") for f in frames) == 3
    assert frames[-2].gradients == ("shard",) * 3


@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.parametrize("again", [True, False])
def test_the_simulation_is_what_fsdp_compiles(number, again):
    """Arguments and ring bytes of a step of fsdp with Adam, on layers of these sizes."""
    line = mesh.make(fsdp=4)
    stack = {"w": np.ones((3, 32, 32), np.float32)}

    def loss(params, batch):
        def body(x, w):
            return jnp.tanh(x @ marks.use(w)["w"]), None

        body = jax.checkpoint(body) if again else body
        x, _ = jax.lax.scan(body, batch, params)
        return objective.Mean(jnp.sum(x**2), jnp.float32(len(x)))

    adam, size = optax.adam(1e-3), 0 if number else 10**9
    layout = layouts.Layout(line, fsdp="fsdp", min_size=size, stacked=lambda path: True)
    args = layouts.init(layout, lambda key: stack, adam, jax.random.key(0))
    rule = fsdp.rule(min_size=size, stacked=layout.stacked)
    run = fsdp.value_and_grad(loss, line, rule, zero=number or 3)

    def step(params, state, batch):
        mean, grads = run(params, batch)
        return mean, adam.update(grads, state, params)

    compiled = jax.jit(step).lower(*args, np.ones((4, 32), np.float32)).compile()
    frames = figures.training_step([4096] * 3, 4, number, again)
    held = set(measure.bytes_on_devices(args).values())
    assert held == {frames[0].held + 4}  # and Adam's count
    assert (
        measure.collectives(compiled).ring_bytes == frames[-1].sent + 2 * 8 * 3 / 4
    )  # total, count


def test_what_does_not_divide_is_named():
    with pytest.raises(ValueError, match=r"zero=4; expected 0, 1, 2 or 3"):
        figures.training_step([8], 4, 4)
    with pytest.raises(ValueError, match=r"10 bytes does not divide over 4 devices"):
        figures.fsdp_stepper({"layer": 10})


# How often to save


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
