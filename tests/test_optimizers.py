"""Every transformation of Optax that runs on one device, under each strategy that updates.

Each takes three steps with given gradients, and must yield one device's parameters and state, or
be refused by a message that stands in `REFUSED`. Under fsdp all do so; elsewhere one of each shape
of state.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sampling import marked

from shardwise import layouts, measure, mesh, rules
from shardwise import tree as trees
from shardwise.layouts import training

mesh.simulate(8)
LINE, PAIR, STAGES = mesh.make(fsdp=4), mesh.make(fsdp=2), mesh.make(stage=2, fsdp=2)
contrib = optax.contrib

SHAPES = {
    "w": (4, 5, 8),
    "bias": (4, 8),
    "flat": (4,),
    "scalar": (),
    "tied": (5, 8),
    "vector": (7,),
    "wide": (3, 5),
}


def labels(params):
    return jax.tree.map(lambda x: "ab"[jnp.ndim(x) > 1], params)


def then(first, second=None):
    return optax.chain(first, second or optax.sgd(1e-2, momentum=0.9))


TABLE = {
    "acprop": contrib.acprop(1e-2),
    "adabelief": optax.adabelief(1e-2),
    "adadelta": optax.adadelta(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=5),
    "adafactor, of stacks": optax.adafactor(1e-2, min_dim_size_to_factor=3),
    "adagrad": optax.adagrad(1e-2),
    "adam": optax.adam(1e-2),
    "adamax": optax.adamax(1e-2),
    "adamaxw": optax.adamaxw(1e-2),
    "adamw": optax.adamw(1e-2),
    "adan": optax.adan(1e-2),
    "adaptive_grad_clip": then(optax.adaptive_grad_clip(0.1)),
    "add_noise": then(optax.add_noise(0.1, 0.5, 3)),
    "ademamix": contrib.ademamix(1e-2),
    "adopt": contrib.adopt(1e-2),
    "amsgrad": optax.amsgrad(1e-2),
    "apply_every": then(optax.adam(1e-2), optax.apply_every(2)),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "centralize": then(optax.centralize()),
    "clip": then(optax.clip(0.1)),
    "clip_by_block_rms": then(optax.clip_by_block_rms(0.1)),
    "clip_by_global_norm": then(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "cocob": contrib.cocob(),
    "conditionally_mask": optax.conditionally_mask(optax.adam(1e-2), lambda step: step % 2 == 0),
    "conditionally_transform": optax.conditionally_transform(
        optax.adam(1e-2), lambda step: step % 2 == 0
    ),
    "dadapt_adamw": contrib.dadapt_adamw(1.0),
    "dog": contrib.dog(),
    "dowg": contrib.dowg(),
    "ema": then(optax.ema(0.9)),
    "fromage": optax.fromage(1e-2),
    "galore": contrib.galore(1e-2, rank=2),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(1e-2, 0, 5)
    ),
    "keep_params_nonnegative": optax.chain(optax.sgd(1e-2), optax.keep_params_nonnegative()),
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(1e-2),
    "lbfgs": optax.lbfgs(1e-2, memory_size=2, linesearch=None),
    "lbfgs, with a line search": optax.lbfgs(memory_size=2),
    "lion": optax.lion(1e-3),
    "madgrad": contrib.madgrad(1e-2),
    "masked": optax.masked(
        optax.adam(1e-2), lambda params: jax.tree.map(lambda x: jnp.ndim(x) > 1, params)
    ),
    "mechanize": contrib.mechanize(optax.adam(1e-2)),
    "momo": contrib.momo(),
    "momo_adam": contrib.momo_adam(),
    "multi_steps": optax.MultiSteps(then(optax.clip_by_global_norm(0.1), optax.adam(1e-2)), 2),
    "multi_transform": optax.multi_transform(
        {"a": optax.adam(1e-2), "b": optax.lamb(1e-2)}, labels
    ),
    "muon": contrib.muon(1e-2),
    "nadamw": optax.nadamw(1e-2),
    "noisy_sgd": optax.noisy_sgd(1e-2, key=3),
    "normalize": then(contrib.normalize()),
    "normalize_by_update_norm": then(optax.normalize_by_update_norm()),
    "novograd": optax.novograd(1e-2),
    "optimistic_adam": optax.optimistic_adam_v2(1e-2),
    "optimistic_gradient_descent": optax.optimistic_gradient_descent(1e-2),
    "polyak_sgd": optax.polyak_sgd(1.0),
    "prodigy": contrib.prodigy(),
    "radam": optax.radam(1e-2),
    "reduce_on_plateau": optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau(patience=1)),
    "rmsprop": optax.rmsprop(1e-2),
    "rprop": optax.rprop(1e-2),
    "scale_by_param_block_norm": then(optax.scale_by_param_block_norm()),
    "scale_by_param_block_rms": then(optax.scale_by_param_block_rms()),
    "scale_by_stddev": then(optax.scale_by_stddev()),
    "scale_by_trust_ratio": then(optax.scale_by_trust_ratio()),
    "schedule_free": contrib.schedule_free_adamw(1e-2),
    "sgd": optax.sgd(1e-2, momentum=0.9),
    "sign_sgd": optax.sign_sgd(1e-2),
    "signum": optax.signum(1e-2),
    "simplified_ademamix": contrib.simplified_ademamix(1e-2),
    "skip_not_finite": optax.MultiSteps(
        optax.sgd(1e-2), 1, should_skip_update_fn=optax.skip_not_finite
    ),
    "sm3": optax.masked(  # on one device it takes no scalars
        optax.sm3(1e-2), lambda params: jax.tree.map(lambda x: jnp.ndim(x) == 1, params)
    ),
    "sm3, of stacks": optax.masked(
        optax.sm3(1e-2), lambda params: jax.tree.map(lambda x: jnp.ndim(x) > 0, params)
    ),
    "split_real_and_imaginary": contrib.split_real_and_imaginary(optax.adam(1e-2)),
    "yogi": optax.yogi(1e-2),
    "zero_nans": then(optax.zero_nans(), optax.adam(1e-2)),
}
WITH_VALUE = {"momo", "momo_adam", "polyak_sgd", "reduce_on_plateau"}
WITH_NANS = {"apply_if_finite", "skip_not_finite", "zero_nans"}
REFUSED = {
    (
        "rules",
        "galore",
    ): r"mu/bias has shape \(4, 2\), and its parameter bias has \(4, 8\); .* other=",
}
# An update is the compiler's, and what ways differ in is where a state lies: one of each shape of
# state, and more where some are told the loss or take norms over all, or within arrays.
EVERYWHERE = {
    "adafactor", "adafactor, of stacks", "add_noise", "clip_by_global_norm", "dog", "dowg",
    "fromage", "galore", "lamb", "lbfgs", "lbfgs, with a line search", "masked", "mechanize",
    "momo", "muon", "multi_transform", "noisy_sgd", "normalize_by_update_norm", "novograd",
    "optimistic_gradient_descent", "polyak_sgd", "scale_by_stddev", "skip_not_finite", "sm3",
    "sm3, of stacks", "zero_nans",
}  # fmt: skip
CASES = [(way, name) for way in ("fsdp", "stages", "rules") for name in TABLE if name in EVERYWHERE]
OTHERS = [("fsdp", name) for name in TABLE if name not in EVERYWHERE]
# By default what was once refused or wrong, and some of the rest.
FAST = {("rules", "masked"), ("fsdp", "clip_by_global_norm"), ("fsdp", "sm3, of stacks")}
FAST |= {("stages", name) for name in ("zero_nans", "muon", "multi_transform")}
# Dear, and of one path each; or once refused.
ALWAYS = {("fsdp", name) for name in ("add_noise", "galore", "lbfgs", "mechanize", "adafactor")}
ALWAYS |= {("stages", "adafactor"), ("stages", "sm3"), ("rules", "galore"), ("rules", "adafactor")}


def arrays(seed, dtype=jnp.float32):
    draw = np.random.default_rng(seed)
    return {k: jnp.asarray(draw.normal(size=shape), dtype) for k, shape in SHAPES.items()}


def gradients(name, step):
    grads = arrays(step + 1)
    if name in WITH_NANS and step == 1:
        # In the last row: a guard that looks at the first stage's alone would let it pass.
        grads["w"] = grads["w"].at[3, 1, 2].set(jnp.nan)
    return grads


def further(name, step):
    """The arguments that some take besides."""
    return {"value": jnp.float32(2 - step / 4)} if name in WITH_VALUE else {}


def search(name, grads):
    """For a line search: a function of whole parameters."""
    if "line search" not in name:
        return {}
    return {
        "value": jnp.float32(3),
        "grad": grads,
        "value_fn": lambda p: optax.tree.norm(p, squared=True),
    }


def on_one(tx, name):
    params, steps = arrays(0), []
    state = tx.init(params)

    @jax.jit
    def step(params, state, grads, extra):
        updates, state = tx.update(grads, state, params, **extra, **search(name, grads))
        return optax.apply_updates(params, updates), state

    for i in range(3):
        params, state = step(params, state, gradients(name, i), further(name, i))
        steps.append((params, state))
    return steps


def by_layout(grid, tx, name):
    roles = {role: role for role in grid.axis_names}
    layout = layouts.Layout(grid, **roles, stacked=lambda path: path == "w")
    params, state = layouts.init(layout, lambda key: arrays(0), tx, jax.random.key(0))
    lies = jax.tree.map(lambda x: x.sharding, (params, state))

    @jax.jit
    def step(params, state, grads, extra):
        further = extra | search(name, grads)
        updates, state = training._update(layout, tx, grads, state, params, **further)
        return optax.apply_updates(params, updates), state

    for i in range(3):
        grads = layouts.place(layout, gradients(name, i))
        params, state = step(params, state, grads, further(name, i))
        for x, sharding in zip(*map(jax.tree.leaves, ((params, state), lies)), strict=True):
            assert x.sharding.is_equivalent_to(sharding, x.ndim)
        yield params, state


def by_rules(tx, name):
    rule = rules.FSDPRule("fsdp", min_size=8, uneven="replicate")
    params = rules.place(arrays(0), rule, PAIR)
    state = tx.init(arrays(0))
    followed = rules.follow(rule, arrays(0))
    state = rules.place(state, followed, PAIR)
    by_path = {path: x.sharding for path, x in rules.named_leaves(params)}
    for path, x in rules.named_leaves(state):
        owner = next((p for p in by_path if path.endswith(f"/{p}") and x.shape == SHAPES[p]), None)
        assert owner is None or x.sharding.is_equivalent_to(by_path[owner], x.ndim), path

    @jax.jit
    def step(params, state, grads, extra):
        updates, state = tx.update(grads, state, params, **extra, **search(name, grads))
        state = rules.constrain_tree(state, followed, PAIR)
        return optax.apply_updates(params, updates), state

    for i in range(3):
        grads = rules.place(gradients(name, i), rule, PAIR)
        params, state = step(params, state, grads, further(name, i))
        yield params, state


WAYS = {
    "fsdp": functools.partial(by_layout, LINE),
    "stages": functools.partial(by_layout, STAGES),
    "rules": by_rules,
}


def assert_close(ours, theirs, rtol=1e-4):
    """Relative to each array's largest entry: sums are taken in another order."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        most = np.abs(b[np.isfinite(b)]).max(initial=1e-6)
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * most)


