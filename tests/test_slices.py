"""The graph of a traced program: what lights up is what was given, and all of it."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from browser import NAME, silent_page, write_page
from explorers import Explorer, shown

from shardwise import jaxprs
from shardwise_book import figures
from shardwise_book.figures import slices, slices_layout


def product(x, w, cotangent):
    y, pull = jax.vjp(jnp.matmul, x, w)
    return y, *pull(cotangent)


INPUTS, OUTPUTS = ["x", "w", "cotangent"], ["y", "to x", "to w"]


@functools.cache
def traced():
    return jax.make_jaxpr(product)(jnp.ones((2, 3)), jnp.ones((3, 3)), jnp.ones((2, 3)))


@functools.cache
def chosen():
    program = traced()
    return {
        kind: jaxprs.needed(program.eqns, [v], ())[0]
        for kind, v in zip("FIW", program.jaxpr.outvars, strict=True)
    }


def test_a_slice_lights_what_it_computes_and_outlines_what_it_reads():
    data = slices.table(traced(), chosen(), INPUTS, OUTPUTS, None, 0)
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


def test_no_two_boxes_overlap():
    found = slices_layout.graph(traced().jaxpr, list(chosen().values()), INPUTS, OUTPUTS)
    wide, corners, _ = slices_layout.places(found, [0, 0, 0])
    for i, (x, y) in enumerate(corners):
        for other_x, other_y in corners[:i]:
            assert abs(x - other_x) > wide or abs(y - other_y) > slices_layout.HIGH


def test_an_equation_is_in_one_slice():
    with pytest.raises(ValueError, match="dot_general is in 0 slices, not in one"):
        figures.slice_graph(traced(), {"I": chosen()["I"], "W": chosen()["W"]}, INPUTS, OUTPUTS)
    with pytest.raises(ValueError, match="dot_general is in 2 slices"):
        figures.slice_graph(traced(), chosen() | {"B": chosen()["I"]}, INPUTS, OUTPUTS)


def expected(data, at):
    """The words, the names that are lit and that are outlined, and the number of lit lines."""
    data = slices.table(traced(), chosen(), INPUTS, OUTPUTS, None, 1)
    one = data["slices"][at[0]]
    lit = [[data["names"][node] for node in sorted(one[state])] for state in ("on", "read")]
    return [one["words"], *lit, sum(b in one["on"] for _, b in data["edges"])]


def read(texts):
    words, picture = texts
    lit = [
        re.findall(rf'class="node {state}"[^>]*><title>([^<]*)', picture)
        for state in ("on", "read")
    ]
    return [words, *lit, picture.count('class="edge on"')]


def figure(named=""):
    listed = {f"{named}{kind}": equations for kind, equations in chosen().items()}
    return figures.slice_graph(traced(), listed, INPUTS, OUTPUTS, start=1)


EXPLORER = Explorer(
    figure,
    start=[1],
    controls={"What is computed": 3},
    states=lambda data: [[2], [1], [0]],
    expected=expected,
    read=read,
    same=lambda figure: read(shown(figure)),
    bytes=20_000,
    ids=4,
    named=lambda: figure(NAME),
    told=lambda words: NAME in words,
)


def test_a_click_on_an_equation_chooses_the_slice_that_computes_it(browser, tmp_path):
    made = figure()
    with silent_page(browser) as page:
        page.goto(write_page(tmp_path, made))
        inside = page.locator(".shardwise-figure")
        assert EXPLORER.agrees(inside, made.data) == [1]
        inside.locator(".node", has_text="swap").click()
        assert EXPLORER.agrees(inside, made.data) == [2]
