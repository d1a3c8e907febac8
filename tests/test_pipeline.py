"""A pipeline of any schedule as one program: one device's numbers, by a schedule's ticks."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sampling import marked
from staged_models import WIDE, assert_close, batch, mean_of, on_one, stacked, weights

from shardwise import marks, measure, mesh, objective, pipeline, schedules
from shardwise.pipeline.moving import back, carriers
from shardwise.pipeline.program import WHOLE
from shardwise.schedules import Task

mesh.simulate(8)
TWO = mesh.make(stage=2)
# Of `make test`: a backward in halves, and one of folded stages; other tests run "1f1b".
QUICK = {"zb_h1", "dualpipe_v"}


def run(loss, schedule, microbatches, *given, grid=TWO, key=None, **options):
    function = pipeline.value_and_grad(loss, grid, schedule, microbatches, **options)
    return jax.jit(function)(*given, key=key)


@functools.cache
def stack_on_one(layers=4):
    case = stacked(1, layers)
    return on_one(case.loss, case.params, batch())


def check_stack(schedule, stages, layers=4):
    case = stacked(stages, layers)
    assert_close(run(case.loss, schedule, 4, case.params, batch()), stack_on_one(layers))


# Schedules.


@pytest.mark.parametrize("name", marked(schedules.SCHEDULES, QUICK, 4))
def test_every_schedule_equals_one_device(name):
    """And row i of an array is layer i, whatever the schedule's order of stages."""
    check_stack(name, schedules.spread(name, 2, 4).stages)


@pytest.mark.slow
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
    check_stack("last_first", 2)


def orders(draw, stages, microbatches):
    """A schedule that nobody wrote: any task that can run next, on devices drawn for stages."""
    homes = (0, 1, *(draw(st.integers(0, 1)) for _ in range(stages - 2)))
    kinds = draw(st.sampled_from(["FB", "FIW"]))
    waiting = [Task(s, k, j) for s in range(stages) for j in range(microbatches) for k in kinds]
    everything = schedules.Schedule((tuple(waiting),), stages, microbatches, (0,) * stages)
    done, lists = set(), ([], [])
    while waiting:
        task = draw(
            st.sampled_from([t for t in waiting if set(everything.dependencies(t)) <= done])
        )
        waiting.remove(task)
        done.add(task)
        lists[homes[task.stage]].append(task)
    return lists


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=4)
def test_any_order_that_can_run_equals_one_device(data):
    stages = data.draw(st.sampled_from([2, 3, 4]))
    check_stack(orders(data.draw, stages, 4), stages, layers=6)


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_ticks_are_the_timeline_s(name):
    """As many, with as many idle, and as many slots as it counts of what lives at once."""
    schedule = schedules.spread(name, 4, 8)
    line, table = schedules.timeline(schedule), pipeline.ticks(schedule)
    kinds = table.columns["kind"]
    assert len(kinds) == line.makespan
    assert (kinds == 0).mean() == pytest.approx(line.bubble)
    assert table.slots["kept"] == max(line.peak_live)


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_a_value_alone_is_of_forward_tasks(name):
    """In as many ticks as microbatches and stages ask for at least; no W and no I are compiled."""
    schedule = schedules.spread(name, 4, 8)
    table = pipeline.ticks(schedule, backward=False)
    assert set(np.unique(table.columns["kind"])) == {0, 1} and table.slots["kept"] == 0
    assert (table.columns["kind"] == 1).sum() == schedule.stages * 8
    assert len(table.columns["kind"]) <= 8 * schedule.stages // 4 + schedule.stages - 1


# The program.


def computations(text):
    """{name: its lines} of a compiled program, and the name of the entry."""
    found, entry = {}, None
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line):
            name = head[2]
            found[name], entry = [], name if head[1] else entry
        elif line.startswith("  "):
            found[name].append(line)
    return found, entry


