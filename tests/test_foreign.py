"""Code that nobody here wrote, under every strategy: each run equals one device, or is refused.

Models in the styles of Linen (with a TrainState), NNX, Equinox and plain dicts, each with what
these libraries bring; losses as their users write them.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import PartitionSpec as P
from sampling import marked

from shardwise import checkpoint, fsdp, layouts, marks, mesh, objective, rules
from shardwise.objective import Mean

mesh.simulate(8)
LINE = mesh.make(fsdp=8)
ROWS, LENGTH, WIDE, VOCAB = 16, 3, 8, 11


@dataclasses.dataclass(frozen=True)
class Foreign:
    """Parameters, and a loss of `(params, batch)`; with a stage boundary inside."""

    params: Any
    loss: Callable
    batch: Any


def texts():
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    real = np.arange(LENGTH)[None] < draw.integers(1, LENGTH + 1, ROWS)[:, None]
    return {"x": tokens[:, :-1], "y": tokens[:, 1:], "mask": real.astype(np.float32)}


def vectors():
    draw = np.random.default_rng(1)
    x, y = draw.normal(size=(ROWS, WIDE)), draw.integers(0, 2, (ROWS, 3))
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def cross_entropy(logits, batch):
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return Mean(jnp.sum(each * batch["mask"]), jnp.sum(batch["mask"]))


class Encoder(nn.Module):
    """Linen's own attention, norms and embeddings."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDE)(tokens)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
        x = marks.stage_boundary(x)
        x = x + nn.Dense(WIDE)(nn.gelu(nn.Dense(3 * WIDE)(nn.LayerNorm()(x))))
        return nn.Dense(VOCAB)(x)


def linen():
    model, batch = Encoder(), texts()
    params = jax.jit(model.init)(jax.random.key(0), batch["x"])["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))

    def loss(params, batch):
        return cross_entropy(state.apply_fn({"params": params}, batch["x"]), batch)

    return Foreign(state.params, loss, batch)


class Recurrent(nnx.Module):
    """NNX's own cells and layers, in the style of its guide: state in attributes."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDE, rngs=rngs)
        self.cell = nnx.GRUCell(WIDE, WIDE, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDE, rngs=rngs)
        self.conv = nnx.Conv(WIDE, WIDE, kernel_size=(3,), padding="CAUSAL", rngs=rngs)
        self.out = nnx.LinearGeneral(WIDE, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        carry = jnp.zeros((len(tokens), WIDE))
        steps = []
        for t in range(LENGTH):
            carry, y = self.cell(carry, x[:, t])
            steps.append(y)
        x = marks.stage_boundary(jnp.stack(steps, axis=1))
        return self.out(nnx.gelu(self.conv(self.norm(x))))


def in_nnx():
    graphdef, params = nnx.split(nnx.jit(lambda: Recurrent(nnx.Rngs(0)))())

    def loss(params, batch):
        return cross_entropy(nnx.merge(graphdef, params)(batch["x"]), batch)

    return Foreign(params, loss, texts())


class Tower(eqx.Module):
    """Equinox's own layers, one row at a time, under vmap."""

    first: eqx.nn.MLP
    norm: eqx.nn.LayerNorm
    second: eqx.nn.Linear

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.first = eqx.nn.MLP(WIDE, 5, 12, depth=2, activation=jax.nn.silu, key=a)
        self.norm, self.second = eqx.nn.LayerNorm(5), eqx.nn.Linear(5, 3, key=b)


def equinox():
    params, static = eqx.partition(Tower(jax.random.key(0)), eqx.is_inexact_array)

    def loss(params, batch):
        tower = eqx.combine(params, static)
        x = marks.stage_boundary(jax.vmap(tower.first)(batch["x"]))
        logits = jax.vmap(lambda row: tower.second(tower.norm(row)))(x)
        return optax.sigmoid_binary_cross_entropy(logits, batch["y"]).mean()

    return Foreign(params, loss, vectors())


def plain():
    draw = np.random.default_rng(3)
    shapes = {"in": (WIDE, 7), "deep": [(7, 7), (7,), ()], "out": {"kernel": (7, 3)}}
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    array = lambda shape: np.asarray(draw.normal(size=shape), np.float32)  # noqa: E731
    params = jax.tree.map(array, shapes, is_leaf=is_shape)

    def loss(params, batch):
        w, b, scale = params["deep"]
        x = marks.stage_boundary(jnp.tanh(batch["x"] @ params["in"]))
        x = scale * jax.nn.relu(jax.lax.fori_loop(0, 2, lambda i, x: jnp.sin(x @ w), x) + b[None])
        each = optax.huber_loss(x @ params["out"]["kernel"], batch["y"]).sum(1)
        return Mean(jnp.sum(each), len(each))

    return Foreign(params, loss, vectors())


MODELS = {"linen": linen, "nnx": in_nnx, "equinox": equinox, "plain": plain}


@functools.cache
def model(name):
    """One of `MODELS`, its parameters in the host's memory, which no step takes over."""
    case = MODELS[name]()
    return dataclasses.replace(case, params=jax.tree.map(np.asarray, case.params))


# With an eps that noise does not pass: some gradients (attention's key bias) are zero but for
# rounding, and Adam's steps have one size whatever the gradient's.
OPTIMIZERS = {
    "clipped adamw": optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2, eps=1e-3)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4, eps=1e-4),
    "schedule-free": optax.contrib.schedule_free_adamw(1e-2, eps=1e-3),
}


