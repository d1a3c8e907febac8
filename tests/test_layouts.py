"""Every layout, and every pair and triple of roles, is one device: losses, gradients, states."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardwise import checkpoint, data, layouts, mesh, model, objective, train
from shardwise.layouts import catalogue

CONFIG = model.Config(
    embed=32, layers=4, heads=16, kv_heads=8, head_dim=2, mlp=48, dropout=0.1, remat=True
)
OPTIMIZERS = {
    "adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "adafactor": optax.chain(
        optax.clip_by_global_norm(0.1), optax.adafactor(1e-2, min_dim_size_to_factor=16)
    ),
}
KEY = jax.random.key(7)


@functools.cache
def parts(stages, layers=4):
    """(the loss, what creates the parameters) of a decoder with so many stages."""
    config = dataclasses.replace(CONFIG, stages=stages, layers=layers)
    graphdef = nnx.split(nnx.eval_shape(lambda: model.Decoder(config, nnx.Rngs(0))))[0]
    create = functools.partial(_create, config)
    return functools.partial(train.loss, graphdef=graphdef), create


def _create(config, key):
    return nnx.state(model.Decoder(config, nnx.Rngs(params=key)))


@functools.cache
def batches():
    """Two batches of real bytes, padded at random, one row wholly masked."""
    found, rng = [], np.random.default_rng(3)
    for batch in itertools.islice(data.batches(16, 32, seed=1), 2):
        real = rng.integers(1, 33, 16)
        real[5] = 0
        found.append(batch | {"mask": (np.arange(32)[None] < real[:, None]).astype(np.float32)})
    return found


@functools.cache
def one_device(optimizer, layers=4):
    """[(loss, optimizer's state after the step)] of each step."""
    loss, create = parts(1, layers)
    tx, params = OPTIMIZERS[optimizer], jax.jit(create)(KEY)
    opt_state, found = tx.init(params), []

    @jax.jit
    def step(params, opt_state, batch, key):
        mean, grads = objective.value_and_grad(loss)(params, batch, key=key)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, mean

    for i, batch in enumerate(batches()):
        params, opt_state, mean = step(params, opt_state, batch, jax.random.key(i))
        found.append((mean, jax.tree.map(np.asarray, opt_state)))
    return found


def check(layout, optimizer="adamw"):
    """Two steps, with padding and dropout: losses, and the state after the first step, which has
    the gradients in it, as one device has them.
    """
    layers = max(4, layout.size("stage"))
    loss, create = parts(layout.size("stage"), layers)
    tx = OPTIMIZERS[optimizer]
    params, opt_state = layouts.init(layout, create, tx, KEY, loss, batches()[0])
    step = layouts.step(layout, loss, tx)
    for i, (batch, (mean, state)) in enumerate(
        zip(batches(), one_device(optimizer, layers), strict=True)
    ):
        params, opt_state, found = step(params, opt_state, batch, key=jax.random.key(i))
        np.testing.assert_allclose(found, mean, rtol=2e-5)
        if i == 0:  # later ones differ by more: Adam amplifies rounding
            ours = jax.tree.leaves(layouts.whole(layout, opt_state))
            for a, b in zip(ours, jax.tree.leaves(state), strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6 * (1 + np.abs(b).max()))


FAST = {"zero2", "hybrid", "zigzag", "fsdp, context, tensor", "fsdp, tensor by compiler"}


def marked(cases, fast):
    """The cases, slow but for these."""
    return [c if c in fast else pytest.param(c, marks=pytest.mark.slow) for c in cases]


@pytest.mark.parametrize("name", marked(layouts.LAYOUTS, FAST))
def test_a_layout_is_one_device(name):
    optimizer = "adafactor" if len(name) % 2 and "stage" not in name else "adamw"
    check(layouts.LAYOUTS[name](8), optimizer)


BY_HAND = ("data", "fsdp", "context", "tensor")
COMBINED = [
    (*roles, by)
    for by, known in (("hand", BY_HAND), ("compiler", ("stage", *BY_HAND)))
    for size in (2, 3)
    for roles in itertools.combinations(known, size)
]
PAIRS = {("data", "context", "hand"), ("stage", "data", "context", "compiler")}


@pytest.mark.parametrize("case", marked(COMBINED, PAIRS), ids=lambda case: "-".join(case))
def test_roles_combine(case):
    *roles, by = case
    settings = dict(microbatches=4 if "stage" in roles else 2, by=by)
    if by == "hand" and "context" in roles:
        settings["attention"] = "zigzag" if "fsdp" in roles else "ulysses"
    n = 4 if case in PAIRS else 8
    check(catalogue.over(tuple(roles), n, **settings))


def test_printing_a_layout_tells_what_each_axis_does():
    told = str(layouts.LAYOUTS["fsdp, context, tensor"](8))
    for words in ("by hand", "gathered where it is used", "attention by ring", "heads", "context"):
        assert words in told
    assert layouts.LAYOUTS["fsdp"](8) == layouts.LAYOUTS["fsdp"](8)
    assert len({layouts.LAYOUTS["fsdp"](8), layouts.LAYOUTS["fsdp"](8)}) == 1


GRID = functools.partial(mesh.make, a=2, b=2)
MISTAKES = {
    "no role": (lambda: layouts.Layout(GRID(), fsdp="a"), "axis 'b' of size 2 has no role"),
    "two roles": (lambda: layouts.Layout(GRID(), fsdp="a", data=("a", "b")), "given to data and"),
    "no axis": (lambda: layouts.Layout(GRID(), fsdp="a", data="c"), "no such axis; it has"),
    "by": (lambda: layouts.Layout(GRID(), data=("a", "b"), by="magic"), "'hand', 'compiler'"),
    "zero": (lambda: layouts.Layout(GRID(), data=("a", "b"), zero=4), "zero=4"),
    "sequence": (
        lambda: layouts.Layout(GRID(), data=("a", "b"), sequence=True),
        "name one, tensor=",
    ),
    "hand in stages": (
        lambda: layouts.Layout(GRID(), stage="a", fsdp="b"),
        "stages and fsdp by hand.*Say by='compiler'",
    ),
    "order": (
        lambda: layouts.Layout(GRID(), data="a", context="b", by="compiler", attention="zigzag"),
        "'zigzag' is an order",
    ),
    "many stages": (lambda: layouts.Layout(GRID(), stage=("a", "b")), "lie along one axis"),
    "microbatches": (lambda: layouts.Layout(GRID(), data=("a", "b"), microbatches=0), "1 or more"),
    "devices": (lambda: catalogue.over(("fsdp", "tensor", "context"), 6), "a multiple of 4"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name):
    make, told = MISTAKES[name]
    with pytest.raises(ValueError, match=told):
        make()


def run(layout, loss, params, batch):
    placed = layouts.place(layout, params, loss, batch)
    return layouts.value_and_grad(layout, loss)(placed, batch)


def tokens(rows, length):
    whole = np.zeros((rows, length), np.int32)
    return {"tokens": whole, "targets": whole, "mask": whole.astype(np.float32)}


def test_rows_and_sequences_have_to_divide():
    loss, create = parts(1)
    params = jax.eval_shape(create, KEY)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
    for by in ("hand", "compiler"):
        layout = catalogue.over(("fsdp", "context"), 8, by=by)
        with pytest.raises(ValueError, match=r"\(6, 32\) does not split into 4 parts"):
            run(layout, loss, params, tokens(6, 32))
        with pytest.raises(ValueError, match=r"pad it.* 32"):
            run(layout, loss, params, tokens(8, 31))


def test_heads_have_to_divide():
    _, create = parts(1)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(create, KEY))
    odd = dataclasses.replace(layouts.LAYOUTS["tensor"](8), cut=("head_dim",))
    with pytest.raises(ValueError, match="'head_dim'.* of 2 does not divide"):
        layouts.place(odd, params)
    with pytest.raises(ValueError, match="no parameter carries one of these names"):
        layouts.place(dataclasses.replace(odd, cut=("experts",)), params)


def test_attention_that_is_not_marked_is_refused():
    def loss(params, batch):
        seen = jnp.cumsum(batch["tokens"] * params["w"], axis=1)
        return objective.Mean(jnp.sum(seen), jnp.sum(batch["mask"]))

    layout = layouts.LAYOUTS["ring"](8)
    with pytest.raises(ValueError, match="never calls marks.attend"):
        run(layout, loss, {"w": jnp.ones(())}, tokens(8, 32))


def test_a_mean_over_rows_is_refused_where_the_sequence_is_cut():
    def loss(params, batch):
        return jnp.mean(jnp.max(batch["tokens"] * params["w"], axis=1))

    layout = layouts.LAYOUTS["ring"](8)
    with pytest.raises(ValueError, match=r"Return objective.Mean\(total, count\)"):
        run(layout, loss, {"w": jnp.ones(())}, tokens(8, 32))


@pytest.mark.slow
def test_a_checkpoint_of_any_restores_under_any_other(tmp_path):
    _, create = parts(1)
    tx = OPTIMIZERS["adamw"]
    params = jax.jit(create)(KEY)
    for i, (a, b) in enumerate(
        [("fsdp", "fsdp, tensor by compiler"), ("fsdp, context, tensor", "zero1"), ("tensor", "fsdp")]
    ):
        first, second = layouts.LAYOUTS[a](8), layouts.LAYOUTS[b](8)
        saved, state = layouts.init(first, create, tx, KEY)
        checkpoint.save(tmp_path, i, {"params": saved, "opt_state": state})
        target, target_state = layouts.init(second, create, tx, jax.random.key(99))
        target = {"params": target, "opt_state": target_state}
        restored = checkpoint.restore(tmp_path, target, i)
        for x, y in zip(
            jax.tree.leaves(layouts.whole(second, restored["params"])),
            jax.tree.leaves(params),
            strict=True,
        ):
            np.testing.assert_array_equal(x, y)