def outside_of_tasks(text):
    """The products of matrices that no loop of as many turns as the table says stands around."""
    found, entry = computations(text)
    waiting, seen, products = [entry], set(), []
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for line in found[name]:
            products += [line] if " dot(" in line or 'custom_call_target="__onednn' in line else []
            if " while(" in line and "known_trip_count" not in line:
                continue  # a task: one turn or none
            waiting += re.findall(r"(?:to_apply|calls|body|condition)=%?([\w.-]+)", line)
    return products


def compile_stack(backward=True):
    case = stacked(2)
    function = pipeline.value_and_grad(case.loss, TWO, "1f1b", 4, backward=backward)
    return jax.jit(function).lower(case.params, batch()).compile()


compiled = functools.cache(compile_stack)


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_no_product_is_computed_outside_of_its_task(monkeypatch, tied):
    """What a task reads is tied to its turn: else XLA computes every task at every tick."""
    if not tied:
        monkeypatch.setattr(jax.lax, "optimization_barrier", lambda tree: tree)
    text = (compiled() if tied else compile_stack()).as_text()
    assert " dot(" in text
    assert (outside_of_tasks(text) == []) == tied


def test_what_stands_in_tasks_is_counted_as_often_as_they_run():
    """Once for each microbatch, and of the devices on the one that does most: the last."""
    tokens = batch()["tokens"].size
    layer, head = 2 * tokens * WIDE * WIDE, 2 * tokens * WIDE * 12
    assert measure.flops(compiled()) == 3 * (2 * layer + head)
    assert measure.flops(compiled(False)) == 2 * layer + head


FOUR = [(0, 2), (2, 4), (4, 6), (6, 8)]
MOVES = {  # (axis along which devices hold the array, rows that each of four stages reads)
    "held where it is read": (0, FOUR),
    "rows of others": (0, [FOUR[0], FOUR[3], FOUR[1], FOUR[2]]),
    "unequal rows": (0, [(0, 3), (3, 4), (4, 5), (5, 8)]),
    "cut along another axis": (1, [FOUR[0], FOUR[3], FOUR[1], FOUR[2]]),
    "cut along another axis, unequal rows": (1, [(0, 3), (3, 4), (4, 5), (5, 8)]),
    "on each, read in rows": (None, [FOUR[2], FOUR[3], FOUR[0], FOUR[1]]),
    "on each, read in unequal rows": (None, [(0, 3), (3, 4), (4, 5), (5, 8)]),
    "on each, read whole": (None, [None] * 4),
    "cut, read whole": (1, [None] * 4),
    "cut, read by one": (0, [None]),
    "cut along another axis, read by one": (1, [None]),
}


@pytest.mark.parametrize(("cut", "rows"), MOVES.values(), ids=MOVES)
def test_parameters_move_to_where_stages_read_them_and_gradients_back(cut, rows):
    """To the byte that the program sends; the way back is the transpose of the way there."""
    whole = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    read = [{0: ends} for ends in rows] + [{}] * (4 - len(rows))
    ways, where = carriers("stage", range(4), read, [whole], [cut], WHOLE)
    lie = P() if cut is None else P(*[None] * cut, "stage")
    over = dict(mesh=mesh.make(stage=4), check_vma=False)
    leave = dict(in_specs=lie, out_specs=[[P("stage")] * 4] * len(ways), **over)

    def there(x):
        found = [way.there([x]) for way in ways]
        return [[*each, *[jnp.zeros(0)] * (4 - len(each))] for each in found]

    found = jax.jit(jax.shard_map(there, **leave))(whole)
    for s, own in enumerate(read):
        for (carrier, place, taken), ends in zip(where[s], own.values(), strict=True):
            piece = np.split(np.asarray(found[carrier][place]), 4)[s][slice(*taken or [None])]
            np.testing.assert_array_equal(piece, whole if ends is None else whole[slice(*ends)])

    def roundtrip(x):  # the gradient of half the sum of squares of what is read
        return back(ways, [way.there([x]) for way in ways], [x])[0]

    shared = len(rows) if rows[0] is None else 1
    run = jax.jit(jax.shard_map(roundtrip, in_specs=lie, out_specs=lie, **over))
    np.testing.assert_allclose(run(whole), shared * whole, rtol=1e-6)
    counted = sum(op.ring_bytes for op in measure.collectives(run.lower(whole).compile()).ops)
    assert counted == sum(way.sent([whole], 4) + way.sent([whole], 4, back=True) for way in ways)


