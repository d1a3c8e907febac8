"""The graph of a traced program: what lights up is what was given, and all of it."""

import re

import jax
import jax.numpy as jnp
import pytest
from browser import (
    DESKTOP,
    NAME,
    PHONE,
    check_names_are_text,
    check_stands_alone,
    silent_page,
    write_page,
)

from shardwise import cut, figures
from shardwise.figures import slices, slices_layout


def product(x, w, cotangent):
    y, pull = jax.vjp(jnp.matmul, x, w)
    return y, *pull(cotangent)


INPUTS, OUTPUTS = ["x", "w", "cotangent"], ["y", "to x", "to w"]


@pytest.fixture(scope="module")
def traced():
    return jax.make_jaxpr(product)(jnp.ones((2, 3)), jnp.ones((3, 3)), jnp.ones((2, 3)))


@pytest.fixture(scope="module")
def chosen(traced):
    return {
        kind: cut.needed(traced.eqns, [v], ())[0]
        for kind, v in zip("FIW", traced.jaxpr.outvars, strict=True)
    }


@pytest.fixture
def figure(traced, chosen):
    return figures.slice_graph(traced, chosen, INPUTS, OUTPUTS, start=1)


def test_a_slice_lights_what_it_computes_and_outlines_what_it_reads(traced, chosen):
    data = slices.table(traced, chosen, INPUTS, OUTPUTS, None, 0)
    found = [
        tuple([data["names"][node] for node in one[state]] for state in ("on", "read"))
        for one in data["slices"]
    ]
    assert found == [
        (["dot_general", "y"], ["x", "w"]),
        (["dot_general", "to x"], ["w", "cotangent"]),
        (["dot_general", "transpose", "to w"], ["x", "cotangent"]),
    ]
    assert data["slices"][2]["words"] == (
        "<b>W</b>: 2 of 4 equations, 1 of them a product of matrices. It reads x, cotangent."
    )


def test_what_another_slice_computed_is_told_and_rows_are_kept_apart():
    traced = jax.make_jaxpr(lambda x: jnp.cos(jnp.sin(x)))(1.0)
    one, two = traced.eqns
    data = slices.table(traced, {"F0": [one], "F1": [two]}, ["x"], ["y"], {"F0": 0, "F1": 1}, 0)
    assert data["slices"][1]["words"].endswith("It reads what F0 computed.")
    _, corners = data["places"]
    rows = dict(zip(data["names"], (y for _, y in corners), strict=True))
    assert rows["x"] == rows["sin"] < rows["cos"] == rows["y"]


def test_no_two_boxes_overlap(traced, chosen):
    found = slices_layout.graph(traced.jaxpr, list(chosen.values()), INPUTS, OUTPUTS)
    wide, corners, _ = slices_layout.places(found, [0, 0, 0])
    for i, (x, y) in enumerate(corners):
        for other_x, other_y in corners[:i]:
            assert abs(x - other_x) > wide or abs(y - other_y) > slices_layout.HIGH


def test_an_equation_is_in_one_slice(traced, chosen):
    with pytest.raises(ValueError, match="dot_general is in 0 slices, not in one"):
        figures.slice_graph(traced, {"I": chosen["I"], "W": chosen["W"]}, INPUTS, OUTPUTS)
    with pytest.raises(ValueError, match="dot_general is in 2 slices"):
        figures.slice_graph(traced, chosen | {"B": chosen["I"]}, INPUTS, OUTPUTS)


def test_is_small_and_fetches_nothing(figure):
    check_stands_alone(figure._repr_html_(), figure._repr_html_(), 20_000, ids=4)


# In the browser


@pytest.fixture
def place(tmp_path, figure):
    return write_page(tmp_path, figure)


def lit(page, state):
    return page.locator(f".node.{state} title").all_text_contents()


def test_every_choice_lights_its_slice(opened, traced, chosen):
    data = slices.table(traced, chosen, INPUTS, OUTPUTS, None, 1)
    choice = opened.get_by_role("combobox", name="What is computed")
    for number, one in [*enumerate(data["slices"])][::-1]:
        choice.select_option(str(number))
        for state in ("on", "read"):
            assert sorted(lit(opened, state)) == sorted(data["names"][i] for i in one[state])
        assert opened.get_by_role("status").inner_html() == one["words"]
        assert opened.locator(".edge.on").count() == sum(b in one["on"] for _, b in data["edges"])
    choice.press("ArrowDown")
    assert "to x" in lit(opened, "on")
    opened.locator(".node", has_text="swap").click()
    assert "to w" in lit(opened, "on") and choice.input_value() == "2"


def test_the_still_shows_the_choice_it_starts_with_and_fits_a_phone(browser, place):
    with silent_page(browser, viewport=PHONE, java_script_enabled=False) as page:
        page.goto(place)
        assert lit(page, "on") == ["dot_general", "to x"]
        assert "Without JavaScript this figure shows one slice" in page.inner_text("body")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    with silent_page(browser, viewport=DESKTOP) as page:
        page.goto(place)
        assert re.findall(r"\w+", " ".join(lit(page, "on"))) == ["dot_general", "to", "x"]


def test_names_are_text(browser, tmp_path, traced, chosen):
    figure = figures.slice_graph(
        traced, {f"{NAME}{k}": v for k, v in chosen.items()}, INPUTS, OUTPUTS
    )
    for alive in check_names_are_text(browser, tmp_path, figure):
        assert alive.locator("svg").is_visible()
