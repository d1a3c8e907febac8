"""Layouts with stages: one device's losses, gradients and steps, under every schedule and role."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from sampling import IN_FULL, marked
from staged_models import (
    MODELS,
    VOCAB,
    WIDE,
    assert_close,
    batch,
    case,
    mean_of,
    on_one,
    stack,
    stacked,
    weights,
)

from shardwise import layouts, marks, measure, mesh, model, objective, schedules
from shardwise.layouts import catalogue
from shardwise.objective.means import quotient

mesh.simulate(8)
KEY = jax.random.key(0)
REMAT = jax.checkpoint_policies.nothing_saveable


def columns(tree, grid):
    """A rule of the tensor axis for parameters without names: the last axis of each matrix."""
    del grid
    even = lambda x: x.ndim > 1 and x.shape[-1] % 2 == 0  # noqa: E731
    return jax.tree.map(lambda x: P(*[None] * (x.ndim - 1), "tensor") if even(x) else P(), tree)


def of_roles(*roles, n=None, **settings):
    """A layout with stages on two devices each, in four microbatches."""
    roles = ("stage", *roles)
    settings = {"microbatches": 4} | settings
    if "tensor" in roles:
        settings["over"] = columns
    return catalogue.over(roles, n or 2 ** len(roles), **settings)


# Every schedule, beside other roles, for every model and optimizer.

MESHES = {
    "alone": (),
    "fsdp": ("fsdp",),
    "fsdp by compiler": ("fsdp", dict(by="compiler")),
    "data, tensor": ("data", "tensor"),
}
# With an eps that noise does not pass: Adam's steps have one size whatever the gradient's.
OPTIMIZERS = (
    optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2, eps=1e-3)),
    optax.adafactor(1e-2, min_dim_size_to_factor=4, eps=1e-4),
)
SAMPLE = 4
QUICK = [("zb_h1", "fsdp", "tied")]
ALWAYS = [("dualpipe_v", "fsdp by compiler", "uneven")]
ALWAYS += [("interleaved_1f1b", "data, tensor", "nnx, skips")]


def table():
    """Some cases, and of the others a sample; all with IN_FULL, which `make stacks` sets."""
    some = [*QUICK, *ALWAYS]
    cases = itertools.product(schedules.SCHEDULES, MESHES, MODELS)
    return marked(some, QUICK) + marked([c for c in cases if c not in some], (), SAMPLE)


def either(first, second):
    """A transformation that is one of two, as a number in its state says, and keeps gradients."""

    def init(params):
        own = first.init(params), second.init(params)
        return jnp.int32(0), jax.tree.map(jnp.zeros_like, params), own

    def update(grads, state, params):
        which, _, (one, two) = state
        (ours, one), (theirs, two) = (
            first.update(grads, one, params),
            second.update(grads, two, params),
        )
        updates = jax.tree.map(lambda a, b: jnp.where(which == 0, a, b), ours, theirs)
        return updates, (which, grads, (one, two))

    return optax.GradientTransformation(init, update)


def trained(step, params, state, which):
    """(the mean and gradients of a first step, parameters after two)."""
    state = (jnp.full_like(state[0], which), *state[1:])
    params, state, mean = step(params, state, batch())
    first = float(mean), jax.tree.map(np.asarray, state[1])
    return first, step(params, state, batch())[0]


@functools.cache
def trained_on_one(name):
    """With both optimizers; how many stages there are does not change what a model computes."""
    one, tx = case(name, 1), either(*OPTIMIZERS)

    @jax.jit
    def step(params, state, batch):
        mean, grads = jax.value_and_grad(lambda p: quotient(one.loss(p, batch)))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, mean

    return [trained(step, one.params, jax.jit(tx.init)(one.params), which) for which in (0, 1)]


@pytest.mark.parametrize(("schedule", "grid", "name"), table())
def test_two_steps_equal_one_device(schedule, grid, name):
    found = case(name, schedules.spread(schedule, 2, 4).stages)
    *roles, settings = MESHES[grid] if grid.endswith("compiler") else (*MESHES[grid], {})
    layout = of_roles(*roles, schedule=schedule, stacked=found.stacked, **settings)
    tx = either(*OPTIMIZERS)
    step = layouts.step(layout, found.loss, tx, check=False)
    made = layouts.init(layout, lambda key: found.params, tx, KEY)
    copies = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(made)  # as a step donates
    for given, which, (first, after) in zip(
        (made, copies), (0, 1), trained_on_one(name), strict=True
    ):
        ours, params = trained(step, *given, which)
        assert_close(ours, first)
        assert_close(params, after, 1e-3)


# Settings by hand.


def evaluate(layout, loss, params, batch, *args, key=None, **options):
    """What a layout's `value_and_grad` returns, of parameters laid out."""
    function = layouts.value_and_grad(layout, loss, **options)
    return function(layouts.place(layout, params), batch, *args, key=key)


