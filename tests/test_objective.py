import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import IN_FULL, marked

from shardwise import fsdp, layers, layouts, marks, measure, mesh, model, objective, rules, train
from shardwise.objective import Mean
from shardwise.objective.parts import split

mesh.simulate(8)
LINE, FEW = mesh.make(fsdp=8), mesh.make(fsdp=2)
DRAW = np.random.default_rng(0)
PARAMS = {"w": DRAW.normal(size=(8, 7)).astype(np.float32), "b": np.ones(7, np.float32)}
BATCH = {
    "x": DRAW.normal(size=(16, 8)).astype(np.float32),
    "weight": np.where(np.arange(16) % 3 == 1, 0, DRAW.uniform(size=16)).astype(np.float32),
}


def outputs(params, batch):
    return jnp.tanh(batch["x"] @ params["w"] + params["b"][None])


def weighted(params, batch):
    each = (outputs(params, batch) ** 2).sum(1)
    return Mean(jnp.sum(each * batch["weight"]), jnp.sum(batch["weight"]))


def together(functions):
    """One program of them all, which takes less to compile than one for each."""
    return jax.jit(lambda *args, **given: [f(*args, **given) for f in functions])


def on_one(losses):
    """jax.value_and_grad of total/count over the whole batch: nothing of ours."""

    def mean_of(loss):
        def mean(params, *args, **given):
            out = loss(params, *args, **given)
            return out[0] / out[1] if isinstance(out, tuple) else out

        return jax.value_and_grad(mean)

    return together([mean_of(loss) for loss in losses])


# A division takes losses to a function of (parameters, batch) that returns [(mean, gradients)].


def in_microbatches(m):
    return lambda losses: together([objective.value_and_grad(loss, m) for loss in losses])


def in_shards(grid=LINE, **options):
    def divided(losses):
        program = together([fsdp.value_and_grad(loss, grid, **options) for loss in losses])

        def run(params, batch, *args, **given):
            found = program(rules.place(params, fsdp.rule(), grid), batch, *args, **given)
            return [(mean, rules.whole(grads)) for mean, grads in found]

        return run

    return divided


DIVIDED = {
    "1 microbatch": in_microbatches(1),
    "4 microbatches": in_microbatches(4),
    "fsdp": in_shards(),
    "fsdp, 2 microbatches": in_shards(microbatches=2),
    "fsdp, zero 1": in_shards(FEW, zero=1, microbatches=4),
    "fsdp, zero 2": in_shards(FEW, zero=2, microbatches=2),
}
SEVERAL = {name: run for name, run in DIVIDED.items() if name != "1 microbatch"}
FEW_WAYS = ("4 microbatches", "fsdp", "fsdp, zero 1", "fsdp, zero 2")
each_division = pytest.mark.parametrize("run", DIVIDED.values(), ids=DIVIDED)
few_divisions = pytest.mark.parametrize("run", [DIVIDED[name] for name in FEW_WAYS], ids=FEW_WAYS)


def assert_close(ours, theirs, rtol=1e-5, told=""):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = a.astype(np.float64), b.astype(np.float64)
        atol = rtol * max(np.abs(b).max(), 1e-9)
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=told)


# The mean of the whole batch, for losses at the edges.


@jax.custom_vjp
def clipped(x):
    return x


# Not linear: what comes back is clipped to 0.01.
clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


def small_count(params, batch):
    """Weights that sum to far less than 1."""
    total, count = weighted(params, batch)
    return Mean(total * 1e-3, count * 1e-3)


def negative(params, batch):
    total, count = weighted(params, batch)
    return Mean(-total, count)


def whole_numbers(params, batch):
    real = batch["weight"] > 0
    return Mean(jnp.sum(outputs(params, batch) * real[:, None]), jnp.sum(real))


def not_linear(params, batch):
    each = clipped(outputs(params, batch)).sum(1)
    return Mean(jnp.sum(each * batch["weight"]), jnp.sum(batch["weight"]))


def half(params, batch):
    """In float16, where 16 × 4,100 overflows and the mean does not."""
    out = outputs(params, batch).astype(jnp.float16)
    return 4100 + out.mean()


