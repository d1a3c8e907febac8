import contextlib
import functools
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import (
    checkpoint,
    marks,
    measure,
    mesh,
    model,
    objective,
    pipeline,
    rules,
    schedules,
)
from shardwise.pipeline.running import run
from shardwise.pipeline.stepping import Step
from shardwise.schedules import Task

mesh.simulate(8)
WIDE, ROWS = 6, 8
TWO, FOUR = mesh.make(stage=2), mesh.make(stage=4)
CHEAP = {"xla_backend_optimization_level": 0}


def assert_close(ours, theirs, rtol=1e-4):
    """Relative to each array's largest entry: sums are taken in another order."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(np.abs(b).max(initial=0), 1e-6))


def chain(params, batch, stages, tied=False):
    """A layer for each stage, from stacked weights; rows count by their mask."""
    x = batch["x"] @ params["tied"] if tied else batch["x"] + params["shift"][None]
    for i in range(stages):
        x = jnp.tanh(x @ params["w"][i]) + x
        x = marks.stage_boundary(x) if i < stages - 1 else x
    x = x @ params["tied"].T if tied else x * params["shift"][None]
    return objective.Mean(jnp.sum(x**2 * batch["mask"][:, None]), jnp.sum(batch["mask"]))


def chain_of(stages, tied=False):
    draw = np.random.default_rng(0)
    shapes = {"w": (stages, WIDE, WIDE), "shift": (WIDE,)} | (
        {"tied": (WIDE, WIDE)} if tied else {}
    )
    params = {k: draw.normal(size=s).astype(np.float32) / 2 for k, s in shapes.items()}
    batch = {
        "x": draw.normal(size=(ROWS, WIDE)).astype(np.float32),
        "mask": np.array([1, 1, 0, 1, 1, 0, 0, 1], np.float32),
    }
    return functools.partial(chain, stages=stages, tied=tied), params, batch


def on_one(loss, params, batch):
    return jax.jit(objective.value_and_grad(loss))(params, batch)


@functools.cache
def chain_on_one(stages):
    return on_one(*chain_of(stages))


def check(loss, params, batch, grid, schedule, microbatches, rule=P(), like=None, **options):
    """Equal to one device, or to what it gave: `like`."""
    function = pipeline.value_and_grad(loss, grid, schedule, microbatches, **options)
    return check_function(function, loss, params, batch, rule, like)


def check_function(function, loss, params, batch, rule=P(), like=None):
    split = pipeline.place(params, function, batch, rule=rule)
    for a, b in zip(jax.tree.leaves(pipeline.whole(split)), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)
    mean, grads = function(split, batch)
    assert_close((mean, pipeline.whole(grads)), like or on_one(loss, params, batch))
    return function, split, grads


COMPILED = {}


def chained(grid, schedule, stages, microbatches=4):
    """The function of a chain, with the programs of the first one whose stages lived there too.

    They are the same, whatever the order in which a schedule runs them.
    """
    loss, params, batch = chain_of(stages)
    function = pipeline.value_and_grad(loss, grid, schedule, microbatches)
    plan = function.plan(pipeline.place(params, function, batch), batch)
    where = grid, plan.schedule.device_of, microbatches
    own = plan.stages, plan.counted, plan._results
    plan.stages, plan.counted, plan._results = COMPILED.setdefault(where, own)
    return function


def check_chain(grid, schedule, stages, microbatches=4):
    function = chained(grid, schedule, stages, microbatches)
    return check_function(function, *chain_of(stages), like=chain_on_one(stages))


# Every schedule.


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_every_schedule_equals_one_device(name):
    table = schedules.spread(name, 2, 4)
    function, split, grads = check_chain(TWO, name, table.stages)
    batch = chain_of(table.stages)[2]
    assert function.plan(split, batch).schedule == table
    (_, again), times = function.timed(split, batch)
    jax.tree.map(np.testing.assert_array_equal, again, grads)
    assert set(times) == {task for order in table.tasks for task in order}
    for order in table.tasks:  # in the table's order, one at a time
        ends = [time for task in order for time in times[task]]
        assert ends == sorted(ends)
    for order in table.tasks:
        for task in order:
            for needed in table.dependencies(task):
                assert times[needed][1] <= times[task][0]


def test_a_new_schedule_is_one_entry(monkeypatch):
    """All forwards, then backwards from the last microbatch; known by name, as any other."""

    def last_first(stages, devices, microbatches):
        table = schedules.SCHEDULES["gpipe"](stages, devices, microbatches)
        turned = [
            sorted(order, key=lambda t: (t.kind == "B", -t.microbatch if t.kind == "B" else 0))
            for order in table.tasks
        ]
        return schedules.from_tasks(turned)

    monkeypatch.setitem(schedules.SCHEDULES, "last_first", last_first)
    test_every_schedule_equals_one_device("last_first")


HOMES = [((0,), 8), ((0, 0, 1), 2), ((0, 1), 4), ((0, 1, 1, 0), 4), ((0, 1, 0, 1), 4)]


@functools.cache
def of_homes(homes, microbatches):
    """A chain's function, on whose stages any order can be run, its parameters and its batch."""
    tasks = [Task(s, "F", j) for s in range(len(homes)) for j in range(microbatches)]
    tasks += [task._replace(kind="B") for task in reversed(tasks)]
    orders = tuple(tuple(t for t in tasks if homes[t.stage] == device) for device in (0, 1))
    table = schedules.Schedule(orders, len(homes), microbatches, homes)
    function = chained(TWO, table, len(homes), microbatches)
    _, params, batch = chain_of(len(homes))
    return function, pipeline.place(params, function, batch), batch