# Losses, auxiliary outputs, keys, effects.


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.02, 0.02),))


def two(params, batch, last=lambda y: y):
    """Two matrices of the stack, one in each stage, on rows of numbers."""
    x = marks.stage_boundary(jnp.tanh(batch["x"] @ params["w"][0]))
    return last(x @ params["w"][1])


def rows_of(count=8):
    draw = np.random.default_rng(2)
    x = draw.normal(size=(count, WIDE)).astype(np.float32)
    mask = np.array([1, 1, 0, 1, 1, 0, 0, 1], np.float32)
    return weights(2)["layers"], {"x": x, "mask": mask[:count]}


def weighted(params, batch, kind):
    y = two(params, batch)
    y = y.astype(jnp.float16) * 40 if kind == "float16" else y
    each = jnp.sum(clipped(y) ** 2, axis=1)
    if kind == "learned":
        weight = jax.nn.sigmoid(y[:, 0])
    elif kind == "scalar":
        return jnp.mean(each)
    elif kind == "constant":
        return objective.Mean(jnp.sum(each), jnp.float32(3))
    else:
        weight = (batch["mask"] * (0.01 if kind == "below 1" else 1)).astype(each.dtype)
    return objective.Mean(jnp.sum(each * weight), jnp.sum(weight))


KINDS = {"below 1": 4, "float16": 2, "learned": 1, "constant": 1, "scalar": 4, "empty": 2}


@pytest.mark.parametrize("kind", marked(KINDS, ["below 1", "learned", "empty"]))
def test_the_mean_and_its_gradient_are_one_device_s(kind):
    loss = functools.partial(weighted, kind=kind)
    params, batch = rows_of()
    batch["mask"] = batch["mask"] * (kind != "empty")
    mean, grads = run(loss, "1f1b", KINDS[kind], params, batch)
    value, expected = on_one(loss, params, batch)
    assert mean.dtype == value.dtype
    assert_close((mean, grads), (value, expected), rtol=2e-2 if kind == "float16" else 1e-4)
    assert np.abs(grads["w"]).max() > 0 or (kind == "empty" and mean == 0)


def test_a_count_that_follows_the_parameters_takes_one_microbatch():
    loss = functools.partial(weighted, kind="learned")
    with pytest.raises(ValueError, match=r"count depends on the parameters.*use one microbatch"):
        run(loss, "gpipe", 2, *rows_of())


def test_auxiliary_outputs_and_keys():
    """Rows come back in the batch's order, and a key draws as on one device with microbatches."""

    def loss(params, batch, scale, key):
        y = scale * two(params, batch)
        extra = {"most": jnp.max(y), "rows": y[:, 0], "on": jnp.mean(y > 0), "any": y[0, 0] > 0}
        return jnp.mean(y**2), extra | {"sums": {"n": len(y), "noise": jax.random.uniform(key)}}

    params, batch = rows_of()
    ways = {"any": "sum", "most": "max", "on": "mean", "rows": "concatenate", "sums": "sum"}
    how = dict(microbatches=4, has_aux=True, aux=ways)
    one = jax.jit(objective.value_and_grad(loss, **how))
    expected = one(params, batch, 0.5, key=jax.random.key(1))
    for key in (jax.random.key(1), jax.random.PRNGKey(1)):  # the same draws
        found = run(loss, "1f1b", 4, params, batch, 0.5, key=key, has_aux=True, aux=ways)
        assert_close(found, expected)
    assert_close(found[0][1]["rows"], two(params, batch)[:, 0] / 2)