def static_count(params, batch):
    out = outputs(params, batch)
    return Mean(out.sum(), out.size)


def with_penalty(params, batch):
    """A mean over rows may have a term without rows: its mean is itself."""
    return (outputs(params, batch) ** 2).mean() + 0.1 * jnp.sum(params["w"] ** 2)


def penalty_by_static_count(params, batch):
    out = outputs(params, batch)
    return Mean((out**2).sum() + out.size * 0.1 * jnp.sum(params["w"] ** 2), out.size)


def penalty_by_count(params, batch):
    total, count = weighted(params, batch)
    return Mean(total + count * 0.1 * jnp.sum(params["w"] ** 2), count)


RIGHT = [small_count, negative, whole_numbers, not_linear, half, static_count]
RIGHT += [weighted, with_penalty, penalty_by_count, penalty_by_static_count]


@functools.cache
def edges(run=on_one):
    return dict(zip(RIGHT, run(RIGHT)(PARAMS, BATCH), strict=True))


@each_division
@pytest.mark.parametrize("loss", RIGHT, ids=lambda loss: loss.__name__)
def test_edges_equal_one_device(loss, run):
    assert_close(edges(run)[loss], edges()[loss], 2e-3 if loss is half else 1e-5)


def gated(params, batch):
    """A count that depends on the parameters."""
    gate = jax.nn.sigmoid(batch["x"] @ params["w"][:, 0])
    return Mean(jnp.sum(gate * (outputs(params, batch) ** 2).sum(1)), jnp.sum(gate))


@jax.custom_vjp
def opaque(x, weight):
    return jnp.sum(x * weight[:, None]), jnp.sum(weight)


opaque.defvjp(
    lambda x, weight: (opaque(x, weight), (x, weight)),
    lambda kept, g: (g[0] * jnp.broadcast_to(kept[1][:, None], kept[0].shape), None),
)


def fused(params, batch):
    """Total and count come out of one custom_vjp, into which the parameters go."""
    return Mean(*opaque(outputs(params, batch), batch["weight"]))


def test_a_count_that_may_depend_on_parameters_is_exact_or_an_error():
    expected = on_one([gated, fused])(PARAMS, BATCH)
    for name, run in DIVIDED.items():
        if "zero" in name or "microbatches" in name:
            for loss in gated, fused:
                told = r"count depends on the parameters.*one microb"
                with pytest.raises(ValueError, match=told):
                    run([loss])(PARAMS, BATCH)
        else:
            assert_close(run([gated, fused])(PARAMS, BATCH), expected)


@few_divisions
def test_a_count_of_zero_is_a_loss_of_zero(run):
    @jax.custom_vjp
    def ones(x):
        return x

    ones.defvjp(lambda x: (x, None), lambda _, g: (jnp.ones_like(g),))  # whatever comes in

    def loss(params, batch, rule=lambda out: out):
        return Mean(jnp.sum(rule(outputs(params, batch))), jnp.sum(batch["weight"]))

    of_its_own = functools.partial(loss, rule=ones)
    empty = BATCH | {"weight": np.zeros(16, np.float32)}
    for mean, grads in run([of_its_own, loss])(PARAMS, empty):
        assert mean == 0 and all(not np.any(g) for g in jax.tree.leaves(grads))


def test_the_count_is_taken_from_the_batch_and_gathers_no_weights():
    """Two microbatches gather twice what one gathers: their counting pass gathers nothing."""
    sharded, gathers = rules.place(PARAMS, fsdp.rule(), LINE), {}
    for m in 1, 2:
        function = fsdp.value_and_grad(weighted, LINE, microbatches=m)
        counted = measure.collectives(jax.jit(function).lower(sharded, BATCH))["all-gather"]
        gathers[m] = counted.dynamic, counted.ring_bytes
    assert gathers[2] == tuple(2 * x for x in gathers[1])


# Mistakes, which `check` finds.


def masked_mean(params, batch):
    total, count = weighted(params, batch)
    return total / count


def average(params, batch):
    return jnp.average((outputs(params, batch) ** 2).sum(1), weights=batch["weight"])