@given(where=st.sampled_from(HOMES), order=st.randoms(use_true_random=False), split=st.booleans())
@settings(max_examples=24)
def test_any_order_that_can_run_equals_one_device(where, order, split):
    """A random schedule: of the tasks that could be next, a random one."""
    devices, microbatches = where
    stages = len(devices)
    kinds = "FIW" if split else "FB"
    waiting = [Task(s, k, j) for s in range(stages) for k in kinds for j in range(microbatches)]
    everything = schedules.Schedule((tuple(waiting),), stages, microbatches, (0,) * stages)
    done, orders = set(), [[], []]
    while waiting:
        ready = [t for t in waiting if set(everything.dependencies(t)) <= done]
        task = order.choice(ready)
        waiting.remove(task)
        done.add(task)
        orders[devices[task.stage]].append(task)
    table = schedules.Schedule(tuple(map(tuple, orders)), stages, microbatches, devices)
    schedules.check(table)
    function, params, batch = of_homes(devices, microbatches)
    function.plan(params, batch).schedule = table
    mean, grads = function(params, batch)
    assert_close((mean, pipeline.whole(grads)), chain_on_one(stages))


# The decoder, with layouts within a stage.


@functools.cache
def decoder(stages=2, **how):
    config = model.Config(
        vocab=256, embed=16, layers=2, heads=2, kv_heads=2, head_dim=8, mlp=16, stages=stages, **how
    )
    create = lambda: model.Decoder(config, nnx.Rngs(0))  # noqa: E731
    graphdef, params = nnx.split(nnx.jit(create)() if stages == 1 else nnx.eval_shape(create))
    drawn = params if stages == 1 else decoder(stages=1)[1]  # they do not depend on the stages
    params = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(drawn))
    text = np.random.default_rng(0).integers(256, size=(8, 9), dtype=np.int32)
    mask = np.float32(text[:, 1:] < 200)
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:], "mask": mask}
    return functools.partial(model.loss, graphdef=graphdef), params, batch


@functools.cache
def decoder_on_one():
    """Of one stage; how many there are does not change what the decoder computes."""
    return on_one(*decoder(stages=1))


def test_the_decoder_with_fsdp_within_a_stage():
    loss, params, batch = decoder(remat=True)
    rule = rules.FSDPRule("fsdp", min_size=64)
    function, split, grads = check(
        loss, params, batch, mesh.make(stage=2, fsdp=4), "1f1b", 2, rule, rows=P("fsdp"),
        like=decoder_on_one(),
    )  # fmt: skip
    for path, parts in split.tree.items():
        for stage, x in parts.items():
            assert grads.tree[path][stage].sharding.is_equivalent_to(x.sharding, x.ndim), path
    held = measure.bytes_on_devices(split)
    stages = [sum(held[d] for d in m.devices.flat) for m in split.meshes]
    assert max(held.values()) < 0.2 * sum(x.nbytes for x in jax.tree.leaves(params))
    assert stages[0] != stages[1]
    program = pipeline.programs(function, split, batch)[1, "B"].compile(compiler_options=CHEAP)
    assert measure.collectives(program)["all-gather"].ring_bytes > 0


def test_the_decoder_with_tensor_parallelism_within_a_stage():
    loss, params, batch = decoder()
    table = dict.fromkeys(["vocab", "embed", "head_dim", "layers"]) | dict.fromkeys(
        ["mlp", "heads", "kv_heads"], "model"
    )
    pinned = dict.fromkeys(["attention_output", "mlp_output", "embedding_output"], P())
    check(
        loss, params, batch, mesh.make(stage=2, model=2), "gpipe", 2, rules.LogicalRules(table),
        names=pinned, like=decoder_on_one(),
    )  # fmt: skip


def held_by(pipelined):
    """The bytes of each device, in the order of their numbers."""
    held = measure.bytes_on_devices(pipelined)
    return [held[device] for device in sorted(held, key=lambda device: device.id)]