def psi(tx, update, shapes):
    """Bytes that a device sends in `update(layout, tx, ...)`, in those of all parameters."""
    params = {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in shapes.items()}
    layout = layouts.Layout(mesh.make(fsdp=8), fsdp="fsdp")

    def laid(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    given = params, jax.eval_shape(tx.init, params)
    params, state = jax.tree.map(laid, given, layouts.shardings(layout, params, tx))
    run = jax.jit(functools.partial(update, layout, tx))
    program = run.lower(params, state, params).compile()
    sent = sum(kind.ring_bytes for kind in measure.collectives(program).values())
    return sent / sum(4 * np.prod(shape) for shape in shapes.values())


MATRICES = {"a": (64, 128), "b": (128, 64), "c": (64, 64), "v": (128,), "stack": (4, 32, 64)}
EVERY_MATRIX = contrib.muon(
    1e-2,
    muon_weight_dimension_numbers=lambda params: jax.tree.map(
        lambda x: contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1) if x.ndim > 1 else None,
        params,
    ),
)
SENT = {
    "adam": (optax.adam(1e-2), 0),
    "adafactor": (optax.adafactor(1e-2, min_dim_size_to_factor=32), 0.06),
    "muon": (contrib.muon(1e-2), 1),
    "muon of stacks": (EVERY_MATRIX, 1),
    "galore": (contrib.galore(1e-2, rank=4), 2),
}