def test_draws_by_place_are_one_device_s():
    def loss(params, batch, key):
        rows = marks.index("rows", len(batch["x"]))
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(rows)
        mask = jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, (WIDE,)))(keys)
        return jnp.mean(two(params, batch | {"x": jnp.where(mask, batch["x"], 0)}) ** 2), mask

    params, batch = rows_of()
    how = dict(key=jax.random.key(3), has_aux=True, aux="concatenate")
    (mean, mask), _ = run(loss, "1f1b", 4, params, batch, **how)
    value, theirs = jax.jit(loss)(params, batch, how["key"])
    np.testing.assert_array_equal(mask, theirs)
    assert_close(mean, value)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "devices"), [("1f1b", 4), ("zb_v", 2)])
def test_stages_that_read_rows_of_keys_share_a_program(schedule, devices):
    """Which rows of what follows from a key or from the data each takes is a number in a table."""

    def loss(params, batch, scale, key):
        keys, shifts, x = jax.random.split(key, 4), scale * jnp.arange(4.0), batch["x"]
        for i in range(4):
            drawn = jax.random.uniform(keys[i : i + 1][0], (1, WIDE)) + shifts[i : i + 1][0]
            x = jnp.tanh((x * drawn) @ params[i : i + 1][0])
            x = marks.stage_boundary(x) if i < 3 else x
        return jnp.mean(x**2)

    rng = np.random.default_rng(0)
    params = rng.normal(size=(4, WIDE, WIDE)).astype(np.float32)
    given = params, {"x": rng.normal(size=(8, WIDE)).astype(np.float32)}, jnp.float32(0.3)
    one = jax.jit(objective.value_and_grad(loss, microbatches=4))(*given, key=jax.random.key(1))
    function = pipeline.value_and_grad(loss, mesh.make(stage=devices), schedule, 4)
    assert_close(jax.jit(function)(*given, key=jax.random.key(1)), one)
    assert function.program(*given, key=jax.random.key(1)).kinds[1] == [0, 1, 1, 2]


@pytest.mark.slow
def test_a_count_of_what_is_drawn_counts_the_draws_of_the_loss():
    """Of ones, the mean is 1, whatever is drawn."""

    def loss(params, batch, key):
        chosen = jax.random.bernoulli(key, 0.5, batch["mask"].shape) * (batch["mask"] > 0)
        x = two(params, batch)
        each = 1 + x.sum(1) - jax.lax.stop_gradient(x.sum(1))
        return objective.Mean(jnp.sum(chosen * each), jnp.sum(chosen))

    mean, _ = run(loss, "gpipe", 4, *rows_of(), key=jax.random.key(1))
    assert abs(mean - 1) < 1e-6


def test_effects_happen_once_for_each_microbatch():
    heard = []

    def hear(name, x):
        jax.debug.callback(lambda x: heard.append((name, float(x))), x.sum())
        return x

    def loss(params, batch):
        x = marks.stage_boundary(hear("first", batch["x"] @ params["w"][0]))
        return jnp.mean((hear("second", x) @ params["w"][1]) ** 2)

    params, batch = rows_of()
    run(loss, "zb_h1", 4, params, batch)
    jax.effects_barrier()
    sums = [float((batch["x"][j::4] @ params["w"][0]).sum()) for j in range(4)]
    for name in "first", "second":
        assert_close(sorted(x for told, x in heard if told == name), sorted(sums), 1e-4)