def penalty_in_the_total(params, batch):
    total, count = weighted(params, batch)
    return Mean(total + 0.1 * jnp.sum(params["w"] ** 2), count)


def count_given(params, batch):
    return Mean(weighted(params, batch).total, 16.0)


def bare_pair(params, batch):
    return tuple(weighted(params, batch))


def contrastive(params, batch):
    z = outputs(params, batch)
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(z @ z.T)))


def batch_norm(params, batch):
    z = outputs(params, batch)
    return jnp.mean(jnp.abs(z - z.mean(0, keepdims=True)) ** 3)


def test_a_bare_pair_is_named():
    for run in SEVERAL.values():
        told = r"bare pair.*objective.Mean\(total, count\).*has_aux=True"
        with pytest.raises(TypeError, match=told):
            run([bare_pair])(PARAMS, BATCH)


def each(params, batch):
    return (outputs(params, batch) ** 2).sum(1)


@jax.custom_jvp
def safe_division(a, b):
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))


safe_division.defjvp(lambda at, along: (safe_division(*at), along[0] / at[1]))


def of_weights(combine):
    """A loss that combines the weighted sum of its rows' losses with the sum of their weights."""
    return lambda p, b: combine(jnp.sum(each(p, b) * b["weight"]), jnp.sum(b["weight"]))


DECIDED = "divides by a number that it computes from the batch's values"
SCALAR, COUNT = "It is a sum over rows", "The count is not a bare sum over rows"
PENALTY = "does not depend on the batch and would be added once for each part"
NO_SUMS = {
    "a masked mean": (masked_mean, DECIDED),
    "an average": (average, DECIDED),
    "a penalty": (penalty_in_the_total, PENALTY),
    "a number": (count_given, "The count does not depend on the batch"),
    "rows against rows": (contrastive, "Rows of the batch look at each other"),
    "batch norm": (batch_norm, "Rows of the batch look at each other"),
    "a sum": (lambda p, b: 0.5 * each(p, b).sum(), SCALAR),
    "a sum of means over features": (
        lambda p, b: (jnp.tile(outputs(p, b), (1, 16)) ** 2).mean(1).sum(),
        SCALAR,
    ),
    "a mean and a sum": (lambda p, b: each(p, b).mean() + each(p, b).sum(), "the number of rows"),
    "a mean, times the rows": (lambda p, b: len(b["x"]) * each(p, b).mean(), SCALAR),
    "a mean, and one weighed by the rows": (
        lambda p, b: each(p, b).mean() + len(b["x"]) / 1000 * jnp.mean(outputs(p, b) ** 4),
        "the number of rows",
    ),
    "normalised weights": (
        lambda p, b: jnp.sum(each(p, b) * (b["weight"] / b["weight"].sum())),
        DECIDED,
    ),
    "a root": (lambda p, b: jnp.sqrt(each(p, b).mean()), "a root or power of a mean"),
    "within a cond": (
        of_weights(lambda t, n: jax.lax.cond(n > 0, lambda: t / n, lambda: 0.0)),
        DECIDED,
    ),
    "within a rule": (of_weights(safe_division), DECIDED),
    "a count of at least 1": (of_weights(lambda t, n: Mean(t, jnp.maximum(n, 1))), COUNT),
    "a count and 1": (of_weights(lambda t, n: Mean(t, n + 1)), COUNT),
    "a chosen count": (of_weights(lambda t, n: Mean(t, jnp.where(n > 0, n, 1))), COUNT),
    "a total that is a mean": (
        lambda p, b: Mean(each(p, b).mean(), b["weight"].sum()),
        "The total is a mean over rows",
    ),
    "a count that is a mean": (lambda p, b: Mean(each(p, b).sum(), b["weight"].mean()), COUNT),
    "a stacked penalty": (
        lambda p, b: Mean(jnp.stack([each(p, b).sum(), p["w"].sum()]).sum(), b["weight"].sum()),
        PENALTY,
    ),
    "a bool": (lambda p, b: Mean(each(p, b).sum(), b["weight"].any()), "count is bool"),
}


