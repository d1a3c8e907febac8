"""Collectives by hand within stages: one device's numbers, under every schedule and setting."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardwise import layouts, marks, measure, mesh, objective, pipeline, schedules
from shardwise.layouts import catalogue, staged

mesh.simulate(8)
WIDE, HIDDEN, LENGTH = 8, 12, 6


def assert_close(ours, theirs, rtol=2e-5):
    """Relative to each array's largest entry: sums are taken in another order."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(np.abs(b).max(initial=0), 1e-6))


def net(params, batch, key=None, stages=2, used=True, attend=False):
    """Layers in a stack, of which each stage scans its own; a table that both ends read."""
    x = params["table"][batch["tokens"]] * params["scale"][None, None]
    size = len(params["up"]) // stages

    def layer(x, w):
        w = marks.use(w) if used else w
        if attend:
            heads = x.reshape(*x.shape[:2], 2, -1)
            x = x + marks.attend(heads, heads, heads, marks.places(batch, *x.shape[:2])).reshape(
                x.shape
            )
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    for i in range(stages):
        own = {name: params[name][i * size : (i + 1) * size] for name in ("up", "down")}
        x, _ = jax.lax.scan(marks.layer(layer), x, own)
        x = marks.stage_boundary(x) if i < stages - 1 else x
    if key is not None:
        x = x * jax.random.bernoulli(key, 0.7, x.shape)
    each = optax.softmax_cross_entropy_with_integer_labels(x @ params["table"].T, batch["targets"])
    return objective.Mean(jnp.sum(each * batch["mask"]), jnp.sum(batch["mask"]))


def drawn(rows, layers=4, seed=0):
    """(parameters, a batch of so many rows with padding)."""
    rng = np.random.default_rng(seed)
    shapes = dict(table=(20, WIDE), scale=(WIDE,), up=(layers, WIDE, HIDDEN))
    shapes["down"] = (layers, HIDDEN, WIDE)
    params = {name: np.float32(rng.normal(size=shape) / 3) for name, shape in shapes.items()}
    text = rng.integers(0, 20, (rows, LENGTH + 1), dtype=np.int32)
    real = rng.integers(0, LENGTH + 1, rows)
    mask = np.float32(np.arange(LENGTH)[None] < real[:, None])
    return params, {"tokens": text[:, :-1], "targets": text[:, 1:], "mask": mask}


def run(layout, loss, params, batch, *args, **options):
    """(the function, placed parameters, what it returns of them)."""
    has_aux = options.get("has_aux", False)
    function = layouts.value_and_grad(layout, loss, **options)
    placed = layouts.place(layout, params, loss, batch, has_aux)
    return function, placed, function(placed, batch, *args)


def stacked(path):
    return path in ("up", "down")


def on_one(loss, params, batch):
    return jax.jit(objective.value_and_grad(loss))(params, batch)


def check(layout, loss, params, batch, rtol=2e-5):
    layout = dataclasses.replace(layout, stacked=stacked)
    function, placed, (mean, grads) = run(layout, loss, params, batch)
    assert_close((mean, layouts.whole(layout, grads)), on_one(loss, params, batch), rtol)
    return function, placed


def weighed(batch, m):
    """The batch with weights: a whole microbatch of nothing, and a row of nothing in another."""
    rng = np.random.default_rng(m)
    weights = np.float32(rng.uniform(0.5, 2, batch["mask"].shape)) * batch["mask"]
    weights[1::m] = weights[0] = 0
    return batch | {"mask": weights}


SCHEDULED = [(name, by) for by in ("hand", "compiler") for name in schedules.SCHEDULES]


@functools.cache
def in_four_parts(stages):
    """(loss, parameters, batch, what one device makes of them); microbatches count differently."""
    params, batch = drawn(8, layers=stages)
    batch, loss = weighed(batch, 4), functools.partial(net, stages=stages)
    counts = [batch["mask"][j::4].sum() for j in range(4)]
    assert counts[1] == 0 and len(set(counts)) == 4
    return loss, params, batch, on_one(loss, params, batch)


COMPILED = {}


def scheduled(name, by):
    """(layout, function, placed parameters), with programs of the first whose stages lived there.

    They are the same, whatever the order in which a schedule runs them.
    """
    table = schedules.spread(name, 2, 4)
    loss, params, batch, _ = in_four_parts(table.stages)
    options = dict(by=by, schedule=name, microbatches=4, stacked=stacked)
    layout = catalogue.over(("stage", "fsdp"), 4, **options)
    function = layouts.value_and_grad(layout, loss)
    placed = layouts.place(layout, params, loss, batch)
    plan = function.plan(placed, batch)
    assert plan.schedule == table
    own = plan.stages, plan.counted, plan._results
    plan.stages, plan.counted, plan._results = COMPILED.setdefault((by, table.device_of), own)
    return layout, function, placed