def test_gradients_are_summed_in_float32_and_have_the_parameters_dtypes():
    """Of 1 and three times 1/512, bfloat16 makes 1 when it adds one by one; complex ones too."""

    def loss(params, batch):
        x = marks.stage_boundary(batch["x"] * params["scale"].astype(jnp.float32))
        return objective.Mean(jnp.sum(x * jnp.real(params["turn"] * (1 + 2j))), jnp.float32(1))

    params = {"scale": jnp.bfloat16(2), "turn": jnp.complex64(1 + 1j)}
    batch = {"x": np.array([1, 1 / 512, 1 / 512, 1 / 512], np.float32)}
    _, grads = run(loss, "gpipe", 4, params, batch)
    _, theirs = jax.jit(jax.value_and_grad(lambda p: loss(p, batch).total / 4))(params)
    assert {k: g.dtype for k, g in grads.items()} == {k: x.dtype for k, x in params.items()}
    assert grads["turn"] == pytest.approx(complex(theirs["turn"]))
    exact = -np.float32(1 + 3 / 512) / 4  # the real part of (1 + 1j) (1 + 2j) is -1
    assert grads["scale"] == jnp.bfloat16(exact)


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
        return jnp.mean(product(x, params["w"][1]) ** 2)

    with pytest.warns(UserWarning, match="stage 1: while yields both what the stage before waits"):
        found = run(loss, "zb_h1", 2, *rows_of())
    assert_close(found, on_one(loss, *rows_of()))


def constrained(params, batch, sharding):
    pin = lambda x: jax.lax.with_sharding_constraint(x, sharding)  # noqa: E731
    x = marks.stage_boundary(pin(jnp.tanh(batch["x"] @ params["w"][0])))
    return jnp.mean(jax.checkpoint(lambda x, w: pin(x @ w))(x, params["w"][1]) ** 2)


@pytest.mark.parametrize("around", marked(["nothing", "a mesh"], ["a mesh"]))
def test_the_user_s_own_meshes_and_constraints(around):
    """jax.set_mesh, and constraints within the loss; Explicit meshes are those of layouts."""
    if around == "a mesh" and jax.__version_info__ < (0, 8, 0):
        pytest.skip("JAX 0.7.2 takes no PartitionSpec as a constraint within shard_map")
    auto = mesh.make(stage=2, fsdp=2)
    sharding = NamedSharding(auto, P("fsdp")) if around == "nothing" else P("fsdp")
    params, batch = rows_of()
    with contextlib.nullcontext() if around == "nothing" else jax.set_mesh(auto):
        loss = functools.partial(constrained, sharding=sharding)
        found = run(loss, "1f1b", 2, params, batch, grid=auto)
    assert_close(found, on_one(lambda p, b: jnp.mean(two(p, b) ** 2), params, batch))