@pytest.mark.parametrize("name", NO_SUMS)
def test_check_names_what_is_no_sum_over_rows(name):
    loss, message = NO_SUMS[name]
    with pytest.raises((TypeError, ValueError), match=message):
        objective.check(loss, PARAMS, BATCH)


SUMS = {
    "divided first": lambda p, b: (each(p, b) / len(b["x"])).sum(),
    "divided within": lambda p, b: (jax.nn.relu(each(p, b) / len(b["x"])) * b["weight"]).sum(),
    "a product": lambda p, b: each(p, b) @ np.full(len(b["x"]), 1 / len(b["x"]), np.float32),
    "by ones": lambda p, b: each(p, b).sum() / jnp.ones_like(b["weight"]).sum(),
    "means of columns": lambda p, b: (outputs(p, b) ** 2).mean(0).sum(),
    "by row": lambda p, b: jnp.mean(jnp.sqrt(each(p, b)) / (1 + (b["x"] ** 2).sum(1))),
    "means times rows": lambda p, b: Mean(each(p, b).mean() * len(b["x"]), len(b["x"])),
    "an epsilon": of_weights(lambda t, n: Mean(t, n + 1e-8)),
    "at least an epsilon": of_weights(lambda t, n: Mean(t, jnp.maximum(n, 1e-6))),
    "a weighed mean": lambda p, b: each(p, b).mean() + 0.01 * jnp.mean(outputs(p, b) ** 4),
    "a guard": lambda p, b: jnp.nan_to_num(each(p, b).mean()),
}


def test_sums_and_means_however_they_are_written_pass():
    runs = in_microbatches(2), on_one
    found = (run(SUMS.values())(PARAMS, BATCH) for run in runs)
    for name, ours, theirs in zip(SUMS, *found, strict=True):
        assert_close(ours, theirs, told=name)


def test_an_auxiliary_output_that_is_no_array_is_named():
    loss = lambda p, b: (weighted(p, b), {"name": "x"})  # noqa: E731
    with pytest.raises(TypeError, match=r"auxiliary outputs: name is a str"):
        objective.value_and_grad(loss, 2, has_aux=True)(PARAMS, BATCH)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Stats:
    nats: jax.Array

    def __post_init__(self):
        if type(self.nats) is not object and not isinstance(self.nats, jax.ShapeDtypeStruct):
            self.nats = jnp.asarray(self.nats, jnp.float32)  # of a string, this fails


def test_auxiliary_outputs_may_be_of_a_class_that_looks_at_its_parts():
    def loss(params, batch):
        found = weighted(params, batch)
        return found, Stats(found.total)

    (_, stats), _ = objective.value_and_grad(loss, 2, has_aux=True)(PARAMS, BATCH)
    np.testing.assert_allclose(stats.nats, weighted(PARAMS, BATCH).total, rtol=1e-5)
    objective.check(loss, PARAMS, BATCH, has_aux=True)


def test_where_a_backend_tells_no_memory_a_loss_is_judged_all_the_same(monkeypatch):
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda self: None)

    def contrastive(params, batch):
        out = outputs(params, batch)
        return jnp.mean(jax.nn.logsumexp(out @ out.T, axis=1))

    layout = layouts.Layout(LINE, fsdp="fsdp")
    params = jax.device_put(PARAMS, layouts.shardings(layout, PARAMS))
    with pytest.raises(objective.Indivisible):
        layouts.value_and_grad(layout, contrastive)(params, BATCH)


def test_a_scalar_of_the_batch_is_named():
    with pytest.raises(ValueError, match=r"t is a scalar, and has no rows.*further argument"):
        fsdp.value_and_grad(weighted, LINE)(
            rules.place(PARAMS, fsdp.rule(), LINE), BATCH | {"t": 1.0}
        )


@pytest.mark.parametrize("mask", [np.arange(16) % 5 < 3, np.arange(16) % 4 < 1])
def test_check_divides_rows_in_two_ways(mask):
    """Masks that leave as many even rows as odd ones, or as many of the first as of the last."""
    assert (sum(mask[::2]) == sum(mask[1::2])) != (sum(mask[:8]) == sum(mask[8:]))
    with pytest.raises(objective.Indivisible, match="divides by a number that it computes"):
        objective.check(masked_mean, PARAMS, BATCH | {"weight": mask.astype(np.float32)})