SETTINGS = {
    "data, one microbatch": ("data", dict(microbatches=1)),
    "zero 1": ("fsdp", "data", dict(zero=1)),
    "zero 2": ("fsdp", dict(zero=2, min_size=50)),
    "zero 2 by compiler": ("fsdp", dict(zero=2, by="compiler")),
    "ring": ("context", dict(microbatches=2)),
    "ring, fsdp": ("fsdp", "context", dict(schedule="zb_h1")),
    "ulysses": ("context", dict(attention="ulysses")),
    "zigzag": ("context", dict(attention="zigzag", microbatches=1)),
    "all_gather": ("context", dict(attention="all_gather", schedule="gpipe")),
    "remat": ("fsdp", dict(remat=REMAT)),
    "bfloat16": ("fsdp", dict(dtype=jnp.bfloat16, reduce_dtype=jnp.float32)),
    "an odd array": ("fsdp", dict(odd=True)),
    "not by use": ("fsdp", dict(stacked=None, used=False)),
}
FAST = {"zero 1"}


@pytest.mark.parametrize("name", marked(SETTINGS, FAST, 5))
def test_every_setting_equals_one_device(name):
    *roles, settings = SETTINGS[name]
    settings = {"stacked": lambda path: path.startswith("layers")} | settings
    params, used = weights(), settings.pop("used", True)
    if settings.pop("odd", False):  # along no axis of this one
        params["embed"], params["head"] = params["embed"][:11], params["head"][:, :11]
        params["layers"] |= {"b": params["layers"]["b"][:, :WIDE]}
    given = jax.tree.map(lambda x: np.minimum(x, 10) if x.dtype == np.int32 else x, batch())
    given = jax.tree.map(lambda x: np.concatenate([x, x], axis=1), given)
    loss = stacked(2, attend="context" in roles, used=used).loss
    layout = of_roles(*roles, **settings)
    found = evaluate(layout, loss, params, given, check=name in FAST)
    expected = on_one(stacked(1, attend="context" in roles).loss, params, given)
    assert_close(found, expected, 4e-2 if layout.dtype else 2e-5)


@pytest.mark.slow
def test_of_padding_alone_the_loss_and_its_gradients_are_nothing():
    params, given = weights(), batch()
    given["mask"] = np.zeros_like(given["mask"])
    layout = of_roles("fsdp", microbatches=2)
    mean, grads = evaluate(layout, stacked(2).loss, params, given, check=False)  # of nothing
    assert mean == 0 and not any(np.asarray(x).any() for x in jax.tree.leaves(grads))


@pytest.mark.slow
@pytest.mark.skipif(not IN_FULL, reason="run by `make stacks`; test_layouts.py combines the roles")
def test_experts_within_stages_equal_one_device():
    """Tokens travel to them; the layers are rematerialised, and drop by place."""
    config = model.Config(
        vocab=VOCAB, embed=8, layers=2, heads=2, kv_heads=2, head_dim=4, mlp=8, stages=2,
        experts=4, experts_per_token=2, remat=True, dropout=0.2,
    )  # fmt: skip
    graphdef, params = nnx.split(nnx.jit(lambda: model.Decoder(config, nnx.Rngs(0)))())
    loss = functools.partial(model.loss, graphdef=graphdef)
    layout = of_roles("fsdp", "expert", microbatches=2)
    found = evaluate(layout, loss, params, batch(), key=KEY, check=False)
    assert_close(found, on_one(loss, params, batch(), key=KEY))


def told(params, given):
    """A mean over rows, and auxiliary outputs of every kind."""
    x = params["embed"][given["tokens"]].mean(axis=1)
    x = marks.stage_boundary(x + jnp.tanh(x @ params["layers"]["w"][0]))
    x = x + jnp.tanh(x @ params["layers"]["w"][1])
    each = jnp.sum((x @ params["head"]) ** 2, axis=-1)
    aux = {"sum": jnp.sum(x, axis=0), "mean": each.mean(), "max": each.max(), "rows": x}
    return jnp.mean(each), aux | {"seen": jnp.float32(len(x))}


WAYS = {"sum": "sum", "mean": "mean", "max": "max", "rows": "concatenate", "seen": "sum"}