def test_another_mesh_around_is_refused():
    auto = mesh.make(stage=2)
    explicit = jax.sharding.Mesh(auto.devices, ("stage",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(explicit), pytest.raises(ValueError, match=r"set another mesh.*Explicit"):
        run(two, "1f1b", 2, *rows_of(), grid=auto)


# GPipe by differentiating a scan.


@pytest.mark.parametrize("microbatches", marked([1, 4], [4]))
def test_gpipe_by_a_scan_equals_one_device(microbatches):
    def loss(params, batch):
        def stage(weights, x):
            layer = lambda x, w: (x + jnp.tanh(x @ w["w"] + w["b"][None, None]), None)  # noqa: E731
            return jax.lax.scan(layer, x, weights)[0]

        x = params["embed"][batch["tokens"]]
        x = pipeline.gpipe(stage, TWO, microbatches)(params["layers"], x)
        return mean_of(x @ params["head"], batch)

    assert_close(on_one(loss, weights(), batch()), stack_on_one())
    with pytest.raises(ValueError, match="gpipe: 8 rows do not split into 3 parts"):
        pipeline.gpipe(lambda w, x: x, TWO, 3)({}, jnp.ones((8, 2)))


# Said before anything runs.


def scalar(params, batch):
    return jnp.mean(two(params, batch))


def with_aux(params, batch):
    return scalar(params, batch), {"a": batch["x"]}


def unmarked(params, batch):
    return jnp.mean(batch["x"] @ params["w"][0])


def pinned(params, batch):
    return constrained(params, batch, NamedSharding(TWO, P("stage")))


DEADLOCK = [[Task(0, "B", 0), Task(0, "F", 0)], [Task(1, "F", 0), Task(1, "B", 0)]]
OF_FOUR = schedules.SCHEDULES["interleaved_1f1b"](4, 2, 2)
X = np.ones((8, WIDE), np.float32)
NO_AUX = dict(loss=with_aux, has_aux=True, aux={"a": {"deeper": "sum"}})
TAKES = "zb_v: 1 stages on 2 devices; .* stages=4.* no stage boundary.* k of these marks make"
SPLIT = r"pipeline.value_and_grad: mask of shape \(8,\) does not split into 3 parts .*masked rows"
OTHER = r"different numbers of rows \(mask 8, x 4\).*use one microbatch"
NOT = "act is a function, not an array.*eqx"
WORD = "the batch/name is a str, not an array"
BARE = r"The loss returned \(4, 8\); expected objective.Mean\(total, count\)"
REFUSED = [
    (ValueError, "has no axis 'pipe'; it has", dict(axis="pipe")),
    (ValueError, "microbatches=0; expected 1 or more", dict(microbatches=0)),
    (ValueError, "no schedule '2f2b'; there are gpipe, 1f1b", dict(schedule="2f2b")),
    (ValueError, "is for 4 stages, 2 devices and 2 micro.* has 2 stages", dict(schedule=OF_FOUR)),
    (ValueError, "Deadlock: ", dict(schedule=DEADLOCK, microbatches=1)),
    (ValueError, SPLIT, dict(microbatches=3)),
    (ValueError, TAKES, dict(loss=unmarked, schedule="zb_v", microbatches=4)),
    (ValueError, OTHER, dict(batch={"mask": X[:, 0], "x": X[:4]})),
    (ValueError, r"aux=.* does not fit", NO_AUX),
    (TypeError, BARE, dict(loss=two)),
    (ValueError, "the batch is None, and has no arrays whose rows could", dict(batch=None)),
    (TypeError, NOT, dict(more={"act": lambda x: x})),
    (TypeError, WORD, dict(batch={"x": X, "name": "x"})),
    (TypeError, "n is int32, which has no gradient", dict(more={"n": np.arange(8)})),
]


@pytest.mark.parametrize(("kind", "message", "change"), marked(REFUSED, REFUSED[::2]))
def test_what_a_pipeline_cannot_take_is_said_before_anything_runs(kind, message, change):
    params, batch = rows_of()
    how = dict(schedule="gpipe", microbatches=2, loss=scalar, batch=batch) | change
    params |= how.pop("more", {})
    loss, schedule, m, batch = (how.pop(k) for k in ("loss", "schedule", "microbatches", "batch"))
    given = params, batch
    arrays = all(isinstance(x, np.ndarray) for x in jax.tree.leaves(given))
    with pytest.raises(kind, match=message) as found:
        function = pipeline.value_and_grad(loss, TWO, schedule, m, **how)
        jax.eval_shape(function, *given) if arrays else function(*given)
    assert len(str(found.value)) < 600 and "Traced<" not in str(found.value)


def test_a_constraint_along_stages_is_an_error_of_jax_before_anything_runs():
    """Within a stage the axis of stages is taken: a loss cannot lay anything out along it."""
    function = pipeline.value_and_grad(pinned, TWO, "gpipe", 2)
    with pytest.raises(ValueError, match=r"(?i)manual.*stage|stage.*manual"):
        jax.jit(function).lower(*rows_of())


@pytest.mark.slow
def test_the_example_in_the_docstring_runs():
    case = stacked(4)
    lines = [line.strip() for line in pipeline.__doc__.splitlines() if line.startswith("    ")]
    space = dict(mesh=mesh, pipeline=pipeline, jax=jax, loss=case.loss, params=case.params)
    half = batch()
    exec("\n".join(lines), space | {"batch": half}, out := {})
    assert_close(out["mean"], stack_on_one()[0])