PASS = [*RIGHT, gated, fused]


@pytest.mark.parametrize("loss", marked(PASS, PASS[::2]), ids=lambda loss: loss.__name__)
def test_check_passes_what_is_exact(loss):
    objective.check(loss, PARAMS, BATCH)


def test_check_names_the_gradient_that_differs():
    def loss(params, batch):
        x = outputs(params, batch)
        stop = jax.lax.stop_gradient(x.sum(0, keepdims=True))
        return jnp.mean(x + jnp.where(stop > 0, x - jax.lax.stop_gradient(x), 0))

    with pytest.raises(objective.Indivisible, match=r"the gradient of [wb] (is|of two parts)"):
        objective.check(loss, PARAMS, BATCH, gradient=True)


@pytest.mark.parametrize(
    ("loss", "has_aux", "message"),
    [
        (weighted, True, "returned a Mean, and has_aux=True expects"),
        (outputs, False, r"returned \(16, 7\); expected objective.Mean"),
        (lambda p, b: (weighted(p, b), {}, {}), True, "has_aux=True expects"),
        (lambda p, b: ((1.0, 2.0), {}), True, "first of its two outputs a bare pair"),
        (lambda p, b: Mean(outputs(p, b), 1.0), False, "expected objective.Mean"),
        (lambda p, b: jnp.int32(3), False, "int32, which has no gradient"),
    ],
)
def test_outputs_of_another_form_are_named(loss, has_aux, message):
    with pytest.raises(TypeError, match=message):
        objective.value_and_grad(loss, has_aux=has_aux)(PARAMS, BATCH)


# Microbatches.


def test_a_microbatch_has_every_m_th_row():
    parts = split({"x": np.arange(12), "y": np.arange(24).reshape(12, 2)}, 3)
    for j in range(3):
        np.testing.assert_array_equal(parts["x"][j], np.arange(12)[j::3])
        np.testing.assert_array_equal(parts["y"][j], np.arange(24).reshape(12, 2)[j::3])


def test_arrays_of_other_numbers_of_rows_divide_over_devices_and_not_into_microbatches():
    """Graphs and their nodes: what belongs together stays together in contiguous shares alone."""
    batch = {"graphs": np.ones((8, 2), np.float32), "nodes": BATCH["x"]}

    def loss(params, batch):
        nodes = (batch["nodes"] @ params["w"]).reshape(len(batch["graphs"]), -1)
        return jnp.mean(jnp.tanh(nodes).sum(1) * batch["graphs"][:, 0])

    assert_close(in_shards()([loss])(PARAMS, batch), on_one([loss])(PARAMS, batch))
    with pytest.raises(ValueError, match=r"different numbers of rows \(graphs 8, nodes 16\)"):
        in_microbatches(2)([loss])(PARAMS, batch)


# Auxiliary outputs.


def with_aux(params, batch):
    z = outputs(params, batch)
    extra = {"rows": z, "top": z.max(), "right": z[:, 0] > 0, "mean": z.mean(0)}
    return weighted(params, batch), extra | {"hits": jnp.sum(z > 0.5)}


AUX = {"rows": "concatenate", "top": "max", "right": "concatenate", "mean": "mean", "hits": "sum"}


@pytest.mark.parametrize("m", [1, 2])
def test_auxiliary_outputs_come_out_as_those_of_the_whole_batch(m):
    expected = with_aux(PARAMS, BATCH)[1]
    how = dict(has_aux=True, aux=AUX, microbatches=m)
    (_, whole), _ = jax.jit(objective.value_and_grad(with_aux, **how))(PARAMS, BATCH)
    sharded = jax.jit(fsdp.value_and_grad(with_aux, LINE, **how))
    (_, cut), _ = sharded(rules.place(PARAMS, fsdp.rule(), LINE), BATCH)
    assert_close(whole, expected)
    assert_close(cut, expected)
    assert cut["rows"].addressable_shards[0].data.shape == (2, 7)