def test_each_stage_holds_its_own():
    function, split, grads = check_chain(FOUR, "1f1b", 4)
    batch = chain_of(4)[2]
    state = pipeline.init(optax.adam(1e-2), split)
    row, shift = 4 * WIDE * WIDE, 4 * WIDE
    expected = [row + shift, row, row, row + shift]
    assert held_by(split) == held_by(grads) == expected
    assert held_by(state) == [2 * (row + shift) + 4, *[2 * row] * 3]  # and Adam's count, once
    programs = pipeline.programs(function, split, batch)
    assert set(programs) == {(s, k) for s in range(4) for k in "FB"}
    for (s, _), lowered in programs.items():
        assert f"{4}x{WIDE}x{WIDE}xf32" not in lowered.as_text(), s  # never the whole stack


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_every_task_has_its_program_and_says_when_it_has_run(name, monkeypatch):
    """Without that, a rank would run ahead of its device, and times would be those of dispatch."""
    performed, perform = {}, Step.perform
    monkeypatch.setattr(
        Step, "perform", lambda self, task: performed.setdefault(task, perform(self, task))
    )
    function, split, _ = check_chain(TWO, name, 2)
    batch = chain_of(2)[2]
    table = schedules.SCHEDULES[name](2, 2, 4)
    assert set(performed) == {task for order in table.tasks for task in order}
    assert all(isinstance(done, jax.Array) for done in performed.values())
    kinds = {(task.stage, task.kind) for task in performed}
    assert set(pipeline.programs(function, split, batch)) == kinds


# Losses, auxiliary outputs, keys.


def test_a_scalar_loss_and_auxiliary_outputs():
    """Rows come back in the batch's order, and a key draws as on one device with microbatches."""

    def loss(params, batch, scale, key):
        x = marks.stage_boundary(batch["x"] @ params["w"][0] * scale)
        y = x @ params["w"][1]
        noise = jax.random.uniform(key)
        extra = {"most": jnp.max(y), "rows": y[:, 0], "on": jnp.mean(y > 0), "any": y[0, 0] > 0}
        return jnp.mean(y**2), extra | {"sums": {"n": len(y), "noise": noise}}

    _, params, batch = chain_of(2)
    ways = {"any": "sum", "most": "max", "on": "mean", "rows": "concatenate", "sums": "sum"}
    how = dict(microbatches=4, has_aux=True, aux=ways)
    function = pipeline.value_and_grad(loss, TWO, "1f1b", **how)
    one = jax.jit(objective.value_and_grad(loss, **how))
    (value, theirs), expected = one(params, batch, 0.5, key=jax.random.key(1))
    for key in (jax.random.key(1), jax.random.PRNGKey(1)):  # the same draws
        split = pipeline.place(params, function, batch, 0.5, key=key)
        (mean, extra), grads = function(split, batch, 0.5, key=key)
        assert_close((mean, pipeline.whole(grads)), (value, expected))
        assert_close(extra, theirs)
    y = batch["x"] @ params["w"][0] @ params["w"][1] / 2
    assert_close(extra["rows"], y[:, 0])
    assert_close(extra["on"], np.mean(y > 0))
    assert extra["sums"]["n"] == ROWS and extra["any"] == np.sum(y[:4, 0] > 0)


def test_a_tied_parameter_gets_both_gradients_and_stays_equal():
    loss, params, batch = chain_of(3, tied=True)
    three = mesh.make(stage=3)
    function, split, grads = check(loss, params, batch, three, "gpipe", 2)
    assert list(split.tree["tied"]) == [0, 2]
    tx = optax.adamw(1e-2)
    state = pipeline.init(tx, split)
    for _ in range(2):
        _, grads = function(split, batch)
        np.testing.assert_array_equal(*grads.tree["tied"].values())
        updates, state = pipeline.update(tx, grads, state, split)
        split = optax.apply_updates(split, updates)
        np.testing.assert_array_equal(*split.tree["tied"].values())


# Optimizers.


def steps(tx, count=3, stages=4):
    """(losses, parameters, state), on one device and in a pipeline."""
    loss, flat, batch = chain_of(stages)
    function = chained(mesh.make(stage=stages), "1f1b", stages)
    split = pipeline.place(flat, function, batch)
    flat_state, state, losses = tx.init(flat), pipeline.init(tx, split), ([], [])
    assert_close(pipeline.whole(state), flat_state)

    @jax.jit
    def one_step(flat, flat_state):
        mean, grads = objective.value_and_grad(loss)(flat, batch)
        updates, flat_state = tx.update(grads, flat_state, flat)
        return optax.apply_updates(flat, updates), flat_state, mean

    for _ in range(count):
        flat, flat_state, mean = one_step(flat, flat_state)
        losses[0].append(mean)
        mean, grads = function(split, batch)
        updates, state = pipeline.update(tx, grads, state, split)
        split = optax.apply_updates(split, updates)
        losses[1].append(mean)
    return (losses[0], flat, flat_state), (losses[1], split, state)


def test_training_with_a_clipped_norm_equals_one_device():
    """With the pipeline's own gradients; `test_optimizers` has every other transformation."""
    tx = optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2))
    theirs, (losses, params, state) = steps(tx)
    assert_close(losses, theirs[0], rtol=1e-5)
    assert_close((pipeline.whole(params), pipeline.whole(state)), theirs[1:], rtol=1e-3)


