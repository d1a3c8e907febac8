"""The FSDP stepper: its simulation against compiled programs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from browser import NAME
from explorers import Explorer

from shardwise import fsdp, layouts, marks, measure, mesh, objective
from shardwise_book import figures
from shardwise_book.figures import stepping, zero

LAYERS = {f"layer {i}": 4096 for i in range(3)}
PSI = 3 * 4096


def choices(data):
    """Everything that the controls can say."""
    for number, runs in enumerate(data["runs"]):
        for passes, run in enumerate(runs):
            for step in range(len(run)):
                yield {"zero": number, "passes": passes, "step": step}


def test_bytes_are_those_of_the_paper():
    """n = 4, and Ψ bytes of parameters: what is held at the start, at the peak, and sent."""
    for number, again, start, peak, passes in [
        (0, True, 3, 4, 2),
        (1, True, 3 / 4, 2 + 3 / 4, 2),
        (2, True, 3 / 4, 1 + 3 / 4 + 1 / 3 + 1 / 4 * 2 / 3, 2),
        (3, True, 3 / 4, 3 / 4 + 1 / 3 + 1 / 3 + 1 / 4 * 2 / 3, 3),
        (3, False, 3 / 4, 3 / 4 + 1 + 1 / 3, 2),
    ]:
        frames = figures.training_step([*LAYERS.values()], 4, number, again)
        assert frames[0].held == frames[-1].held == start * PSI
        assert max(f.held for f in frames) == pytest.approx(peak * PSI)
        assert frames[-1].sent == passes * PSI * 3 / 4


def test_a_layer_is_whole_only_while_it_is_used():
    frames = figures.training_step([*LAYERS.values()], 4, 3)
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


def test_errors_are_named():
    with pytest.raises(ValueError, match=r"zero=4; expected 0, 1, 2 or 3"):
        zero.training_step([8], 4, 4)
    with pytest.raises(ValueError, match=r"10 bytes does not divide over 4 devices"):
        stepping.table({"layer": 10})


def test_still_says_the_right_numbers():
    still = figures.fsdp_stepper(LAYERS, step=1)._repr_html_().split("<script>")[0]
    said = dict(re.findall(r'data-name="(\w+)">([^<]+)<', still))
    assert said == {
        "step": "1",
        "event": "forward: all-gather, layer 0",
        "held": "13,312",  # three quarters of Ψ, and a layer
        "peak": "19,456",
        "sent": "3,072",
        "all": "27,648",
    }
    assert still.count('class="cell"') == 4 * 3 * 3
    # Of layer 0 each device holds four parts of the parameters, and one of everything else.
    assert still.count('height="22" fill="#') == 4 * (4 + 2 + 3)


def expected(data, at):
    choice = dict(zip(("zero", "passes", "step"), at, strict=True))
    drawn = stepping.describe, stepping.grid_picture, stepping.course_picture
    return [draw(data, choice) for draw in drawn]


EXPLORER = Explorer(
    lambda: figures.fsdp_stepper(LAYERS),
    start=[3, 0, 7],
    controls={"ZeRO": 4, "Backward pass, with ZeRO 3": 2, "Event": 14},
    states=lambda data: [[*choice.values()] for choice in choices(data)],
    expected=expected,
    bytes=60_000,
    ids=10,
    named=lambda: figures.fsdp_stepper({"head": 80, NAME: 40}, devices=4),
    told=lambda words: NAME in words,
    steps=True,
)