@pytest.mark.parametrize(
    ("aux", "message"),
    [
        ("average", "aux='average'; expected one of sum, mean, max, concatenate"),
        ({"rows": "sum"}, "does not fit the auxiliary outputs"),
        ("concatenate", "concatenate' of a scalar"),
    ],
)
def test_ways_that_do_not_fit_are_named(aux, message):
    with pytest.raises(ValueError, match=message):
        objective.value_and_grad(with_aux, 2, has_aux=True, aux=aux)(PARAMS, BATCH)


# Keys.

CONFIG = model.Config(
    layers=2, embed=16, heads=2, kv_heads=1, head_dim=8, mlp=16, dropout=0.3, remat=True
)
KEYS = {
    "typed": jax.random.key(3),
    "raw": jax.random.PRNGKey(3),
    "rbg": jax.random.key(3, impl="rbg"),
}


@functools.cache
def decoder():
    graphdef, params = nnx.split(nnx.jit(lambda: model.Decoder(CONFIG, nnx.Rngs(0)))())
    return functools.partial(model.loss, graphdef=graphdef), params


def tokens():
    draw = np.random.default_rng(1)
    both = {name: draw.integers(0, 256, (16, 8)).astype(np.int32) for name in ("tokens", "targets")}
    return both | {"mask": draw.integers(0, 2, (16, 8)).astype(np.float32)}


@pytest.mark.parametrize("key", ["typed", "rbg"] if IN_FULL else ["typed"])
@pytest.mark.slow
def test_the_decoders_dropout_is_one_devices_in_every_part(key):
    (loss, params), key = decoder(), KEYS[key]
    expected = on_one([loss])(params, tokens(), key=key)
    other = jax.jit(loss)(params, tokens())
    assert abs(expected[0][0] - other.total / other.count) > 1e-3  # dropout is on
    for run in in_microbatches(4), in_shards(), in_shards(FEW, microbatches=2):
        assert_close(run([loss])(params, tokens(), key=key), expected, 1e-4)


def masks(batch, key):
    """Which entries the model would drop, row by row."""
    return layers.drop(jnp.ones((len(batch["x"]), 3, 5)), 0.4, key)


@pytest.mark.parametrize("key", marked(KEYS, {"typed"}))
def test_masks_are_those_of_one_device_bit_for_bit(key):
    key = KEYS[key]

    def loss(params, batch, key):
        return weighted(params, batch), masks(batch, key)

    expected = jax.jit(masks)(BATCH, key)
    assert 0.3 < float((expected == 0).mean()) < 0.5
    how = dict(has_aux=True, aux="concatenate")
    run = together([fsdp.value_and_grad(loss, LINE, microbatches=m, **how) for m in (1, 2)])
    for (_, found), _ in run(rules.place(PARAMS, fsdp.rule(), LINE), BATCH, key=key):
        np.testing.assert_array_equal(found, expected)


DRAWS = [("uniform", "typed"), ("uniform", "raw"), ("exponential", "rbg"), ("gamma", "typed")]


@pytest.mark.parametrize(("draw", "key"), marked(DRAWS, DRAWS[:1]))
def test_draws_by_shape_differ_from_part_to_part(draw, key):
    own, key = (2.0,) if draw == "gamma" else (), KEYS[key]

    def loss(params, batch, key):
        return weighted(params, batch), getattr(jax.random, draw)(key, *own, batch["x"].shape)

    for m, grid in [(1, LINE), (2, LINE), (4, None)]:
        how = dict(has_aux=True, aux="concatenate", microbatches=m)
        if grid is None:
            run = jax.jit(objective.value_and_grad(loss, **how))
            (_, found), _ = run(PARAMS, BATCH, key=key)
        else:
            run = fsdp.value_and_grad(loss, grid, **how)
            (_, found), _ = run(rules.place(PARAMS, fsdp.rule(), grid), BATCH, key=key)
        assert len(np.unique(np.asarray(found))) > 0.99 * found.size