# From one placement to another.


def test_from_any_placement_to_any_other_through_a_checkpoint(tmp_path):
    _, params, batch = chain_of(4)
    tx = optax.adamw(1e-2)
    forwards = [Task(s, "F", j) for s in range(4) for j in range(4)]
    backwards = [Task(s, "B", j) for s in reversed(range(4)) for j in range(4)]
    layouts = [
        (FOUR, "1f1b"),
        (TWO, "interleaved_1f1b"),
        (TWO, "dualpipe_v"),
        (mesh.make(stage=1), [[*forwards, *backwards]]),
    ]
    functions = [chained(m, s, 4) for m, s in layouts]
    split = pipeline.place(params, functions[0], batch)
    _, grads = functions[0](split, batch)
    updates, state = pipeline.update(tx, grads, pipeline.init(tx, split), split)
    split = optax.apply_updates(split, updates)
    flat, flat_state = pipeline.whole(split), pipeline.whole(state)
    checkpoint.save(tmp_path / "run", 1, {"params": flat, "opt_state": flat_state})
    checkpoint.wait()
    target = {"params": jax.tree.map(jnp.zeros_like, params), "opt_state": tx.init(params)}
    restored = checkpoint.restore(tmp_path / "run", target)
    after = []
    for function in functions:
        again = pipeline.place(restored["params"], function, batch)
        kept = pipeline.place(restored["opt_state"], again)
        for a, b in ((again, flat), (kept, flat_state)):
            for x, y in zip(jax.tree.leaves(pipeline.whole(a)), jax.tree.leaves(b), strict=True):
                np.testing.assert_array_equal(x, y)
        mean, grads = function(again, batch)
        updates, _ = pipeline.update(tx, grads, kept, again)
        after.append((mean, pipeline.whole(optax.apply_updates(again, updates))))
    for other in after[1:]:
        assert_close(other, after[0])


# Threads.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def called(function, x):
    """x, once `function` has returned it."""
    return jax.pure_callback(function, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


called.defvjp(lambda function, x: (called(function, x), None), lambda function, _, g: (g,))


def test_ranks_run_at_the_same_time():
    """Stage 0 meets stage 1 in a callback: if one had to wait for the other, they never would."""
    both = threading.Barrier(2, timeout=1800)

    def meeting(at):
        count = itertools.count()

        def function(x):
            if next(count) == at:
                both.wait()
            return x

        return function

    second, first = meeting(1), meeting(0)

    def loss(params, batch):
        x = marks.stage_boundary(called(second, batch["x"]) @ params["w"][0])
        return objective.Mean(jnp.sum(called(first, x) @ params["w"][1]), jnp.float32(len(x)))

    _, params, batch = chain_of(2)
    function = pipeline.value_and_grad(loss, TWO, "gpipe", 2)
    _, times = function.timed(pipeline.place(params, function, batch), batch)
    starts, ends = zip(*(times[Task(s, "F", 1 - s)] for s in (0, 1)), strict=True)
    assert max(starts) < min(ends)  # they overlap


def test_a_task_that_fails_stops_the_run_and_is_named():
    table = schedules.SCHEDULES["1f1b"](3, 3, 4)
    done = []

    def perform(task):
        if task == Task(1, "F", 2):
            raise ZeroDivisionError("seven")
        done.append(task)

    message = r"F\(stage 1, microbatch 2\) failed: ZeroDivisionError: seven"
    with pytest.raises(pipeline.TaskError, match=message):
        run(table, perform)
    assert Task(2, "F", 2) not in done and Task(2, "B", 0) in done
    assert threading.active_count() == 1 or all(
        not t.name.startswith("rank") for t in threading.enumerate()
    )


def test_a_callback_that_fails_is_named():
    def explode(x):
        raise ValueError("out of cheese")

    def loss(params, batch):
        x = marks.stage_boundary(batch["x"] @ params["w"][0])
        return objective.Mean(jnp.sum(called(explode, x) @ params["w"][1]), jnp.float32(len(x)))

    _, params, batch = chain_of(2)
    function = pipeline.value_and_grad(loss, TWO, "gpipe", 2)
    split = pipeline.place(params, function, batch)
    with pytest.raises(pipeline.TaskError, match=r"F\(stage 1, microbatch 0\) failed"):
        function(split, batch)


# One program.


def test_gpipe_in_one_program_equals_one_device():
    expected, params, batch = decoder(stages=1)
    config = expected.keywords["graphdef"]

    def loss(params, batch):
        decoder = nnx.merge(config, params)
        layer, stack = nnx.split(decoder.blocks)

        def stage(weights, x):
            return jax.lax.scan(lambda x, w: (nnx.merge(layer, w)(x), None), x, weights)[0]

        x = decoder.embed.kernel[...][batch["tokens"]]
        x = pipeline.gpipe(stage, TWO, 4)(stack, x)
        logits = decoder.head("bse,ev->bsv", decoder.final_norm(x))
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return objective.Mean(jnp.sum(each * batch["mask"]), jnp.sum(batch["mask"]))

    assert_close(on_one(loss, params, batch), decoder_on_one())
    with pytest.raises(ValueError, match="8 rows do not split into 3 parts"):
        pipeline.gpipe(lambda w, x: x, TWO, 3)(params, jnp.ones((8, 2)))


def test_gpipe_in_one_program_takes_one_microbatch():
    def loss(params, batch):
        stage = lambda w, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]  # noqa: E731
        x = pipeline.gpipe(stage, TWO, 1)(params["w"], batch["x"] + params["shift"][None])
        return objective.Mean(jnp.sum(x**2 * batch["mask"][:, None]), jnp.sum(batch["mask"]))

    assert_close(on_one(loss, *chain_of(2)[1:]), unconstrained_on_one())