def test_a_mean_over_rows_and_auxiliary_outputs():
    """Also of the value alone, whose program has a third of the products at most."""
    params = weights(2)
    (mean, theirs), gradient = jax.jit(jax.value_and_grad(told, has_aux=True))(params, batch())
    layout = of_roles("fsdp", schedule="gpipe")
    (value, aux), grads = evaluate(layout, told, params, batch(), has_aux=True, aux=WAYS)
    assert_close((value, aux, grads), (mean, theirs, gradient))
    alone = layouts.value(layout, told, True, WAYS)(layouts.place(layout, params), batch())
    assert_close(alone, (mean, theirs))


@pytest.mark.slow
def test_draws_by_shape_are_each_device_s_own():
    """The count counts the draws of the loss: of ones, the mean is 1, whatever is drawn."""

    def loss(params, given, key=None):
        drawn = jax.random.uniform(KEY if key is None else key, given["mask"].shape)
        chosen = (drawn < 0.5) & (given["tokens"] > 3)
        x = marks.stage_boundary(params["embed"][given["tokens"]]) @ params["head"]
        each = 1 + x.sum(-1) - jax.lax.stop_gradient(x.sum(-1))
        return objective.Mean(jnp.sum(chosen * each), jnp.sum(chosen)), drawn

    layout = of_roles("fsdp", microbatches=2)
    function = layouts.value_and_grad(layout, loss, has_aux=True, aux="concatenate", check=False)
    placed = layouts.place(layout, weights())
    found = [function(placed, batch(), key=jax.random.key(i))[0] for i in (1, 1, 2)]
    assert [float(mean) for mean, _ in found] == pytest.approx([1, 1, 1])
    draws = [np.asarray(draw) for _, draw in found]
    assert (draws[0] == draws[1]).all() and (draws[0] != draws[2]).all()
    assert len(np.unique(draws[0])) == draws[0].size


def centred(params, given):
    """Rows that look at each other, by a sum over the whole batch."""
    x = marks.stage_boundary(params["embed"][given["tokens"]].sum(1)) @ params["head"]
    total, count = marks.total((jnp.sum(x, axis=0), jnp.float32(len(x))))
    return objective.Mean(jnp.sum((x - total[None] / count) ** 2), jnp.float32(len(x)))


@pytest.mark.slow
def test_sums_over_the_whole_batch():
    layout = of_roles("fsdp", schedule="gpipe", microbatches=1)
    assert_close(evaluate(layout, centred, weights(), batch()), on_one(centred, weights(), batch()))
    with pytest.raises(ValueError, match=r"taken in 2 microbatches"):
        evaluate(dataclasses.replace(layout, microbatches=2), centred, weights(), batch())


# Plain arrays: where they lie, and what others do with them.


@pytest.mark.parametrize("by", ["hand", "compiler"])
@pytest.mark.parametrize("zero", [1, 3])
def test_arrays_lie_as_shardings_say_and_are_cut_over_stages(by, zero):
    """Whatever the schedule, row i of a stack is layer i, on the device of the i-th part."""
    params, tx = weights(), optax.adam(1e-2)
    layout = of_roles("fsdp", by=by, zero=zero, stacked=lambda path: path.startswith("layers"))
    held = layouts.init(layout, lambda key: weights(), tx, KEY)
    wanted = layouts.shardings(layout, jax.eval_shape(weights), tx)
    assert jax.tree.map(lambda x: x.sharding, held) == wanted
    assert held[0]["layers"]["w"].sharding.spec[0] == "stage"
    cut = 4 if zero == 3 or by == "hand" else 2
    for x in jax.tree.leaves(held[0]):
        assert x.size == cut * x.addressable_shards[0].data.size
    for x in jax.tree.leaves(held[1]):
        assert x.ndim == 0 or x.size == 4 * x.addressable_shards[0].data.size
    jax.tree.map(np.testing.assert_array_equal, layouts.whole(layout, held[0]), params)