@few_divisions
def test_a_count_of_what_is_drawn_counts_the_draws_of_the_loss(run):
    """As masked language models draw what they predict: of ones, the mean is 1, whatever it is."""

    def loss(params, batch, key):
        chosen = jax.random.bernoulli(key, 0.5, batch["weight"].shape) * (batch["weight"] > 0)
        return Mean(jnp.sum(chosen * params["b"].mean()), jnp.sum(chosen))

    program = run([loss])
    for seed in range(3):
        ((mean, _),) = program(PARAMS, BATCH, key=jax.random.key(seed))
        assert abs(mean - 1) < 1e-6


def test_keys_in_the_wrong_place_are_named():
    def loss(params, batch, key):
        noise = jax.random.normal(key, (len(batch["x"]),))
        return jnp.mean(outputs(params, batch).sum(1) * noise)

    sharded, typed = rules.place(PARAMS, fsdp.rule(), LINE), jax.random.key(0)
    for key in typed, jax.random.key_data(typed):
        with pytest.raises(TypeError, match=r"among its further arguments.*key="):
            fsdp.value_and_grad(loss, LINE)(sharded, BATCH, key)


def test_draws_by_place_and_by_shape_do_not_mix():
    def loss(params, batch, key):
        noise = jax.random.normal(key, (len(batch["x"]),))
        return jnp.mean(noise + masks(batch, key).sum((1, 2)) + outputs(params, batch).sum(1))

    with pytest.raises(ValueError, match=r"by place \(marks.index\).*by the shape of its part"):
        fsdp.value_and_grad(loss, LINE)(
            rules.place(PARAMS, fsdp.rule(), LINE), BATCH, key=KEYS["typed"]
        )


def test_an_index_of_rows_that_no_array_has_is_named():
    def loss(params, batch, key):
        return jnp.mean(layers.drop(outputs(params, batch)[None], 0.5, key))

    with pytest.raises(ValueError, match=r"'rows', 1.*this part of the batch has \[2\] entries"):
        fsdp.value_and_grad(loss, LINE)(
            rules.place(PARAMS, fsdp.rule(), LINE), BATCH, key=KEYS["typed"]
        )


# Losses that nobody listed.

UNARY = {"tanh": jnp.tanh, "square": lambda x: x * x, "clipped": clipped, "cos": jnp.cos}


@pytest.mark.slow
@given(
    chain=st.lists(st.sampled_from(sorted(UNARY)), min_size=1, max_size=3),
    weigh=st.sampled_from(["weight", "row", "none"]),
    scale=st.sampled_from([1.0, -3.0, 1e-4]),
    where=st.sampled_from(sorted(DIVIDED)),
    scanned=st.booleans(),
)
@settings(max_examples=8)
def test_random_losses_equal_one_device(chain, weigh, scale, where, scanned):
    def loss(params, batch):
        def body(x, w):
            for name in chain:
                x = UNARY[name](x @ w)
            return x, None

        x = outputs(params, batch)
        w = params["w"].T @ params["w"] * 0.1
        x = jax.lax.scan(body, x, jnp.stack([w, w]))[0] if scanned else body(x, w)[0]
        if weigh == "none":
            return scale * x.mean()
        each = {"weight": batch["weight"], "row": (batch["x"] > 0).sum(1)}[weigh]
        return Mean(scale * jnp.sum(x.sum(1) * each), scale**2 * jnp.sum(each))

    assert_close(DIVIDED[where]([loss])(PARAMS, BATCH), on_one([loss])(PARAMS, BATCH), 1e-4)


def test_effects_come_once_for_each_microbatch(capfd):
    def loss(params, batch):
        jax.debug.print("seen {n}", n=batch["weight"].shape[0])
        return weighted(params, batch)

    jax.block_until_ready(objective.value_and_grad(loss, 2)(PARAMS, BATCH))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen") == 2


@pytest.mark.slow
def test_every_optimizer_step_of_train_takes_a_key():
    loss, params = decoder()
    step = train.step(loss, optax.sgd(0.1), microbatches=2)
    found = []
    for key in None, KEYS["typed"], jax.random.key(4):
        fresh = jax.tree.map(jnp.copy, params)
        found.append(float(step(fresh, optax.sgd(0.1).init(params), tokens(), key)[2]))
    assert len(set(found)) == 3


def test_a_mark_is_the_whole_where_nothing_divides():
    np.testing.assert_array_equal(marks.index("rows", 5), np.arange(5))