# Errors.


def test_errors_are_named():
    loss, params, batch = chain_of(2)
    good = pipeline.value_and_grad(loss, TWO, "gpipe", 2)
    split = pipeline.place(params, good, batch)

    def make(loss=loss, grid=TWO, schedule="gpipe", microbatches=2, **options):
        function = pipeline.value_and_grad(loss, grid, schedule, microbatches, **options)
        return lambda: function(pipeline.place(params, function, batch), batch)

    deadlock = [
        [Task(0, "B", 0), Task(0, "F", 0)],
        [Task(1, "F", 0), Task(1, "B", 0)],
    ]
    cases = [
        (ValueError, "has no axis 'pipe'; it has", make, dict(axis="pipe")),
        (ValueError, "microbatches=0; expected 1 or more", make, dict(microbatches=0)),
        (ValueError, "no schedule '2f2b'; there are gpipe, 1f1b", make, dict(schedule="2f2b")),
        (
            ValueError,
            r"8 rows \(mask, x\) do not split into 3 microbatches; pad",
            make,
            dict(microbatches=3),
        ),
        (
            ValueError,
            "is for 4 stages, 2 devices and 2 microbatches; the loss has 2 stages",
            make,
            dict(schedule=schedules.SCHEDULES["interleaved_1f1b"](4, 2, 2)),
        ),
        (ValueError, "Deadlock: ", make, dict(schedule=deadlock, microbatches=1)),
        (
            TypeError,
            r"The loss returned \(4, 6\); expected objective.Mean\(total, count\)",
            make,
            dict(loss=lambda p, b: marks.stage_boundary(b["x"] * p["shift"][None])),
        ),
        (
            ValueError,
            "no stage boundary.* zb_v on 2 ranks along 'stage' takes 4.* 4 stages need 3 of",
            make,
            dict(loss=lambda p, b: jnp.mean(b["x"] * p["shift"][None]), schedule="zb_v"),
        ),
        (
            ValueError,
            "microbatches of 1 rows do not divide among the 2 devices",
            make,
            dict(grid=mesh.make(stage=2, data=2), microbatches=8, rows=P("data")),
        ),
    ]
    for kind, message, make_one, options in cases:
        with pytest.raises(kind, match=message):
            make_one(**options)()
    with pytest.raises(TypeError, match=r"the parameters are a dict; expected what pipeline.place"):
        good(params, batch)
    with pytest.raises(ValueError, match="placed for other stages or devices; take them whole"):
        other = mesh.make(data=2, stage=2)
        pipeline.value_and_grad(loss, other, "gpipe", 2)(split, batch)
    whole = {"n": np.arange(8), **params}
    with pytest.raises(TypeError, match=r"'n'.* is int32, which has no gradient"):
        pipeline.place(whole, good, batch)


def test_what_cannot_be_cut_in_two_is_said():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    def both(residuals, g):
        x, w = residuals
        zeros = jnp.zeros_like(x), jnp.zeros_like(w)
        add = lambda state: (state[0] + 1, (state[1][0] + g @ w.T, state[1][1] + x.T @ g))  # noqa: E731
        return jax.lax.while_loop(lambda state: state[0] < 1, add, (0, zeros))[1]

    product.defvjp(lambda x, w: (x @ w, (x, w)), both)

    def loss(params, batch):
        x = marks.stage_boundary(batch["x"] @ params["w"][0])
        return objective.Mean(jnp.sum(product(x, params["w"][1]) ** 2), jnp.float32(len(x)))

    _, params, batch = chain_of(2)
    with pytest.warns(UserWarning, match="stage 1: while yields both what the stage before waits"):
        check(loss, params, batch, TWO, "zb_h1", 2)


# Beside each other: what a run dispatches, and what it waits for.


class Result:
    """What a task computes, once `there` is set; waiting for it is noted."""

    def __init__(self, error=None):
        self.there, self.error = threading.Event(), error

    def block_until_ready(self):
        assert self.there.wait(60), "waited for a task before the next one was dispatched"
        if self.error:
            raise self.error


