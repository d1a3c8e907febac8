import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import IN_FULL, marked

from shardwise import data, measure, mesh, model, objective, rules, train

CONFIG = model.Config(embed=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp=24)
GRAPHDEF, PARAMS = nnx.split(nnx.jit(lambda: model.Decoder(CONFIG, rngs=nnx.Rngs(0)))())
LOSS = functools.partial(model.loss, graphdef=GRAPHDEF)
MEAN_AND_GRAD = jax.jit(objective.value_and_grad(LOSS))  # of ROWS rows: compiled once
ROWS = 16


def fresh():
    return jax.tree.map(jnp.copy, PARAMS)


def assert_close(ours, theirs, rtol=1e-4, atol=1e-6):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def padded(rows, seed=0):
    """Real batches with a random padding, one row wholly masked."""
    batch = next(data.batches(rows, 16, seed=seed))
    real = np.random.default_rng(seed).integers(0, 17, rows)
    return batch | {"mask": (np.arange(16)[None, :] < real[:, None]).astype(np.float32)}


def test_the_loss_is_the_log_probability_of_each_real_target():
    batch = padded(3)
    total, count = jax.jit(LOSS)(PARAMS, batch)
    logits = jax.jit(lambda params, x: nnx.merge(GRAPHDEF, params)(x))(PARAMS, batch["tokens"])
    probabilities = np.asarray(jax.nn.softmax(logits, axis=-1), np.float64)
    expected = 0.0
    for i, j in itertools.product(range(3), range(16)):
        if batch["mask"][i, j]:
            expected -= np.log(probabilities[i, j, batch["targets"][i, j]])
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    assert count == batch["mask"].sum()


def test_a_decoder_and_its_state_give_the_same():
    batch = padded(3)
    whole = nnx.jit(model.loss)(nnx.merge(GRAPHDEF, PARAMS), batch)
    assert_close(whole, jax.jit(LOSS)(PARAMS, batch))


@given(rows=st.integers(1, 4), microbatches=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=2)
def test_accumulation_and_padding_are_exact(rows, microbatches, seed):
    """In parts, and at once with further rows that count for nothing."""
    batch = padded(rows * microbatches, seed)
    parts = jax.jit(objective.value_and_grad(LOSS, microbatches))(PARAMS, batch)
    more = {
        k: np.concatenate([v, np.ones_like(v[:1]).repeat(ROWS - len(v), 0)])
        for k, v in batch.items()
    }
    more["mask"][len(batch["mask"]) :] = 0
    assert_close(MEAN_AND_GRAD(PARAMS, more), parts)


def test_nothing_but_padding_is_a_loss_of_zero():
    batch = padded(ROWS)
    batch["mask"] = np.zeros_like(batch["mask"])
    mean, grads = MEAN_AND_GRAD(PARAMS, batch)
    assert mean == 0 and all(not g.any() for g in jax.tree.leaves(grads))


def test_rows_that_do_not_split_are_named():
    told = r"microbatches=2: .* of shape \(5, .*does not split into 2 parts .*masked rows"
    with pytest.raises(ValueError, match=told):
        objective.value_and_grad(LOSS, 2)(PARAMS, padded(5))


def test_microbatches_below_one_are_named():
    with pytest.raises(ValueError, match="microbatches=0; expected 1 or more"):
        train.step(LOSS, optax.sgd(0.1), microbatches=0)