SLOW = ("adafactor", "muon of stacks", "galore")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SENT]
)
def test_an_update_gathers_each_matrix_at_most_once(name):
    tx, most = SENT[name]
    assert psi(tx, training._update, MATRICES) <= most


@pytest.mark.parametrize("name", ["adam", pytest.param("adafactor", marks=pytest.mark.slow)])
def test_a_plain_update_sends_no_more(name):
    tx, most = SENT[name]
    assert psi(tx, lambda layout, tx, *given: tx.update(*given), MATRICES) <= most


def shape_of_state(tx):
    """What it holds: of each parameter which axes of it, of the rest which shapes; in which dtypes.

    How many arrays it holds of a kind does not count.
    """
    params = {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in SHAPES.items()}
    state = jax.eval_shape(tx.init, params)
    pairs = zip(trees.leaves(state), trees.owners(state, params), strict=True)
    return frozenset((x.shape if o is None else o, x.dtype) for (_, x), o in pairs)


def test_what_runs_everywhere_has_every_shape_of_state():
    assert {*map(shape_of_state, TABLE.values())} == {shape_of_state(TABLE[n]) for n in EVERYWHERE}
    assert {name for _, name in REFUSED if ("rules", name) in REFUSED} <= EVERYWHERE


@functools.cache
def expected(name):
    return on_one(TABLE[name], name)


SOME = [*FAST, *ALWAYS]
SAMPLED = [case for case in CASES if case not in SOME]


@pytest.mark.parametrize(
    ("way", "name"),
    marked(sorted(SOME), FAST) + marked(SAMPLED, (), 24) + marked(OTHERS, (), 12),
)
def test_every_optimizer_equals_one_device_or_is_refused(way, name):
    tx = TABLE[name]
    if (way, name) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[way, name]):
            list(WAYS[way](tx, name))
        return
    for ours, theirs in zip(WAYS[way](tx, name), expected(name), strict=True):
        assert_close(ours, theirs)