def test_a_rank_dispatches_one_task_beyond_the_one_that_runs():
    """Each task is done only when its successor is dispatched; none has two tasks before it."""
    table = schedules.from_tasks([[Task(0, k, j) for j in range(4) for k in "FB"]])
    results = {}

    def perform(task):
        running = [r for r in results.values() if not r.there.is_set()]
        assert len(running) <= 1
        for result in running:
            result.there.set()
        results[task] = Result()
        return results[task]

    ran = run(table, perform)
    assert not results[Task(0, "B", 3)].there.is_set() and ran.times is None
    results[Task(0, "B", 3)].there.set()
    ran.wait()


def test_a_task_that_fails_while_others_are_dispatched_is_named():
    """Those that read what it should have computed fail too, and may be seen first."""
    table = schedules.SCHEDULES["gpipe"](2, 2, 2)

    def perform(task):
        result = Result(ValueError(str(task)) if task.stage or task.kind == "B" else None)
        result.there.set()
        return result

    with pytest.raises(pipeline.TaskError, match=r"^pipeline: F\(stage 1, microbatch 0\) failed"):
        run(table, perform).wait()


def test_effects_happen_once_for_each_microbatch():
    heard = []

    def loss(params, batch):
        x = batch["x"] @ params["w"][0]
        jax.debug.callback(lambda x: heard.append(("first", float(x))), x.sum())
        x = marks.stage_boundary(x)
        jax.debug.callback(lambda x: heard.append(("second", float(x))), x.sum())
        return objective.Mean(jnp.sum((x @ params["w"][1]) ** 2), jnp.float32(len(x)))

    _, params, batch = chain_of(2)
    function = pipeline.value_and_grad(loss, TWO, "zb_h1", 4)
    split = pipeline.place(params, function, batch)
    heard.clear()
    function(split, batch)
    sums = [float((batch["x"][j::4] @ params["w"][0]).sum()) for j in range(4)]
    for name in "first", "second":
        found = [x for told, x in heard if told == name]
        assert_close(sorted(found), sorted(sums))


def test_sums_become_the_gradients():
    loss, params, batch = chain_of(2)
    params["shift"] = jnp.asarray(params["shift"], jnp.bfloat16)  # its sum is float32
    function = pipeline.value_and_grad(loss, TWO, "gpipe", 2)
    split = pipeline.place(params, function, batch)
    for programs in function.plan(split, batch).stages:
        sums = programs.zeros()
        count = jax.device_put(jnp.float32(2), NamedSharding(programs.mesh, P()))
        grads = programs.finish(sums, count)
        donated = [x.dtype != jnp.bfloat16 for x in programs.stage.params]
        assert [x.is_deleted() for x in sums] == donated and any(donated)
        assert [g.dtype for g in grads] == [x.dtype for x in programs.stage.params]


# Losses of every kind, against one device.


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.02, 0.02),))


def weighted(params, batch, kind):
    x = marks.stage_boundary(jnp.tanh(batch["x"] @ params["w"][0]))
    y = x @ params["w"][1]
    y = y.astype(jnp.float16) * 40 if kind == "float16" else y
    each = jnp.sum(clipped(y) ** 2, axis=1)
    if kind == "learned":
        weight = jax.nn.sigmoid(y[:, 0])
    elif kind == "scalar":
        return jnp.sum(each), y
    elif kind == "constant":
        return objective.Mean(jnp.sum(each), jnp.float32(3))
    else:
        weight = (batch["mask"] * (0.01 if kind == "below 1" else 1)).astype(each.dtype)
    return objective.Mean(jnp.sum(each * weight), jnp.sum(weight))


@pytest.mark.parametrize(
    ("kind", "microbatches"),
    [("below 1", 4), ("float16", 2), ("learned", 1), ("constant", 1), ("scalar", 1), ("empty", 2)],
)
def test_the_mean_and_its_gradient_are_one_device_s(kind, microbatches):
    loss = functools.partial(weighted, kind=kind)
    _, params, batch = chain_of(2)
    batch["mask"] = batch["mask"] * (kind != "empty")
    has_aux = kind == "scalar"
    function = pipeline.value_and_grad(loss, TWO, "1f1b", microbatches, has_aux=has_aux)
    split = pipeline.place(params, function, batch)
    mean, grads = function(split, batch)
    mean = mean[0] if has_aux else mean

    def one(params):
        out = loss(params, batch)
        return out[0] if has_aux else objective.quotient(out)

    value, expected = jax.jit(jax.value_and_grad(one))(params)
    expected = jax.tree.map(lambda g: g * (kind != "empty"), expected)
    tolerance = 2e-2 if kind == "float16" else 1e-4
    assert mean.dtype == value.dtype
    assert_close((mean, pipeline.whole(grads)), (value, expected), rtol=tolerance)
    assert kind == "empty" or np.abs(grads.tree["w"][0]).max() > 0