@pytest.mark.parametrize(
    ("name", "by"),
    [c if c == ("zb_h1", "hand") else pytest.param(*c, marks=pytest.mark.slow) for c in SCHEDULED],
)
def test_every_schedule_equals_one_device(name, by):
    """Where microbatches, and the rows in them, count differently."""
    _, _, batch, expected = in_four_parts(schedules.spread(name, 2, 4).stages)
    layout, function, placed = scheduled(name, by)
    mean, grads = function(placed, batch)
    assert_close((mean, layouts.whole(layout, grads)), expected)
    up = placed.tree["up"][0]
    assert up.shape[0] == 1 and up.size == 2 * up.addressable_shards[0].data.size


@pytest.mark.slow
@pytest.mark.parametrize("by", ["hand", "compiler"])
def test_of_padding_alone_the_loss_and_its_gradients_are_nothing(by):
    _, _, batch, _ = in_four_parts(2)
    layout, function, placed = scheduled("1f1b", by)
    mean, grads = function(placed, batch | {"mask": np.zeros_like(batch["mask"])})
    assert mean == 0 and not any(x.any() for x in jax.tree.leaves(layouts.whole(layout, grads)))


SETTINGS = {
    "data": ("data",),
    "data, one microbatch": ("data", dict(microbatches=1)),
    "zero 1": ("fsdp", "data", dict(zero=1)),
    "zero 2": ("fsdp", "context", dict(zero=2)),
    "ring": ("fsdp", "context"),
    "ulysses, split backward": ("context", dict(attention="ulysses", schedule="zb_h1")),
    "one microbatch, zigzag": ("fsdp", "context", dict(attention="zigzag", microbatches=1)),
    "small arrays whole, remat": (
        "fsdp",
        "data",
        dict(min_size=100, remat=jax.checkpoint_policies.nothing_saveable),
    ),
    "bfloat16": ("fsdp", dict(dtype=jnp.bfloat16, reduce_dtype=jnp.float32)),
}


@pytest.mark.parametrize(
    "name",
    [n if n in {"zero 1", "ring"} else pytest.param(n, marks=pytest.mark.slow) for n in SETTINGS],
)
@pytest.mark.parametrize("seed", [3])
def test_every_setting_equals_one_device(name, seed):
    *roles, last = SETTINGS[name]
    roles, settings = (roles, last) if isinstance(last, dict) else ([*roles, last], {})
    options = {"microbatches": 4, "stacked": stacked} | settings
    layout = catalogue.over(("stage", *roles), 2 * 2 ** len(roles), **options)
    loss, params, batch, expected = of_eight_tokens("context" in roles, seed)
    _, _, (mean, grads) = run(layout, loss, params, batch)
    assert_close((mean, layouts.whole(layout, grads)), expected, 4e-2 if layout.dtype else 2e-5)


@functools.cache
def of_eight_tokens(attend, seed):
    """(loss, parameters, batch, what one device makes of them), for every setting."""
    rows = 4 * 4 * int(np.random.default_rng(seed).integers(1, 4))
    params, batch = drawn(rows, seed=seed)
    batch = jax.tree.map(lambda x: np.concatenate([x, x[:, :2]], axis=1), batch)
    loss = functools.partial(net, attend=attend)
    return loss, params, batch, on_one(loss, params, batch)


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_with_every_zero_a_stage_s_arrays_are_kept_in_shares(zero):
    """By the compiler too: parameters, gradients, and the optimizer's state."""
    params, batch = drawn(16)
    layout = catalogue.over(("stage", "fsdp"), 4, zero=zero, by="compiler", microbatches=4)
    function, placed = check(layout, net, params, batch)
    state = pipeline.init(optax.adam(1e-3), placed)
    for x in jax.tree.leaves((placed, state, function(placed, batch)[1])):
        assert x.ndim == 0 or x.size == 2 * x.addressable_shards[0].data.size
    found = pipeline.programs(function, placed, batch)
    once = [(s, kind) for s in range(2) for kind in ("gather", "F")]
    kinds = {key: measure.collectives(found[key].compile()) for key in once}
    assert all("all-gather" in kinds[s, "gather"] for s in range(2))
    assert all("all-gather" not in kinds[s, "F"] for s in range(2))  # once a step


def told(params, batch):
    """A mean over rows, and auxiliary outputs of every kind; its layers read no `marks.use`."""
    x = params["table"][batch["tokens"]].mean(axis=1)
    for i in range(4):
        x = x + jnp.tanh(x @ params["up"][i]) @ params["down"][i]
        x = marks.stage_boundary(x) if i == 1 else x
    each = jnp.sum(x**2 * params["scale"][None], axis=-1)
    aux = {"sum": jnp.sum(x, axis=0), "mean": each.mean(), "max": each.max(), "rows": x}
    return jnp.mean(each), aux | {"seen": jnp.float32(len(x))}