def with_gradients(tx):
    """`tx`, whose state is (the gradients that it got last, its own): one program has both."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, params), tx.init(params)

    def update(grads, state, params):
        updates, own = tx.update(grads, state[1], params)
        return updates, (grads, own)

    return optax.GradientTransformation(init, update)


# A strategy takes (model, transformation) to (mean and gradients, parameters after two steps).


def in_a_layout(case, tx, grid=LINE, **options):
    roles = {name: name for name in grid.axis_names}
    tx, layout = with_gradients(tx), layouts.Layout(grid, **roles, **options)
    params, state = layouts.init(layout, lambda key: case.params, tx, jax.random.key(0))
    step = layouts.step(layout, case.loss, tx, check=False)  # below it is
    params, state, mean = step(params, state, case.batch)
    first = mean, rules.whole(state)[0]
    return first, rules.whole(step(params, state, case.batch)[0])


def by_rules(case, tx):
    rule = rules.FSDPRule("fsdp", min_size=0, uneven="replicate")
    follow = rules.follow(rule, case.params, other=P())
    params = rules.place(case.params, rule, LINE)
    state = rules.place(jax.jit(tx.init)(case.params), follow, LINE)

    def step(params, state, batch):
        mean, grads = objective.value_and_grad(case.loss, 2)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, (mean, grads)

    laid = dict(in_rules=(rule, follow, P("fsdp")), out_rules=(rule, follow, P()))
    run = rules.jit(step, LINE, **laid)
    params, state, first = run(params, state, case.batch)
    return first, run(params, state, case.batch)[0]


STRATEGIES = {
    "fsdp": in_a_layout,
    "fsdp, accumulated": functools.partial(in_a_layout, microbatches=2),
    "rules": by_rules,
    "stages": functools.partial(in_a_layout, grid=mesh.make(stage=2), microbatches=4),
    "stages, fsdp": functools.partial(
        in_a_layout, grid=mesh.make(stage=2, fsdp=2), microbatches=2, schedule="zb_h1"
    ),
}


def table():
    """Every (model, strategy) with one optimizer, in turn, so that every pair occurs; some more.

    Each strategy is quick with one model, and each model and optimizer with a strategy.
    """
    cases, others, quick = [], [], []
    for i, name in enumerate(MODELS):
        for j, strategy in enumerate(STRATEGIES):
            for k, tx in enumerate(OPTIMIZERS):
                group = cases if (i + j) % len(OPTIMIZERS) == k else others
                group.append((name, strategy, tx))
                if group is cases and j % len(MODELS) == i:
                    quick.append((name, strategy, tx))
    return [*marked(cases, quick), *marked(others, (), 2)]


def test_every_pair_of_a_model_a_strategy_and_an_optimizer_is_tried():
    told = table()
    cases = [getattr(case, "values", case) for case in told]
    quick = [case for case in told if not hasattr(case, "values")]
    assert [{*each} for each in zip(*quick, strict=True)] == [
        {*MODELS},
        {*STRATEGIES},
        {*OPTIMIZERS},
    ]
    for a, b in itertools.combinations(range(3), 2):
        every = [(*MODELS,), (*STRATEGIES,), (*OPTIMIZERS,)]
        assert {(c[a], c[b]) for c in cases} == {*itertools.product(every[a], every[b])}


@functools.cache
def on_one(name):
    """The compiled mean and gradient of a model on one device: nothing of ours."""
    case = model(name)

    def mean(params):
        out = case.loss(params, case.batch)
        return out.total / out.count if isinstance(out, Mean) else out

    return jax.jit(jax.value_and_grad(mean))


@functools.cache
def expected(name, tx):
    run, params, tx = on_one(name), model(name).params, OPTIMIZERS[tx]

    @jax.jit
    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    first = run(params)
    params, state = update(first[1], jax.jit(tx.init)(params), params)
    return first, update(run(params)[1], state, params)[0]


def assert_close(ours, theirs, rtol=2e-5):
    """Relative to each leaf's largest entry, or a hundredth of the largest of all."""
    pairs = list(zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True))
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    least = max(np.abs(b).max() for _, b in pairs) / 100
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(np.abs(b).max(), least))