def test_a_count_that_follows_the_parameters_takes_one_microbatch():
    loss = functools.partial(weighted, kind="learned")
    _, params, batch = chain_of(2)
    function = pipeline.value_and_grad(loss, TWO, "gpipe", 2)
    with pytest.raises(ValueError, match=r"count depends on the parameters.*use one microbatch"):
        pipeline.place(params, function, batch)


def test_draws_by_place_are_one_device_s():
    def loss(params, batch, key):
        rows = marks.index("rows", len(batch["x"]))
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(rows)
        mask = jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, (WIDE,)))(keys)
        x = marks.stage_boundary(jnp.where(mask, batch["x"], 0) @ params["w"][0])
        return jnp.mean((x @ params["w"][1]) ** 2), mask

    _, params, batch = chain_of(2)
    function = pipeline.value_and_grad(loss, TWO, "1f1b", 4, has_aux=True, aux="concatenate")
    key = jax.random.key(3)
    split = pipeline.place(params, function, batch, key=key)
    (mean, mask), _ = function(split, batch, key=key)
    value, theirs = jax.jit(loss)(params, batch, key)
    np.testing.assert_array_equal(mask, theirs)
    assert_close(mean, value)


def test_a_count_of_what_is_drawn_counts_the_draws_of_the_loss():
    """Of ones, the mean is 1, whatever is drawn."""

    def loss(params, batch, key):
        chosen = jax.random.bernoulli(key, 0.5, batch["mask"].shape) * (batch["mask"] > 0)
        x = marks.stage_boundary(batch["x"] @ params["w"][0]) @ params["w"][1]
        each = 1 + x.sum(1) - jax.lax.stop_gradient(x.sum(1))
        return objective.Mean(jnp.sum(chosen * each), jnp.sum(chosen))

    _, params, batch = chain_of(2)
    function, key = pipeline.value_and_grad(loss, TWO, "gpipe", 4), jax.random.key(1)
    mean, _ = function(pipeline.place(params, function, batch, key=key), batch, key=key)
    assert abs(mean - 1) < 1e-6


# Layouts within a stage.


def test_weights_are_gathered_in_each_task_or_once_a_step():
    loss, params, batch = chain_of(2)
    grid, rule = mesh.make(stage=2, fsdp=2), rules.FSDPRule("fsdp", min_size=1)
    gathers = {}
    for gather in "task", "step":
        function, split, grads = check(
            loss, params, batch, grid, "1f1b", 2, rule, rows=P("fsdp"), gather=gather,
            like=chain_on_one(2),
        )  # fmt: skip
        w = split.tree["w"][1]
        assert w.sharding.shard_shape(w.shape) != w.shape
        assert grads.tree["w"][1].sharding.is_equivalent_to(w.sharding, w.ndim)
        found = pipeline.programs(function, split, batch).items()
        compiled = {kind: program.compile() for (s, kind), program in found if s == 1}
        gathers[gather] = {kind: weights_gathered(p) for kind, p in compiled.items()}
    assert gathers["task"] == {"F": 2, "B": 2}  # w and shift
    assert gathers["step"] == {"F": 0, "B": 0, "gather": 2}


def weights_gathered(program):
    """The all-gathers of a compiled program that yield a stage's w or shift."""
    ops = [op for op in measure.collectives(program).ops if op.kind == "all-gather"]
    return sum(op.payload_bytes in (4 * WIDE * WIDE, 4 * WIDE) for op in ops)


def test_what_is_cut_by_rows_follows_from_the_batch():
    """A table with as many entries as a microbatch has rows is no activation; [tokens, d] is."""

    def loss(params, batch):
        table = jnp.sin(params["table"]) * jnp.sum(batch["x"])  # [ROWS, WIDE]
        x = (batch["x"] @ params["w"][0]).reshape(-1, 2)
        x, table = marks.stage_boundary((x, table))
        y = x.reshape(-1, WIDE) @ params["w"][1] + table.sum(0)[None]
        return objective.Mean(jnp.sum(y**2 * batch["mask"][:, None]), jnp.sum(batch["mask"]))

    _, params, batch = chain_of(2)
    params["table"] = params["w"].reshape(-1, WIDE)[:ROWS]
    grid = mesh.make(stage=2, fsdp=2)
    function, split, _ = check(loss, params, batch, grid, "gpipe", 1, rows=P("fsdp"))
    last = function.plan(split, batch).stages[1]
    specs = {x.shape: s.spec for x, s in zip(last.stage.carry, last.laid["carry"], strict=True)}
    assert specs == {(24, 2): P("fsdp"), (ROWS, WIDE): P()}


def test_a_rule_chooses_by_what_a_stage_holds():
    """Four rows of a stack divide among four devices; the two of each stage do not."""
    _, params, batch = chain_of(4)

    def halves(params, batch):
        x = batch["x"]
        for i in range(4):
            x = jnp.tanh(x @ params["w"][i]) + params["shift"][None]
            x = marks.stage_boundary(x) if i == 1 else x
        return objective.Mean(jnp.sum(x), jnp.float32(len(x)))

    grid = mesh.make(stage=2, fsdp=4)
    rule = rules.PathRules(("w", P("fsdp")), (".*", P()), uneven="replicate")
    _, split, _ = check(halves, params, batch, grid, "gpipe", 2, rule)
    assert [piece.spec for piece in split.layout if piece.path == "w"] == [P()]