def test_frozen_parts_and_complex_parameters_take_several_steps():
    """By `optax.multi_transform`, whose state holds some of the arrays alone."""

    def loss(params, given):
        x = marks.stage_boundary(params["base"]["embed"][given["tokens"]])
        turned = jnp.real(x * params["turn"][None, None] * (1 + 2j))
        return mean_of(turned @ params["base"]["head"], given)

    def create(key=None):
        turn = jnp.asarray(np.random.default_rng(0).normal(size=(WIDE, 2)) @ [1, 1j])
        return {"base": weights() | {"layers": {}}, "turn": turn.astype(jnp.complex64)}

    label = lambda params: {"base": "frozen", "turn": "trained"}  # noqa: E731
    tx = optax.multi_transform({"frozen": optax.set_to_zero(), "trained": optax.adam(0.1)}, label)
    layout = of_roles("fsdp", microbatches=2)
    params, state = layouts.init(layout, create, tx, KEY)
    step, means = layouts.step(layout, loss, tx, check=False), []
    ours = create()
    own = tx.init(ours)

    @jax.jit
    def on_one_device(ours, own, given):
        value, grads = jax.value_and_grad(lambda params: quotient(loss(params, given)))(ours)
        updates, own = tx.update(grads, own, ours)
        return optax.apply_updates(ours, updates), own, value

    for _ in range(3):
        params, state, mean = step(params, state, batch())
        means.append(float(mean))
        ours, own, value = on_one_device(ours, own, batch())
        assert float(mean) == pytest.approx(float(value), rel=1e-5)
    assert abs(means[0] - means[2]) > 1e-3
    np.testing.assert_array_equal(params["base"]["embed"], create()["base"]["embed"])


@pytest.mark.slow
def test_an_nnx_module_as_parameters_equals_one_device_or_is_told_what_to_do():
    """Newer releases of Flax flatten a module to its arrays; for others it is one object."""

    def loss(module, given):
        x = module(jax.nn.one_hot(given["tokens"], WIDE))
        return mean_of(module(marks.stage_boundary(x)), given)

    module, layout = nnx.Linear(WIDE, WIDE, rngs=nnx.Rngs(0)), of_roles("fsdp", microbatches=2)
    given = jax.tree.map(lambda x: x % WIDE if x.dtype == np.int32 else x, batch())
    function = layouts.value_and_grad(layout, loss, check=False)
    if jax.tree.leaves(module) == [module]:
        with pytest.raises(TypeError, match=r"is a Linear, .*nnx.split"):
            function(module, given)
    else:
        found = function(layouts.place(layout, module), given)
        assert_close(found, on_one(loss, module, given))


# Bytes.


PREDICTED = {
    "alone, gpipe": ((), dict(schedule="gpipe")),
    "alone, of three": ((), dict(n=3)),
    "alone, folded": ((), dict(schedule="dualpipe_v")),
    "alone, zb_h1, tied": ((), dict(schedule="zb_h1", tied=True)),
    "fsdp": (("fsdp",), {}),
    "fsdp, folded, tied": (("fsdp",), dict(schedule="interleaved_1f1b", tied=True)),
    "fsdp, zero 1": (("fsdp",), dict(zero=1, remat=REMAT)),
    "fsdp, zero 2": (("fsdp",), dict(zero=2)),
    "fsdp, zb_h1, remat": (("fsdp",), dict(schedule="zb_h1", remat=REMAT)),
    "fsdp, unequal": (("fsdp",), dict(layers=5)),
    "fsdp, zero 1, unequal": (("fsdp",), dict(layers=5, zero=1)),
    "fsdp, zero 2, unequal": (("fsdp",), dict(layers=5, zero=2)),
    "data, fsdp": (("data", "fsdp"), {}),
    "fsdp, one microbatch": (("fsdp",), dict(microbatches=1, schedule="gpipe")),
    "context, fsdp": (("fsdp", "context"), dict(attention="all_gather")),
    "fsdp, tensor": (("fsdp", "tensor"), {}),
}


@pytest.mark.parametrize(
    "name", marked(PREDICTED, {"alone, of three", "data, fsdp"}, 3, always=["fsdp, tensor"])
)
def test_bytes_held_and_sent_are_predicted(name):
    """To the byte, by mesh axes, on the device of those along the stages that sends most."""
    roles, settings = PREDICTED[name]
    settings, tx = dict(settings), optax.adamw(0.1)
    tied, layers = settings.pop("tied", False), settings.pop("layers", 4)
    layout = of_roles(
        *roles, stacked=lambda path: path.startswith(("layers", "blocks")), **settings
    )
    devices = layout.size("stage")
    stages = schedules.spread(layout.schedule, devices, 4).stages
    whole = layout.context or layout.tensor
    found = case("decoder", stages) if whole else stacked(stages, tied=tied, layers=layers)
    params = jax.eval_shape(lambda: found.params)
    held = layouts.init(layout, lambda key: found.params, tx, KEY)
    function = layouts.value_and_grad(layout, found.loss)
    program = function.lower(held[0], batch()).compile()
    counted = {
        axes: sum(op.ring_bytes for op in part.ops)
        for axes, part in measure.by_axis(measure.collectives(program), layout.auto).items()
    }
    told = [
        layouts.predict(layout, params, batch(), tx, loss=found.loss, stage=place)
        for place in range(devices)
    ]
    axes = {axes for one in told for axes in one.sent}
    most = {a: max(one.sent.get(a, 0) for one in told) for a in axes}
    if layout.tensor:  # what goes along other axes the compiler may cut, or leave whole
        most, counted = ({a: sizes[a] for a in [layout.fsdp]} for sizes in (most, counted))
    assert most == pytest.approx({a: size for a, size in counted.items() if size})
    for tree, part in zip(held, ("parameters", "state"), strict=True):
        sizes = set(measure.bytes_on_devices(tree).values())
        assert sizes == {one.held[part] for one in told}