@pytest.mark.parametrize(("name", "strategy", "tx"), table())
def test_foreign_code_trains_as_on_one_device(name, strategy, tx):
    (mean, grads), params = STRATEGIES[strategy](model(name), OPTIMIZERS[tx])
    (value, truth), after = expected(name, tx)
    np.testing.assert_allclose(mean, value, rtol=2e-5)
    assert_close(grads, truth)
    assert_close(params, after, 1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_check_passes_what_the_table_runs(name):
    case = model(name)
    objective.check(case.loss, case.params, case.batch)


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_of_foreign_parameters_restores_on_another_mesh(name, tmp_path):
    params = model(name).params
    rule = rules.FSDPRule("fsdp", min_size=0, uneven="replicate")
    checkpoint.save(tmp_path, 1, {"params": rules.place(params, rule, LINE)})
    checkpoint.wait(tmp_path)
    target = rules.place(jax.tree.map(np.zeros_like, params), rule, mesh.make(fsdp=2))
    found = checkpoint.restore(tmp_path, {"params": target})["params"]
    assert jax.tree.structure(found) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)


# Rows that look at each other.


class Normed(nnx.Module):
    """Batch norm and dropout of NNX."""

    def __init__(self, rngs, axis_name=None):
        self.first = nnx.Linear(WIDE, 12, rngs=rngs)
        self.norm = nnx.BatchNorm(12, axis_name=axis_name, rngs=rngs)
        self.dropout = nnx.Dropout(0.3)
        self.out = nnx.Linear(12, 3, rngs=rngs)

    def __call__(self, x, key):
        x = nnx.relu(self.norm(self.first(x), use_running_average=False))
        if key is not None:
            x = self.dropout(x, rngs=nnx.Rngs(dropout=key), deterministic=False)
        return self.out(x)


def normed(axis_name=None):
    """Running statistics come back as auxiliary outputs, the same on every device."""
    graphdef, params, rest = nnx.split(Normed(nnx.Rngs(0), axis_name), nnx.Param, ...)

    def loss(params, batch, key=None):
        network = nnx.merge(graphdef, params, jax.tree.map(jnp.asarray, rest))
        each = optax.sigmoid_binary_cross_entropy(network(batch["x"], key), batch["y"])
        return each.mean(), nnx.state(network, nnx.BatchStat)

    return params, loss


def test_batch_norm_by_axis_name_is_that_of_the_whole_batch():
    params, loss = normed()
    (value, stats), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, vectors())
    _, synchronised = normed("fsdp")
    run = jax.jit(fsdp.value_and_grad(synchronised, LINE, has_aux=True, aux="mean"))
    (mean, found), sharded = run(rules.place(params, fsdp.rule(), LINE), vectors())
    assert_close((mean, found, rules.whole(sharded)), (value, stats, grads))


def test_batch_norm_without_an_axis_name_is_found():
    params, loss = normed()
    with pytest.raises(ValueError, match="batch statistics"):
        objective.check(lambda p, b: loss(p, b)[0], params, vectors())


def test_dropout_of_another_library_is_one_devices_where_the_compiler_divides():
    params, loss = normed()
    key, plain = jax.random.key(5), jax.value_and_grad(loss, has_aux=True)
    expected = jax.jit(plain)(params, vectors(), key)

    def run(params, batch, key):
        return objective.value_and_grad(loss, has_aux=True)(params, batch, key=key)

    rule = rules.FSDPRule("fsdp", min_size=0, uneven="replicate")
    laid = rules.jit(run, LINE, in_rules=(rule, P("fsdp"), P()))
    found = laid(rules.place(params, rule, LINE), vectors(), key)
    assert_close(found, expected)