@pytest.mark.parametrize("given", [train.Optimizer(peak=0.1), train.optimizer])
def test_settings_are_no_transformation(given):
    told = r"optimizer is .*; expected an optax transformation, .*\)\.transformation\(\) returns"
    with pytest.raises(TypeError, match=rf"train\.init: {told}"):
        train.init(CONFIG, mesh.make(fsdp=1), rules.FSDPRule("fsdp"), given)
    with pytest.raises(TypeError, match=rf"train\.step: {told}"):
        train.step(LOSS, given)


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1),
        pytest.param(train.optimizer(), marks=pytest.mark.slow),
        pytest.param(optax.adafactor(1e-2), marks=pytest.mark.slow),
    ],
    ids=["sgd", "adamw", "adafactor"],
)
def test_step_is_optax_and_donates(tx):
    batch = padded(ROWS)
    params, opt_state = fresh(), tx.init(PARAMS)
    after, _, mean = train.step(LOSS, tx)(params, opt_state, batch)
    expected, grads = MEAN_AND_GRAD(PARAMS, batch)
    updates, _ = jax.jit(tx.update)(grads, tx.init(PARAMS), PARAMS)
    np.testing.assert_allclose(mean, expected, rtol=1e-6)
    assert_close(after, optax.apply_updates(PARAMS, updates), atol=1e-4)
    assert all(a.is_deleted() for a in jax.tree.leaves(params))


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2] if IN_FULL else [2])
def test_a_sharded_batch_gives_the_same_steps(microbatches):
    along = jax.sharding.NamedSharding(mesh.make(data=-1), jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(along.mesh, jax.sharding.PartitionSpec())
    losses = {}
    for name, rows, weights in [("one", None, None), ("eight", along, whole)]:
        tx = optax.sgd(0.1)
        params = jax.device_put(fresh(), weights)
        opt_state = jax.device_put(tx.init(params), weights)
        step = train.step(LOSS, tx, microbatches)
        losses[name] = []
        for seed in range(3):
            params, opt_state, mean = step(
                params, opt_state, jax.device_put(padded(16, seed), rows)
            )
            losses[name].append(mean)
    np.testing.assert_allclose(losses["eight"], losses["one"], rtol=1e-5)


@pytest.mark.slow
def test_training_beats_guessing_by_frequency():
    batches = data.batches(8, 64)
    params, tx = fresh(), train.optimizer(peak=3e-2, steps=80)
    opt_state, step = tx.init(params), train.step(LOSS, tx)
    for _ in range(80):
        params, opt_state, mean = step(params, opt_state, next(batches))
    frequency = sum(np.bincount(t, minlength=256) for t in data.corpus()) + 1
    unigram = -np.sum(frequency / frequency.sum() * np.log(frequency / frequency.sum()))
    assert mean < unigram


TENSOR = rules.LogicalRules(
    {"vocab": "model", "embed": None, "heads": "model", "kv_heads": "model"}
    | {"head_dim": None, "mlp": "model"}
)
LAYOUTS = {
    "1": ({"fsdp": 1}, rules.FSDPRule("fsdp")),
    "8": ({"fsdp": 8}, rules.FSDPRule("fsdp", min_size=1024)),
    "4x2": ({"fsdp": 4, "model": 2}, rules.FSDPRule("fsdp", min_size=1024, over=TENSOR)),
    "2x2x2": (
        {"data": 2, "fsdp": 2, "model": 2},
        rules.FSDPRule(("data", "fsdp"), min_size=1024, over=TENSOR),
    ),
}


@pytest.mark.parametrize("layout", marked(LAYOUTS, {"2x2x2"}, 1))
def test_state_is_born_sharded_and_the_same_on_every_mesh(layout):
    axes, rule = LAYOUTS[layout]
    config = model.Config(embed=64, layers=4, heads=4, kv_heads=2, head_dim=16, mlp=192)
    tx, m = optax.adamw(1e-3), mesh.make(**axes)
    graphdef, params, opt_state = train.init(config, m, rule, tx, seed=3)
    plain = nnx.jit(lambda: model.Decoder(config, nnx.Rngs(3)))()
    assert jax.tree.structure(nnx.state(plain)) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(nnx.state(plain)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert graphdef == nnx.graphdef(plain)
    wanted = rules.shardings(rules.follow(rule, params), opt_state, m)
    for x, s in zip(jax.tree.leaves(opt_state), jax.tree.leaves(wanted), strict=True):
        assert x.sharding.is_equivalent_to(s, x.ndim)


@pytest.mark.parametrize("layout", marked(["8", "4x2", "2x2x2"], {"4x2"}, 0))
def test_initialising_never_holds_more_than_its_share_and_a_leaf(layout):
    axes, rule = LAYOUTS[layout]
    config = model.Config(embed=64, layers=3, heads=4, kv_heads=2, head_dim=16, mlp=192)
    m, tx = mesh.make(**axes), optax.adamw(1e-3)
    _, create = train.initializer(config, m, rule, tx)
    lowered = create.lower(jax.random.key(3))
    params, opt_state = lowered.out_info
    state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((params, opt_state)))
    largest = max(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    held = measure.bytes_per_device(lowered.compile())
    assert held.outputs + held.temporaries <= state / 8 + largest