def scalar(params, batch):
    """The mean over rows alone."""
    return told(params, batch)[0]


def test_a_mean_over_rows_and_auxiliary_outputs():
    """Of plain arrays that lie in rows, each stage holds shares of its own."""
    params, batch = drawn(24)
    ways = {"sum": "sum", "mean": "mean", "max": "max", "rows": "concatenate"}
    ways["seen"] = "sum"
    layout = catalogue.over(("stage", "fsdp", "data"), 8, microbatches=3, schedule="gpipe")
    _, placed, found = run(layout, told, params, batch, has_aux=True, aux=ways)
    (mean, aux), grads = found
    one = jax.jit(jax.value_and_grad(told, has_aux=True))
    (expected, theirs), gradient = one(params, batch)
    assert_close((mean, layouts.whole(layout, grads)), (expected, gradient))
    assert_close(aux, theirs)
    shapes = {stage: x.sharding.shard_shape(x.shape) for stage, x in placed.tree["up"].items()}
    assert shapes == {0: (2, WIDE, HIDDEN // 2), 1: (2, WIDE, HIDDEN // 2)}


def test_draws_by_shape_are_each_device_s_own():
    """The count counts the draws of the loss: of ones, the mean is 1, whatever is drawn."""

    def loss(params, batch, key=None):
        drawn = jax.random.uniform(jax.random.key(0) if key is None else key, batch["mask"].shape)
        chosen = (drawn < 0.5) & (batch["tokens"] > 3)
        x = marks.stage_boundary(params["table"][batch["tokens"]]) * params["scale"][None, None]
        each = 1 + x.sum(-1) - jax.lax.stop_gradient(x.sum(-1))
        return objective.Mean(jnp.sum(chosen * each), jnp.sum(chosen)), drawn

    params, batch = drawn(16)
    layout = catalogue.over(("stage", "fsdp"), 4, microbatches=2)
    function = layouts.value_and_grad(layout, loss, has_aux=True, aux="concatenate")
    placed = layouts.place(layout, params, loss, batch, True)
    found = [function(placed, batch, key=jax.random.key(i))[0] for i in (1, 1, 2)]
    assert [float(mean) for mean, _ in found] == pytest.approx([1, 1, 1])
    draws = [np.asarray(draw) for _, draw in found]
    assert (draws[0] == draws[1]).all() and (draws[0] != draws[2]).all()
    assert len(np.unique(draws[0])) == draws[0].size


def centred(params, batch):
    """Rows that look at each other, by a sum over the whole batch."""
    x = marks.stage_boundary(params["table"][batch["tokens"]].sum(1)) * params["scale"][None]
    total, count = marks.total((jnp.sum(x, axis=0), jnp.float32(len(x))))
    return objective.Mean(jnp.sum((x - total[None] / count) ** 2), jnp.float32(len(x)))


def test_sums_over_the_whole_batch():
    params, batch = drawn(12)
    layout = catalogue.over(("stage", "fsdp"), 4, schedule="gpipe")
    check(layout, centred, params, batch)
    with pytest.raises(ValueError, match=r"taken in 2 microbatches"):
        run(dataclasses.replace(layout, microbatches=2), centred, params, batch)


def sent(layout, loss, params, batch):
    """{(stage, kind): ring bytes} of the programs as they are lowered."""
    function = layouts.value_and_grad(layout, loss)
    placed = layouts.place(layout, params, loss, batch)
    programs = pipeline.programs(function, placed, batch)
    return {
        key: sum(op.ring_bytes for op in measure.collectives(program).ops)
        for key, program in programs.items()
    }


TASKS = {
    "zero 3": {},
    "zero 2": dict(zero=2, dtype=jnp.bfloat16),
    "zero 1, remat": dict(zero=1, remat=jax.checkpoint_policies.nothing_saveable),
    "remat, split backward": dict(
        schedule="zb_h1", remat=jax.checkpoint_policies.nothing_saveable, reduce_dtype=jnp.bfloat16
    ),
}


@pytest.mark.parametrize(
    "name", [n if n == "zero 3" else pytest.param(n, marks=pytest.mark.slow) for n in TASKS]
)
def test_what_a_stage_sends_is_the_formula(name, monkeypatch):
    """A task gathers what it reads; layers without remat once, their gradients scattered.

    The table is read at both ends: as rows, of which no gradient needs the values, and by a
    product. What `data` has copies of is summed once a step.
    """
    # `predict` would trace the loss again for each stage.
    monkeypatch.setattr(staged, "value_and_grad", functools.cache(staged.value_and_grad))
    params, batch = drawn(16)
    settings = {"microbatches": 2, "stacked": stacked} | TASKS[name]
    layout = catalogue.over(("stage", "fsdp", "data"), 8, **settings)
    function, tx = layouts.value_and_grad(layout, net), optax.adam(1e-3)
    placed = layouts.place(layout, params, net, batch)
    lowered = pipeline.programs(function, placed, batch)
    ops = {key: measure.collectives(program).ops for key, program in lowered.items()}
    counted = {key: sum(op.ring_bytes for op in found) for key, found in ops.items()}
    times = {kind: 1 if kind in ("gather", "total") else 2 for _, kind in counted}
    held = measure.bytes_on_devices(placed)
    for stage in range(2):
        found = layouts.predict(layout, params, batch, tx, loss=net, stage=stage)
        sent = sum(times[kind] * size for (s, kind), size in counted.items() if s == stage)
        sent += 2 * 4 * 3 / 4 if stage else 0  # the count of the whole batch, before all else
        size = 16 // 2 // 4 * LENGTH * WIDE * (2 if layout.dtype else 4)  # rows of a microbatch
        assert found.sent.pop(("stage",)) == 2 * size
        assert sum(found.sent.values()) == sent
        devices = layout.mesh.devices[stage].flat
        assert {held[device] for device in devices} == {found.held["parameters"]}
        assert found.held["state"] - 2 * found.held["parameters"] in (0, 4)  # and Adam's count
    if "I" in times:  # gradients of weights are what nobody waits for
        kinds = {kind: {op.kind for op in ops[1, kind]} for kind in "IW"}
        assert kinds == {"I": {"all-gather"}, "W": {"reduce-scatter"}}
    if name == "zero 3":
        table, scale, layers = 4 * 20 * WIDE, 4 * WIDE, 2 * 2 * 4 * WIDE * HIDDEN
        first, last = table + scale + layers, table + layers  # what a stage reads, in bytes
        loss = 2 * 8 * 3 / 4  # the total and the count, over four devices
        assert counted[0, "F"] == first / 2  # one of two devices sends half of what it gathers
        assert counted[1, "F"] == last / 2 + loss
        assert counted[0, "B"] == first / 2 + scale / 2
        assert counted[1, "B"] == last / 2 + table / 2
        assert [counted[s, "total"] for s in range(2)] == [first / 2, last / 2]


def outside(params, batch):
    return net(params, batch, used=False)


def by_shape(params, batch):
    """Takes as many layers to a stage as a weight's columns tell."""
    size = params["up"].shape[2] * 2 // HIDDEN
    cut = {name: x[: 2 * size] if name in ("up", "down") else x for name, x in params.items()}
    return net(cut, batch)


def shorter(batch, rows=None, length=None):
    return jax.tree.map(lambda x: x[:rows, :length], batch)


WHO = "^layouts.value_and_grad:"  # what was called


@pytest.mark.parametrize(
    ("roles", "change", "expected"),
    [
        ("fsdp", dict(rows=12), rf"{WHO} mask of shape \(12, 6\) does not split into 8 parts"),
        ("context", dict(length=5), rf"{WHO} a sequence of 5 does not split into 2 parts.* to 6"),
        ("fsdp", dict(loss=outside), r"(down|up) is stacked, and read outside marks.use"),
        (
            "fsdp",
            dict(loss=by_shape),
            r"(down|up) is read by other stages.*must not depend on shapes",
        ),
        ("fsdp", dict(odd=True), r"odd of shape \(3,\) has no axis that divides over 'fsdp' \(2\)"),
        ("context", dict(aux=True), r"aux 'concatenate' joins rows, and of each row a device has"),
        ("context", dict(loss=scalar), r"the loss is one scalar: a mean over rows"),
    ],
)
def test_what_a_stage_cannot_take_is_said(roles, change, expected):
    params, batch = drawn(16)
    batch = shorter(batch, change.get("rows"), change.get("length"))
    if "odd" in change:
        params["odd"] = np.ones(3, np.float32)
    loss, options = change.get("loss", net), {}
    if "aux" in change:
        options = dict(has_aux=True, aux="concatenate")
        loss = lambda *given: (net(*given), given[1]["mask"])  # noqa: E731
    layout = catalogue.over(("stage", roles), 4, microbatches=4, stacked=stacked, uneven="error")
    with pytest.raises(ValueError, match=expected):
        run(layout, loss, params, batch, **options)


def test_an_array_that_does_not_divide_may_stay_whole():
    params, batch = drawn(8)
    params["table"] = params["table"][:, :7]
    params |= {
        "scale": params["scale"][:7],
        "up": params["up"][:, :7],
        "down": params["down"][..., :7],
    }
    layout = catalogue.over(("stage", "fsdp"), 4, microbatches=2)
    _, placed = check(layout, net, params, batch)
    assert placed.tree["scale"][0].sharding.is_fully_replicated