def test_a_prediction_leaves_nothing_of_its_trace():
    found = stacked(2)
    with jax.checking_leaks():
        layouts.predict(of_roles(), jax.eval_shape(lambda: found.params), batch(), loss=found.loss)


def test_a_prediction_needs_the_loss():
    with pytest.raises(ValueError, match="which stage reads what the loss tells: give loss="):
        layouts.predict(of_roles("fsdp"), weights(), batch())


# Errors.


def outside(params, given):
    return mean_of(stack(params, given, 2, used=False), given)


def by_shape(params, given):
    """Takes as many layers to a stage as a weight's columns tell."""
    size = params["layers"]["w"].shape[2] * 2 // WIDE
    cut = params | {"layers": jax.tree.map(lambda x: x[: 2 * size], params["layers"])}
    return mean_of(stack(cut, given, 2), given)


def no_mark(params, given):
    return mean_of(params["embed"][given["tokens"]] @ params["head"], given)


def scalar(params, given):
    return told(params, given)[0]


WHO = "^layouts.value_and_grad:"  # what was called
REFUSED = {
    "rows": (("fsdp",), dict(rows=12), rf"{WHO} mask of shape \(12, 4\) does not split into 8"),
    "by compiler": (
        ("fsdp", dict(by="compiler")),
        dict(rows=12),
        rf"{WHO} mask of shape \(12, 4\) does not split into 8 parts along its rows",
    ),
    "sequence": (("context",), dict(length=3), rf"{WHO} a sequence of 3 does not split .* to 4"),
    "read outside": (("fsdp",), dict(loss=outside), r"is stacked, and read outside marks.use"),
    "uneven": (("fsdp", dict(uneven="error")), dict(odd=True), r"odd of shape \(3,\) has no axis"),
    "aux rows": (("context",), dict(aux=True), r"aux 'concatenate' joins rows, and of each row a"),
    "scalar": (("context",), dict(loss=scalar), r"the loss is one scalar: a mean over rows"),
    "no mark": (("fsdp",), dict(loss=no_mark), rf"{WHO} .* The loss has no stage boundary"),
    "schedule": (("fsdp", dict(schedule="2f2b")), {}, rf"{WHO} no schedule '2f2b'; there are"),
}


@pytest.mark.parametrize(("roles", "change", "expected"), REFUSED.values(), ids=REFUSED)
def test_what_stages_cannot_take_is_said(roles, change, expected):
    *roles, settings = roles if isinstance(roles[-1], dict) else (*roles, {})
    given = jax.tree.map(lambda x: x[: change.get("rows"), : change.get("length")], batch())
    params = weights() | ({"odd": np.ones(3, np.float32)} if "odd" in change else {})
    loss, options = change.get("loss", stacked(2).loss), {}
    if "aux" in change:
        options = dict(has_aux=True, aux="concatenate")
        loss = lambda *given: (stacked(2).loss(*given), given[1]["mask"])  # noqa: E731
    layout = of_roles(*roles, stacked=lambda path: path.startswith("layers"), **settings)
    with pytest.raises(ValueError, match=expected):
        evaluate(layout, loss, params, given, check=False, **options)


@pytest.mark.parametrize("roles", [("tensor",), ("fsdp", "tensor")])
def test_an_embedding_that_lies_whole_along_tensor_needs_no_sum(roles):
    """Where stages cut its vocabulary: only what the layers send is left, here in one stage."""
    found, roles = case("decoder", 2), ("stage", *roles)
    layout = catalogue.over(roles, 2 ** len(roles), microbatches=4)
    spec = layouts.shardings(layout, found.params)["embed"]["kernel"].spec
    assert "tensor" not in jax.tree.leaves(tuple(spec))
    told = layouts.predict(layout, jax.eval_shape(lambda: found.params), batch(), loss=found.loss)
    rows, length = batch()["tokens"].shape
    width = found.params["embed"]["kernel"].shape[1]
    activation = rows // layout.size("fsdp") * length * width * 4
    layers = found.params["blocks"]["q"]["kernel"].shape[0] // 2
    assert told.sent["tensor",] == pytest.approx(layers * 4 * 2 * activation / 2)
