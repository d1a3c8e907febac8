"""A stranger's program: plain optax and plain Orbax on a layout's arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from sampling import marked

from shardwise import layouts, marks, mesh

mesh.simulate(8)
OPTIMIZERS = {
    "adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "muon": optax.contrib.muon(1e-2),
}
LAYOUTS = {
    "fsdp": lambda: layouts.Layout(mesh.make(fsdp=8), fsdp="fsdp"),
    "copies": lambda: layouts.Layout(mesh.make(data=2, fsdp=3), data="data", fsdp="fsdp"),
    "zero 1": lambda: layouts.Layout(mesh.make(fsdp=4), fsdp="fsdp", zero=1),
    "data": lambda: layouts.Layout(mesh.make(data=2), data="data"),
    "compiler": lambda: layouts.Layout(mesh.make(fsdp=4), fsdp="fsdp", by="compiler"),
    "stages": lambda: layouts.Layout(
        mesh.make(stage=2, fsdp=2), stage="stage", fsdp="fsdp", microbatches=2
    ),
}
CASES = [
    ("fsdp", "compiler", "adamw"),
    ("copies", "fsdp", "adafactor"),
    ("zero 1", "copies", "muon"),
    ("compiler", "data", "adafactor"),
    ("data", "zero 1", "adamw"),
    ("stages", "fsdp", "muon"),
    ("copies", "stages", "adamw"),
]


def create(key):
    """Of which 8, 4 and 3 divide some arrays; of one none of them."""
    shapes = {"up": (12, 40), "down": (40, 12), "bias": (12,), "odd": (7, 5), "scale": ()}
    keys = jax.random.split(key, len(shapes))
    pairs = zip(shapes.items(), keys, strict=True)
    return {name: jax.random.normal(key, shape) / 4 for (name, shape), key in pairs}


def loss(params, batch):
    x = batch @ params["up"]
    x = marks.stage_boundary(jnp.tanh(x)) @ params["down"] + params["bias"][None]
    return jnp.mean((x - batch * params["scale"]) ** 2) + jnp.sum(params["odd"] ** 2) / 100


def batches():
    return jnp.asarray(np.random.default_rng(0).normal(size=(4, 24, 12)), jnp.float32)


def train(value_and_grad, tx, params, state, batches):
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        value, grads = value_and_grad(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    for batch in batches:
        params, state, _ = step(params, state, batch)
    return params, state


def born(layout, tx):
    """Made by JAX alone, each array where it lives."""
    shapes = jax.eval_shape(create, jax.random.key(0))
    of_params, of_state = layouts.shardings(layout, shapes, tx)
    params = jax.jit(create, out_shardings=of_params)(jax.random.key(0))
    return params, jax.jit(tx.init, out_shardings=of_state)(params)


def target(layout, tx):
    """What Orbax restores into: shapes with shardings."""
    shapes = jax.eval_shape(create, jax.random.key(0))
    both = shapes, jax.eval_shape(tx.init, shapes)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        both,
        layouts.shardings(layout, shapes, tx),
    )


@functools.cache
def on_one(name):
    tx, params = OPTIMIZERS[name], create(jax.random.key(0))
    return train(jax.value_and_grad(loss), tx, params, tx.init(params), batches())


@pytest.mark.parametrize(
    ("first", "second", "name"),
    marked(CASES, CASES[:1], 4),
)
def test_a_strangers_program_trains_saves_and_restores_elsewhere(first, second, name, tmp_path):
    tx, parts = OPTIMIZERS[name], (batches()[:2], batches()[2:])
    layout = LAYOUTS[first]()
    saved = train(
        layouts.value_and_grad(layout, loss, check=False), tx, *born(layout, tx), parts[0]
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        layout = LAYOUTS[second]()
        restored = checkpointer.restore(tmp_path / "state", target(layout, tx))
    for x, s in zip(
        *map(jax.tree.leaves, (restored, layouts.shardings(layout, restored[0], tx))), strict=True
    ):
        assert x.sharding.is_equivalent_to(s, x.ndim)
    jax.tree.map(np.testing.assert_array_equal, restored, saved)
    ours = train(layouts.value_and_grad(layout, loss, check=False), tx, *restored, parts[1])
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(on_one(name)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * max(np.abs(b).max(), 1e-6))


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_predicted_is_what_the_shards_hold(name):
    layout, tx = LAYOUTS[name](), OPTIMIZERS["adafactor"]
    params, state = born(layout, tx)

    def held(tree):
        shards = [x.addressable_shards[0].data for x in jax.tree.leaves(tree)]
        return sum(shard.nbytes for shard in shards)

    shapes = jax.eval_shape(create, jax.random.key(0))
    found = layouts.predict(layout, shapes, batches()[0], tx, loss=loss)
    assert (found.held["parameters"], found.held["state"]) == (held(params), held(state))
    n = layout.size("fsdp")
    whole = {"bias": 48, "odd": 140} if n == 8 else {"odd": 140} if n > 1 else {}
    assert found.whole == {path: round(size * (1 - 1 / n)) for path, size in whole.items()}