LOGITS = {
    "accuracy": lambda z, y: jnp.mean(z.argmax(1) == y),
    "loss": lambda z, y: -jax.nn.log_softmax(z)[:, 0].mean(),
    "masked mean": lambda z, y: (z[:, 0] * (y > 0)).sum() / (y > 0).sum(),
    "mean of logits": lambda z, y: {"each": z.mean(0)},
    "sum": lambda z, y: z.sum(),
    "right": lambda z, y: (z.argmax(1) == y).sum(),
    "mean over features": lambda z, y: z.mean(1).sum(),
    "largest": lambda z, y: z.max(),
    "spread": lambda z, y: (z**2).sum(),
    "Mean": lambda z, y: objective.Mean(z.sum(), jnp.float32(z.size)),
    "constant": lambda z, y: jnp.float32(1),
    "rows": lambda z, y: z[:, 0],
    "which": lambda z, y: z.argmax(1),
}
OF_ROWS = [
    "accuracy",
    "loss",
    "masked mean",
    "mean of logits",
    "largest",
    "constant",
    "rows",
    "which",
]
SCORED = (
    {"w": DRAW.normal(size=(6, 3)).astype(np.float32)},
    {"x": DRAW.normal(size=(16, 6)).astype(np.float32), "y": np.arange(16, dtype=np.int32) % 3},
)


def with_logits(name):
    def loss(params, batch):
        z = batch["x"] @ params["w"]
        each = jax.nn.logsumexp(z, axis=1)
        return objective.Mean(each.sum(), jnp.float32(each.size)), LOGITS[name](z, batch["y"])

    return loss


@pytest.mark.parametrize("name", marked(OF_ROWS, OF_ROWS[::3]))
def test_what_is_no_sum_is_not_added_up(name):
    """A mean of eight devices would come out eight times too large, rows would be mixed."""
    told = r"has the rows of its part.*say aux='concatenate'"
    if name not in ("rows", "which"):
        told = r"aux='sum' adds up the loss's auxiliary output.*objective.Mean.*aux='mean'"
    with pytest.raises(objective.Indivisible, match=told):
        objective.check(with_logits(name), *SCORED, has_aux=True)


SAID = {"accuracy": "mean", "loss": "mean", "mean of logits": {"each": "mean"}}
SAID |= {"rows": "concatenate", "which": "concatenate", "largest": "max"}
SAID |= {name: "sum" for name in LOGITS if name not in {*OF_ROWS, *SAID}}


def test_said_how_it_is_that_of_the_whole_batch():
    given = dict(has_aux=True)
    ours = together(
        [objective.value_and_grad(with_logits(n), 4, **given, aux=SAID[n]) for n in SAID]
    )
    theirs = together([with_logits(name) for name in SAID])
    for name, (found, _), (_, expected) in zip(SAID, ours(*SCORED), theirs(*SCORED), strict=True):
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, err_msg=name)
        jax.tree.map(close, found[1], expected)


@pytest.mark.parametrize("name", marked(SAID, ["accuracy", "rows", "largest", "sum"]))
def test_said_how_it_is_it_passes(name):
    objective.check(with_logits(name), *SCORED, has_aux=True, aux=SAID[name])


def test_an_accuracy_that_is_zero_on_few_rows_is_seen_on_others():
    """As at the start of training, where hardly a row of many classes is right."""
    params = {"w": DRAW.normal(size=(6, 64)).astype(np.float32)}
    batch = SCORED[1] | {"y": np.full(16, 63, np.int32)}
    assert not np.any((batch["x"] @ params["w"]).argmax(1)[:8] == 63)
    with pytest.raises(objective.Indivisible, match="aux='sum' adds up"):
        objective.check(with_logits("accuracy"), params, batch, has_aux=True)


def test_what_nobody_reads_is_not_compared():
    objective.check(with_logits("accuracy"), *SCORED, has_aux=True, aux=None)


def test_rows_are_no_maximum():
    with pytest.raises(ValueError, match=r"auxiliary output tree has the rows.*aux='max'"):
        objective.check(with_logits("rows"), *SCORED, has_aux=True, aux="max")
