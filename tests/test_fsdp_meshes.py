"""FSDP on meshes with further axes, which the compiler has; and called as users call it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sampling import marked

from shardwise import data, fsdp, marks, measure, mesh, model, objective, rules
from shardwise.fsdp.arrays import array_layouts

mesh.simulate(8)
LINE, GRID = mesh.make(fsdp=8), mesh.make(fsdp=4, model=2)
CUBE = mesh.make(data=2, fsdp=2, model=2)
TENSOR = rules.LogicalRules(
    {"vocab": "model", "embed": None, "heads": "model", "kv_heads": "model"}
    | {"head_dim": None, "mlp": "model"},
)
WITHIN = fsdp.rule(over=TENSOR)


def pins(grid):
    """Logits cut by `model`, and what stands between layers whole there; rows are cut by hand."""

    def pin(x, name):
        if name not in ("embedding_output", "attention_output", "mlp_output", "logits"):
            return x
        spec = P(None, None, "model") if name == "logits" else P()
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh.within(grid), spec))

    return {"constrain": pin}


STACKED = fsdp.rule(stacked=lambda path: True)


def assert_close(ours, theirs, rtol=1e-5):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(np.abs(b).max(initial=0), 1e-6))


@functools.cache
def decoder():
    """Sizes that 4 does not divide where `model` cuts."""
    config = model.Config(
        vocab=256, embed=20, layers=3, heads=6, kv_heads=2, head_dim=6, mlp=38, remat=True
    )
    graphdef, params = nnx.split(nnx.jit(lambda: model.Decoder(config, nnx.Rngs(0)))())
    return functools.partial(model.loss, graphdef=graphdef), params


@functools.cache
def expected():
    loss, params = decoder()
    batch = fsdp.pad(next(data.batches(13, 16)), 16)
    return batch, jax.jit(objective.value_and_grad(loss))(params, batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("m", "options"),
    marked(
        [
            (GRID, dict(zero=2, microbatches=2)),
            (GRID, dict(microbatches=2)),
            (CUBE, dict(replicate=("data",))),
            (CUBE, dict(replicate=("data",), zero=1)),
        ],
        [(GRID, dict(zero=2, microbatches=2))],
        2,
    ),
    ids=str,
)
def test_tensor_parallelism_by_rules_within(m, options):
    (loss, params), (batch, one_device) = decoder(), expected()
    sharded = rules.place(params, WITHIN, m)
    run = fsdp.value_and_grad(loss, m, WITHIN, meanings=pins(m), **options)
    compiled = run.lower(sharded, batch).compile()
    mean, grads = compiled(sharded, batch)
    assert_close((mean, grads), one_device)
    for x, g in zip(jax.tree.leaves(sharded), jax.tree.leaves(grads), strict=True):
        assert g.sharding.is_equivalent_to(x.sharding, x.ndim)
    assert measure.collectives(compiled)["reduce-scatter"].static


def test_what_lies_on_both_axes_is_held_and_sent_by_both():
    """Each device has 1/8 of a matrix on both axes, and gathers its half among four."""
    loss, params = decoder()
    sharded, layouts = rules.place(params, WITHIN, GRID), array_layouts(params, WITHIN, GRID)
    arrays = {s.path: (x, s) for x, s in zip(jax.tree.leaves(sharded), layouts, strict=True)}
    gate, found = arrays["blocks/gate/kernel"]
    assert found.spec == gate.sharding.spec == P(None, "fsdp", "model")
    assert (found.cut, tuple(found.manual)) == (1, (None, "fsdp", None))
    assert gate.addressable_shards[0].data.shape == (3, 20 // 4, 38 // 2)
    np.testing.assert_array_equal(gate, params["blocks"]["gate"]["kernel"][...])
    batch, _ = expected()
    run = fsdp.value_and_grad(loss, GRID, WITHIN, meanings=pins(GRID))
    sent = measure.collectives(run.lower(sharded, batch).compile())
    gathered = 0
    for x, s in arrays.values():
        if s.cut is not None:
            again = 2 if s.stacked else 1
            gathered += again * x.nbytes // (2 if "model" in tuple(s.spec) else 1) * 3 // 4
    assert sent["all-gather"].ring_bytes >= gathered
    four = mesh.make(fsdp=4)
    run = fsdp.value_and_grad(loss, four)
    without = measure.collectives(run.lower(rules.place(params, fsdp.rule(), four), batch))
    assert sent["reduce-scatter"].ring_bytes < 0.6 * without["reduce-scatter"].ring_bytes


@pytest.mark.slow
def test_a_model_that_constrains_its_own_activations():
    (loss, params), (batch, one_device) = decoder(), expected()

    def constrained(params, batch):
        def pin(x, name):
            spec = P(None, None, "model") if name == "logits" else P()
            return jax.lax.with_sharding_constraint(x, NamedSharding(GRID, spec))

        with marks.bind(constrain=pin):
            return loss(params, batch)

    found = fsdp.value_and_grad(constrained, GRID)(rules.place(params, fsdp.rule(), GRID), batch)
    assert_close(found, one_device)


def test_an_axis_that_nothing_uses_is_named():
    (loss, params), (batch, _) = decoder(), expected()
    sharded = rules.place(params, fsdp.rule(), GRID)
    message = r"nothing is laid out over the mesh axis 'model' of size 2, .*replicate=\('model',\)"
    with pytest.raises(ValueError, match=message):
        fsdp.value_and_grad(loss, GRID)(sharded, batch)


@pytest.mark.slow
def test_training_over_both_axes_equals_one_device():
    (loss, params), (batch, _) = decoder(), expected()
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adafactor(1e-2))

    @jax.jit
    def on_one(params, state):
        grads = objective.value_and_grad(loss)(params, batch)[1]
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def on_many(params, state):
        grads = fsdp.value_and_grad(loss, GRID, WITHIN, meanings=pins(GRID))(params, batch)[1]
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    sharded = rules.place(params, WITHIN, GRID)
    kept, state = jax.jit(tx.init)(sharded), tx.init(params)
    for _ in range(2):
        params, state = on_one(params, state)
        sharded, kept = on_many(sharded, kept)
    assert_close(sharded, params, rtol=1e-4)


# As users call it.


def traced_once():
    """A loss that counts how often Python runs it."""
    runs = []

    def loss(params, batch):
        runs.append(1)
        layer = lambda x, w: (jnp.tanh(x @ marks.use(w)), None)  # noqa: E731
        x = jax.lax.scan(layer, batch["x"], params["w"])[0]
        return objective.Mean(jnp.sum(x**2), jnp.float32(len(x)))

    return loss, runs


PARAMS = {"w": np.random.default_rng(0).normal(size=(3, 16, 16)).astype(np.float32)}
BATCH = {"x": np.random.default_rng(1).normal(size=(16, 16)).astype(np.float32)}


def test_a_call_outside_jit_traces_once():
    loss, runs = traced_once()
    run = fsdp.value_and_grad(loss, LINE, STACKED)
    sharded = rules.place(PARAMS, STACKED, LINE)
    want = jax.jit(objective.value_and_grad(loss))(PARAMS, BATCH)
    mean, grads = run(sharded, BATCH)
    assert_close((mean, grads), want)
    before = len(runs)
    for _ in range(3):
        sharded = optax.apply_updates(sharded, jax.tree.map(lambda g: -0.1 * g, grads))
        mean, grads = run(sharded, BATCH)
    assert len(runs) == before
    run(sharded, {"x": BATCH["x"][:8]})  # another shape is another program
    assert len(runs) > before


@pytest.mark.parametrize("kind", ["none", "same", "explicit"])
def test_a_mesh_in_context_changes_nothing(kind):
    loss, _ = traced_once()
    around = {
        "none": None,
        "same": LINE,
        "explicit": jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Explicit,)),
    }[kind]
    want = jax.jit(objective.value_and_grad(loss))(PARAMS, BATCH)

    def step():
        return fsdp.value_and_grad(loss, LINE, STACKED)(rules.place(PARAMS, STACKED, LINE), BATCH)

    if around is None:
        assert_close(step(), want)
        return
    with jax.set_mesh(around):
        if kind == "explicit":
            with pytest.raises(ValueError, match=r"jax.set_mesh has set another mesh, .*Explicit"):
                step()
        else:
            assert_close(step(), want)
