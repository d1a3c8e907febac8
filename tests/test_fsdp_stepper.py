"""The FSDP stepper: its simulation against compiled programs, the browser against Python."""

import html
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
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

from shardwise import figures, fsdp, marks, measure, mesh, objective
from shardwise.figures import stepping, zero

LAYERS = {f"layer {i}": 4096 for i in range(3)}
PSI = 3 * 4096


@pytest.fixture(scope="module")
def data():
    return stepping.table(LAYERS)


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
    params = fsdp.place(stack, line, min_size=size, stacked=lambda path: True)
    run = fsdp.value_and_grad(loss, line, zero=number or 3)

    def step(params, state, batch):
        mean, grads = run(params, batch)
        return mean, fsdp.update(adam, grads, state, params)

    args = params, fsdp.init(adam, params), np.ones((4, 32), np.float32)
    compiled = jax.jit(step).lower(*args).compile()
    frames = figures.training_step([4096] * 3, 4, number, again)
    held = set(measure.bytes_on_devices(args[:2]).values())
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


def test_is_small_fetches_nothing_and_may_stand_twice_on_a_page():
    one, two = (figures.fsdp_stepper(LAYERS)._repr_html_() for _ in range(2))
    check_stands_alone(one, two, 60_000, ids=10)


# In the browser


@pytest.fixture
def place(tmp_path):
    return write_page(tmp_path, *(figures.fsdp_stepper(LAYERS) for _ in range(2)))


DRAWN = stepping.describe, stepping.grid_picture, stepping.course_picture


def agrees(figure, data):
    values = figure.locator("select, input").evaluate_all("all => all.map((e) => Number(e.value))")
    choice = dict(zip(("zero", "passes", "step"), values, strict=True))
    expected = [html.unescape(draw(data, choice)) for draw in DRAWN]
    assert shown(figure) == expected, choice
    return choice


def test_every_choice_shows_pythons_words_and_pictures(opened, data):
    every = list(choices(data))
    figure = opened.locator(".shardwise-figure").first
    found = shown_for_each(figure, [list(choice.values()) for choice in every])
    for choice, texts in zip(every, found, strict=True):
        expected = [html.unescape(draw(data, choice)) for draw in DRAWN]
        assert texts == expected, choice


def test_steps_by_keyboard_and_stays_within_the_run(opened, data):
    figure, other = opened.locator(".shardwise-figure").all()
    first = agrees(figure, data)
    assert first == {"zero": 3, "passes": 0, "step": 7}
    opened.keyboard.press("Tab")  # ZeRO's number
    opened.keyboard.press("Home")
    assert agrees(figure, data)["zero"] == 0
    opened.keyboard.press("Tab")  # again, or once
    opened.keyboard.press("Tab")
    opened.keyboard.press("Home")
    opened.keyboard.press("ArrowRight")
    assert agrees(figure, data)["step"] == 1
    opened.keyboard.press("Tab")
    for _ in range(3):
        opened.keyboard.press("Enter")  # Back
    assert agrees(figure, data)["step"] == 0
    assert figure.get_by_role("button", name="Back").get_attribute("aria-disabled") == "true"
    opened.keyboard.press("Tab")  # Play
    opened.keyboard.press("Tab")
    for _ in range(30):
        opened.keyboard.press("Enter")  # Next
    assert agrees(figure, data)["step"] == 8  # forward 3, backward 3, all-reduce, update
    assert agrees(other, data) == first


def test_the_still_is_what_the_script_draws_first(browser, place, opened):
    alive = opened.locator(".shardwise-figure").first
    with silent_page(browser, viewport=DESKTOP, java_script_enabled=False) as page:
        page.goto(place)
        still = page.locator(".shardwise-figure").first
        assert still.get_by_role("status").is_visible() and still.locator("svg").first.is_visible()
        assert still.get_by_role("combobox", name="ZeRO", exact=True).is_disabled()
        assert "Without JavaScript" in still.inner_text()
        assert shown(still) == shown(alive)


@pytest.mark.parametrize("width", [360, PHONE["width"]])
def test_fits_a_phone(browser, place, data, width):
    with silent_page(browser, viewport=PHONE | {"width": width}) as page:
        page.goto(place)
        figure = page.locator(".shardwise-figure").first
        figure.get_by_role("combobox", name="ZeRO", exact=True).select_option("1")
        assert agrees(figure, data)["zero"] == 1
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_names_are_text(browser, tmp_path):
    figure = figures.fsdp_stepper({"head": 80, NAME: 40}, devices=4)
    for alive in check_names_are_text(browser, tmp_path, figure):
        assert NAME in alive.get_by_role("status").inner_text()
