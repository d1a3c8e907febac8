"""A sequence that is cut by hand: what lets tokens see each other outside marks is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling import marked

from shardwise import context, data, layouts, marks, objective


def run(layout, loss, params, batch):
    placed = layouts.place(layout, params)
    return layouts.value_and_grad(layout, loss)(placed, batch)


def tokens(rows, length):
    whole = np.zeros((rows, length), np.int32)
    return {"tokens": whole, "targets": whole, "mask": whole.astype(np.float32)}


DRAW = np.random.default_rng(0)
DRAWN = {name: DRAW.integers(0, 9, (8, 32)).astype(np.int32) for name in ("tokens", "targets")}
DRAWN |= {"mask": DRAW.uniform(size=(8, 32)).astype(np.float32)}
DRAWN |= {"rows": DRAW.integers(1, 32, 8).astype(np.float32)}


def rolled(params, batch):
    targets = jnp.roll(batch["tokens"], -1, axis=1)
    return each(params, batch, params["w"] * batch["tokens"] - targets)


def shifted(params, batch):
    x = params["w"] * batch["tokens"]
    return objective.Mean(jnp.sum((x[:, :-1] - batch["targets"][:, 1:]) ** 2), jnp.float32(len(x)))


def each(params, batch, x):
    x = x[:, :, None, None]
    x = marks.attend(x, x, x, marks.places(batch, *x.shape[:2]))[:, :, 0, 0]
    return objective.Mean(jnp.sum(x**2 * batch["mask"]), jnp.sum(batch["mask"]))


def looped(params, batch):
    def token(carry, x):
        return carry + x, carry * params["w"]

    _, x = jax.lax.scan(token, jnp.zeros(len(batch["mask"])), batch["mask"].T)
    return each(params, batch, x.T)


SEEING = {
    "a shift": shifted,
    "a roll": rolled,
    "a running sum": lambda p, b: each(p, b, jnp.cumsum(b["mask"] * p["w"], axis=1)),
    "a mean": lambda p, b: each(
        p, b, b["mask"] * p["w"] - jnp.mean(b["mask"], axis=1, keepdims=True)
    ),
    "a sum": lambda p, b: each(
        p, b, b["mask"] * p["w"] - jnp.sum(b["mask"], axis=1, keepdims=True)
    ),
    "a maximum": lambda p, b: each(p, b, b["mask"] * jnp.max(b["mask"] * p["w"], axis=1)[:, None]),
    "own attention": lambda p, b: each(
        p, b, jnp.einsum("bs,bt,bt->bs", b["mask"] * p["w"], b["mask"], b["mask"])
    ),
    "scores": lambda p, b: each(
        p,
        b,
        jnp.max(b["mask"][:, :, None] * b["mask"][:, None] * p["w"], axis=2),
    ),
    "own positions": lambda p, b: each(
        p, b, b["mask"] * jnp.sin(p["w"] * jnp.arange(b["mask"].shape[1]))[None]
    ),
    "a table of positions": lambda p, b: each(
        p, b, b["mask"] * (p["w"] * jnp.arange(64.0))[jnp.arange(b["mask"].shape[1])][None]
    ),
    "a length": lambda p, b: each(
        p,
        b,
        p["w"] * (jnp.arange(b["mask"].shape[1])[None] < b["rows"][:, None]),
    ),
    "a loop": looped,
    "a square": lambda p, b: objective.Mean(
        jnp.sum(jnp.sum(p["w"] * b["mask"], axis=1) ** 2),
        jnp.sum(b["mask"]),
    ),
    "a count of rows": lambda p, b: each(p, b, b["mask"] * p["w"])._replace(
        count=jnp.float32(len(b["mask"]))
    ),
    "weights of rows": lambda p, b: each(p, b, b["mask"] * p["w"])._replace(
        count=jnp.sum(b["rows"])
    ),
    "a sum of means": lambda p, b: objective.Mean(
        jnp.sum(jnp.mean(p["w"] * b["mask"], axis=1)), jnp.sum(b["mask"])
    ),
    "divided first": lambda p, b: each(p, b, p["w"] * b["mask"] / b["mask"].shape[1]),
    "rows": lambda p, b: each(p, b, b["mask"] * p["w"])._replace(total=jnp.sum(b["rows"] * p["w"])),
}


# Of each way to see: by a neighbour, all before, all, a product, a place, a loop, a count.
QUICK = ["a roll", "a running sum", "a mean", "own attention", "a table of positions", "a loop"]
QUICK += ["a square", "weights of rows"]


@pytest.mark.parametrize("name", marked(SEEING, QUICK))
def test_tokens_that_see_each_other_outside_marks_are_refused(name):
    layout = dataclasses.replace(layouts.LAYOUTS["fsdp, context"](8), stacked=None)
    with pytest.raises(objective.Indivisible, match=r"along its sequence.*marks.attend"):
        run(layout, SEEING[name], {"w": jnp.ones(())}, DRAWN)


def test_a_static_count_of_tokens_runs():
    def loss(params, batch):
        found = each(params, batch, batch["mask"] * params["w"])
        return found._replace(count=jnp.float32(batch["mask"].size))

    layout, params = layouts.LAYOUTS["fsdp, context"](8), {"w": jnp.float32(0.5)}
    batch = next(data.batches(8, 32))
    expected = jax.jit(objective.value_and_grad(loss))(params, batch)
    np.testing.assert_allclose(run(layout, loss, params, batch)[0], expected[0], rtol=1e-5)


def test_rows_of_an_aux_are_refused_where_the_sequence_is_cut():
    def loss(params, batch):
        x = batch["mask"] * params["w"]
        return each(params, batch, x), {"x": x}

    layout = layouts.LAYOUTS["fsdp, context"](8)
    placed = layouts.place(layout, {"w": jnp.ones(())})
    with pytest.raises(ValueError, match="a part of the sequence alone"):
        layouts.value_and_grad(layout, loss, True, "concatenate")(placed, tokens(8, 32))


FORMS = {"named": "zigzag", "given": context.all_gather}


@pytest.mark.parametrize("name", marked(FORMS, ["given"]))
def test_what_sees_no_other_token_runs(name):
    """Also with a form of attention that stands in no dict: anybody's."""
    layout, params = layouts.LAYOUTS["fsdp, context"](8), {"w": jnp.float32(0.5)}
    layout = dataclasses.replace(layout, attention=FORMS[name])
    batch = next(data.batches(8, 32)) | {"rows": np.arange(8, dtype=np.float32)}

    def loss(params, batch):
        size = batch["mask"].shape[1]
        turns = marks.index("sequence", size) / 32  # large ones cancel in the gradient's sum
        of_row = marks.total(jnp.sum(batch["mask"], axis=1), ("sequence",))  # its real tokens
        x = jnp.sin(params["w"] * turns)[None] * (batch["rows"] / (1 + of_row))[:, None]
        return each(
            params, batch, x + jnp.flip(x[:, :, None] * jnp.ones((1, 1, 3)), 2).mean(axis=2)
        )

    value, grads = run(layout, loss, params, batch)
    expected = jax.jit(objective.value_and_grad(loss))(params, batch)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(layouts.whole(layout, grads)["w"], expected[1]["w"], rtol=1e-5)


def test_a_mean_over_rows_is_refused_where_the_sequence_is_cut():
    def loss(params, batch):
        x = (batch["tokens"] * params["w"])[:, :, None, None]
        x = marks.attend(x, x, x, marks.places(batch, *x.shape[:2]))
        return jnp.mean(jnp.max(x, axis=1))

    layout = layouts.LAYOUTS["ring"](8)
    with pytest.raises(ValueError, match=r"Return objective.Mean\(total, count\)"):
        run(layout, loss, {"w": jnp.ones(())}, tokens(8, 32))