def constrained(params, batch, sharding):
    pin = lambda x: jax.lax.with_sharding_constraint(x, sharding)  # noqa: E731

    def layer(x, w):
        return pin(jnp.tanh(x @ w)), None

    x = marks.stage_boundary(pin(batch["x"] + params["shift"][None]))
    x = jax.lax.scan(jax.checkpoint(layer), x, params["w"])[0]
    return objective.Mean(jnp.sum(x**2 * batch["mask"][:, None]), jnp.sum(batch["mask"]))


@pytest.mark.parametrize("around", ["nothing", "auto", "explicit"])
def test_the_user_s_own_meshes_and_constraints(around):
    """jax.set_mesh, JAX's default Explicit mesh, and constraints on it within the loss."""
    _, params, batch = chain_of(2)
    expected = unconstrained_on_one()
    auto = mesh.make(stage=2, fsdp=2)
    explicit = jax.sharding.Mesh(
        auto.devices, auto.axis_names, axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )
    grid = explicit if around == "explicit" else auto
    sharding = NamedSharding(auto, P("fsdp")) if around == "nothing" else P("fsdp")
    loss = functools.partial(constrained, sharding=sharding)
    batch = jax.device_put(batch, NamedSharding(grid, P("fsdp")))
    with contextlib.nullcontext() if around == "nothing" else jax.set_mesh(grid):
        function = pipeline.value_and_grad(loss, grid, "1f1b", 2, rows=P("fsdp"))
        split = pipeline.place(params, function, batch)
        mean, grads = function(split, batch)
        assert_close((mean, pipeline.whole(grads)), expected)


@functools.cache
def unconstrained_on_one():
    return on_one(unconstrained, *chain_of(2)[1:])


def unconstrained(params, batch):
    x = batch["x"] + params["shift"][None]
    x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0]
    return objective.Mean(jnp.sum(x**2 * batch["mask"][:, None]), jnp.sum(batch["mask"]))


# Said before anything runs.


def test_what_a_pipeline_cannot_take_is_said_before_anything_runs(monkeypatch):
    loss, params, batch = chain_of(2)

    def split(batch=batch, params=params, microbatches=2, loss=loss, **options):
        function = pipeline.value_and_grad(loss, TWO, "gpipe", microbatches, **options)
        return pipeline.place(params, function, batch)

    message = r"different numbers of rows \(mask: 8, x: 4\).*use one microbatch"
    with pytest.raises(ValueError, match=message):
        split(batch | {"x": batch["x"][:4]})
    with pytest.raises(TypeError, match=r"the batch has no arrays \(None\)"):
        split(None)
    with pytest.raises(TypeError, match=r"parameters\['act'\] is a function, not an array.*eqx"):
        split(params=params | {"act": lambda x: x})
    with pytest.raises(ValueError, match="gather='never'; expected 'task' or 'step'"):
        split(gather="never")
    aux = lambda params, batch: (loss(params, batch), {"a": batch["x"]})  # noqa: E731
    with pytest.raises(ValueError, match=r"aux=.* does not fit") as found:
        split(loss=aux, has_aux=True, aux={"a": {"deeper": "sum"}})
    assert len(str(found.value)) < 400 and "Traced" not in str(found.value)
    pinned = functools.partial(constrained, sharding=NamedSharding(TWO, P("stage")))
    with pytest.raises(ValueError, match=r"constrains an array to .*within a stage there are the"):
        split(loss=pinned)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(ValueError, match=r"devices of other processes \(\[0\].*pipeline.gpipe"):
        pipeline.value_and_grad(loss, TWO, "gpipe", 2)


def test_a_typed_key_comes_back_from_its_stages():
    loss, params, batch = chain_of(2)
    split = pipeline.place(params, pipeline.value_and_grad(loss, TWO, "gpipe", 2), batch)
    key = jax.random.key(7, impl="rbg")
    state = pipeline.place({"key": key, "count": np.int32(3)}, split)
    back = pipeline.whole(state)
    assert back["key"].dtype == key.dtype and back["count"] == 3
    np.testing.assert_array_equal(jax.random.key_data(back["key"]), jax.random.key_data(key))


def test_the_example_in_the_docstring_runs():
    loss, params, batch = chain_of(4)
    lines = [line.strip() for line in pipeline.__doc__.splitlines() if line.startswith("    ")]
    space = dict(mesh=mesh, pipeline=pipeline, optax=optax, tx=optax.adam(1e-2), loss=loss)
    exec("\n".join(lines), space | {"params": params, "batch": batch}, out := {})
    assert_close(out["mean"], on_one(loss, params, batch)[0])
