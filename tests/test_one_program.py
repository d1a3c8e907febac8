"""Stages as one program: any schedule, beside any other role, equals one device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import layouts, marks, measure, mesh, model, objective, rules, schedules
from shardwise.pipeline import program, spmd
from shardwise.pipeline.ticking import UNITS, ticks

mesh.simulate(8)
WIDE, VOCAB, LAYERS, ROWS, TOKENS = 16, 11, 8, 16, 5
FOLDED = {"interleaved_1f1b", "zb_v", "dualpipe_v"}  # two stages on each device
# Of `make test`: a whole backward and one in halves, stages one by one and folded.
QUICK = {"1f1b", "zb_h1", "dualpipe_v"}


def each(names, quick):
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


def params(layers=LAYERS):
    draw = np.random.default_rng(0)
    of = lambda *shape: (draw.normal(size=shape) / 4).astype(np.float32)  # noqa: E731
    stack = {"w": of(layers, WIDE, WIDE), "b": of(layers, WIDE)}
    return {"embed": 2 * of(VOCAB, WIDE), "layers": stack, "head": 2 * of(WIDE, VOCAB)}


def batch():
    draw = np.random.default_rng(1)
    x, y = (draw.integers(0, VOCAB, (ROWS, TOKENS)).astype(np.int32) for _ in range(2))
    return {"x": x, "y": y, "mask": (draw.random((ROWS, TOKENS)) < 0.7).astype(np.float32)}


def layer(x, w):
    return jnp.tanh(x @ w["w"] + w["b"][None, None]) + x, None


def loss_of(cuts, scalar=False, has_aux=False, skip=False, drop=False):
    """A loss whose stages end before the layers in `cuts`, of so many rows as these leave."""

    def loss(params, batch, key=None):
        first = x = params["embed"][batch["x"]]
        layers = len(params["layers"]["b"])
        for a, b in zip((0, *cuts), (*cuts, layers), strict=True):
            part = jax.tree.map(lambda leaf: leaf[a:b], params["layers"])  # noqa: B023
            x, _ = jax.lax.scan(layer, x, part)
            if b < layers:
                x, first = (
                    marks.stage_boundary((x, first)) if skip else (marks.stage_boundary(x), x)
                )
        x = x + first if skip else x
        x = model.drop(x, 0.3, key) if drop else x
        logits = x @ (params["embed"].T if skip else params["head"])
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        out = (
            each.mean()
            if scalar
            else objective.Mean((each * batch["mask"]).sum(), batch["mask"].sum())
        )
        aux = {"right": (logits.argmax(-1) == batch["y"]).sum(), "rows": each.sum(1)}
        return (out, aux) if has_aux else out

    return loss


def evenly(stages, layers=LAYERS):
    return tuple(layers // stages * s for s in range(1, stages))


def on_one(loss, params, batch, **given):
    def mean(params):
        out = loss(params, batch, **given)
        return out.total / out.count if isinstance(out, objective.Mean) else out

    return jax.jit(jax.value_and_grad(mean))(params)


def assert_close(ours, theirs, rtol=2e-6):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(1e-3, np.abs(b).max()))


@pytest.mark.parametrize("name", each(schedules.SCHEDULES, QUICK))
def test_every_schedule_equals_one_device(name):
    """And row i of an array is layer i, whatever the schedule's order of stages."""
    stages = 8 if name in FOLDED else 4
    loss = loss_of(evenly(stages))
    run = jax.jit(spmd.value_and_grad(loss, mesh.make(stage=4), name, 8))
    assert_close(run(params(), batch()), on_one(loss, params(), batch()))


@pytest.mark.parametrize(
    "options", [dict(scalar=True), dict(skip=True), dict(drop=True)], ids=["scalar", "skip", "drop"]
)
@pytest.mark.parametrize("microbatches", each([1, 4], [4]))
def test_losses_of_every_kind_equal_one_device(options, microbatches):
    """Means over rows; a skip and tied weights; draws by place."""
    loss, given = loss_of(evenly(4), **options), {}
    if options.get("drop"):
        given["key"] = jax.random.key(3)
    run = jax.jit(spmd.value_and_grad(loss, mesh.make(stage=4), "gpipe", microbatches))
    ours = run(params(), batch(), **given)
    assert_close(ours, on_one(loss, params(), batch(), **given))


def test_auxiliary_outputs_are_those_of_the_whole_batch():
    loss = loss_of(evenly(4), has_aux=True)
    aux = {"right": "sum", "rows": "concatenate"}
    run = spmd.value_and_grad(loss, mesh.make(stage=4), "1f1b", 8, has_aux=True, aux=aux)
    (_, found), _ = jax.jit(run)(params(), batch())
    assert_close(found, jax.jit(loss)(params(), batch())[1])


def test_stages_of_unequal_rows_equal_one_device():
    """Seven layers on four stages: no array is in equal rows, and each is whole on every device."""
    loss = loss_of((2, 4, 6))
    run = jax.jit(spmd.value_and_grad(loss, mesh.make(stage=4), "1f1b", 4))
    assert_close(run(params(7), batch()), on_one(loss, params(7), batch()))


def orders(draw, stages, microbatches):
    """A schedule that nobody wrote: any task that can run next, on devices drawn for stages."""
    devices = 2
    device_of = [*range(devices), *(draw(st.integers(0, 1)) for _ in range(stages - devices))]
    done, lists = set(), [[] for _ in range(devices)]
    split = draw(st.booleans())
    backward = "I" if split else "B"
    waiting = [
        (s, k, j)
        for s in range(stages)
        for j in range(microbatches)
        for k in ("FIW" if split else "FB")
    ]
    while waiting:
        ready = []
        for s, k, j in waiting:
            needs = []
            if k == "F" and s:
                needs = [(s - 1, "F", j)]
            if k == backward:
                needs = [(s, "F", j)] + ([(s + 1, backward, j)] if s < stages - 1 else [])
            if k == "W":
                needs = [(s, "I", j)]
            if done.issuperset(needs):
                ready.append((s, k, j))
        task = draw(st.sampled_from(ready))
        waiting.remove(task)
        done.add(task)
        lists[device_of[task[0]]].append(task)
    return lists


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=12)
def test_any_order_that_can_run_equals_one_device(data):
    stages, microbatches = data.draw(st.sampled_from([(2, 2), (3, 2), (4, 4)]))
    lists = orders(data.draw, stages, microbatches)
    cuts = (1, 2, 4)[: stages - 1]
    loss = loss_of(cuts)
    run = jax.jit(spmd.value_and_grad(loss, mesh.make(stage=2), lists, microbatches))
    assert_close(run(params(6), batch()), on_one(loss, params(6), batch()))


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_ticks_are_the_timeline_s(name):
    """As many, with as many idle, and as many slots as it counts of what lives at once."""
    stages = 8 if name in FOLDED else 4
    schedule = schedules.SCHEDULES[name](stages, 4, 8)
    line, table = schedules.timeline(schedule, UNITS), ticks(schedule)
    kinds = table.columns["kind"]
    assert len(kinds) == line.makespan
    assert (kinds == 0).mean() == pytest.approx(line.bubble)
    assert table.slots["kept"] == max(line.peak_live)


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


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "not tied"])
def test_no_product_is_computed_outside_of_its_task(monkeypatch, tied):
    """What a task reads is tied to its turn: else XLA computes every task at every tick."""
    if not tied:
        monkeypatch.setattr(program, "_barrier", lambda tree: tree)
    run = spmd.value_and_grad(loss_of(evenly(4)), mesh.make(stage=4), "1f1b", 8)
    text = jax.jit(run).lower(params(), batch()).compile().as_text()
    assert " dot(" in text
    assert (outside_of_tasks(text) == []) == tied


ROLES = {
    "alone": dict(stage=4),
    "fsdp": dict(stage=4, fsdp=2),
    "data, fsdp": dict(stage=2, data=2, fsdp=2),
}


@pytest.mark.parametrize("name", each(ROLES, ["alone", "data, fsdp"]))
def test_two_steps_of_a_layout_equal_one_device(name):
    """With a global norm, on plain arrays that lie as `layouts.shardings` says."""
    sizes = ROLES[name]
    cuts = evenly(4)
    loss, tx = loss_of(cuts), optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    layout = layouts.Layout(
        mesh.make(**sizes),
        **{role: role for role in sizes},
        by="compiler",
        program=True,
        microbatches=4,
        schedule="1f1b" if sizes["stage"] == 4 else "interleaved_1f1b",
        stacked=lambda path: path.startswith("layers"),
    )
    ours, state = layouts.init(layout, lambda key: params(), tx, jax.random.key(0))
    assert ours["layers"]["w"].sharding.spec[0] == "stage"
    wanted = layouts.shardings(layout, jax.eval_shape(params), tx)
    assert jax.tree.map(lambda x: x.sharding, (ours, state)) == wanted
    step = layouts.step(layout, loss, tx)
    theirs, other = params(), tx.init(params())
    for _ in range(2):
        ours, state, mean = step(ours, state, batch())
        expected, grads = on_one(loss, theirs, batch())
        updates, other = tx.update(grads, other, theirs)
        theirs = optax.apply_updates(theirs, updates)
        assert abs(mean - expected) < 1e-5
    assert_close(rules.whole(ours), theirs, 1e-4)


@pytest.mark.parametrize("sizes", [dict(stage=4, fsdp=2), dict(stage=2, data=2, fsdp=2)])
@pytest.mark.slow
def test_the_decoder_equals_one_device(sizes):
    """With dropout and rematerialised layers; its value alone takes the forward tasks' ticks."""
    config = model.Config(
        layers=4,
        stages=4,
        embed=16,
        heads=4,
        kv_heads=2,
        head_dim=4,
        mlp=32,
        dropout=0.2,
        remat=True,
    )
    graphdef, weights = nnx.split(nnx.jit(lambda: model.Decoder(config, nnx.Rngs(0)))())
    loss = functools.partial(model.loss, graphdef=graphdef)
    draw = np.random.default_rng(1)
    given = {n: draw.integers(0, 256, (16, 8)).astype(np.int32) for n in ("tokens", "targets")}
    given["mask"] = np.ones((16, 8), np.float32)
    layout = layouts.Layout(
        mesh.make(**sizes),
        **{role: role for role in sizes},
        by="compiler",
        program=True,
        microbatches=4,
        schedule="1f1b" if sizes["stage"] == 4 else "interleaved_1f1b",
    )
    key = jax.random.key(7)
    placed = layouts.place(layout, weights)
    ours = layouts.value_and_grad(layout, loss)(placed, given, key=key)
    expected = on_one(loss, weights, given, key=key)
    assert_close(rules.whole(ours), expected, 2e-5)
    assert_close(layouts.value(layout, loss)(placed, given, key=key), expected[0], 2e-5)


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_a_value_alone_is_of_forward_tasks(name):
    """In as many ticks as microbatches and stages ask for at least; no W and no I are compiled."""
    stages = 8 if name in FOLDED else 4
    schedule = schedules.SCHEDULES[name](stages, 4, 8)
    table = ticks(schedule, backward=False)
    assert set(np.unique(table.columns["kind"])) == {0, 1} and table.slots["kept"] == 0
    assert (table.columns["kind"] == 1).sum() == stages * 8
    assert len(table.columns["kind"]) <= 8 * stages // 4 + stages - 1


def test_the_value_of_a_loss_and_its_aux_equal_one_device():
    loss = loss_of(evenly(4), has_aux=True)
    layout = layouts.Layout(mesh.make(stage=4), stage="stage", program=True, microbatches=4)
    run = layouts.value(layout, loss, True, {"right": "sum", "rows": "concatenate"})
    placed = layouts.place(layout, params())
    mean, aux = run(placed, batch())
    assert_close(mean, on_one(loss_of(evenly(4)), params(), batch())[0])
    assert_close(aux, jax.jit(loss)(params(), batch())[1])
    both = layouts.value_and_grad(layout, loss, True, {"right": "sum", "rows": "concatenate"})
    texts = [f.lower(placed, batch()).compile().as_text() for f in (run, both)]
    products = [text.count(" dot(") for text in texts]
    assert 0 < products[0] <= products[1] / 3


def test_what_stands_in_tasks_is_counted_as_often_as_they_run():
    """Once for each microbatch, and of the devices on the one that does most: the last."""

    def compiled(**sizes):
        grid = mesh.make(**sizes)
        layout = layouts.Layout(grid, **{k: k for k in sizes}, program=True, microbatches=4)
        run = layouts.value_and_grad(layout, loss_of(evenly(2)))
        return run.lower(layouts.place(layout, params()), batch()).compile()

    alone, both = compiled(stage=2), compiled(stage=2, fsdp=2)
    per_layer = 2 * ROWS * TOKENS * WIDE * WIDE
    logits = 2 * ROWS * TOKENS * WIDE * VOCAB
    assert measure.flops(alone) == 3 * (LAYERS // 2 * per_layer + logits)
    assert measure.flops(both) == measure.flops(alone) / 2
    found = measure.collectives(both)
    layers = [op for op in found.ops if op.source.count("/while/body") == 3]
    assert layers and {op.trips for op in layers} == {4 * LAYERS // 2}
    assert found.ring_bytes > measure.collectives(alone).ring_bytes


@pytest.mark.parametrize("role", ["tensor", "context", "expert"])
def test_roles_that_work_on_a_stage_s_activations_are_refused(role):
    with pytest.raises(ValueError, match=rf"{role}=.* beside stages as one program"):
        layouts.Layout(mesh.make(stage=2, other=2), stage="stage", **{role: "other"}, program=True)


@pytest.mark.parametrize("skip", each([False, True], [True]))
@pytest.mark.parametrize("schedule", each(["gpipe", "1f1b", "zb_h1", "dualpipe_v"], QUICK))
def test_bytes_held_and_sent_are_predicted(schedule, skip):
    """To the byte; where rows lie on other devices than a schedule's, the compiler sends more."""
    loss = loss_of(evenly(8 if schedule in FOLDED else 4), skip=skip)
    given = {n: x for n, x in params().items() if n != "head" or not skip}  # all that is read
    layout = layouts.Layout(
        mesh.make(stage=4),
        stage="stage",
        program=True,
        microbatches=8,
        schedule=schedule,
        stacked=lambda path: path.startswith("layers"),
    )
    assert "by compiler" in str(layout)
    found = layouts.predict(layout, given, batch(), optax.adamw(0.1), loss=loss)
    placed = layouts.init(layout, lambda key: given, optax.adamw(0.1), jax.random.key(0))
    device = jax.devices()[0]
    assert found.held["parameters"] == measure.bytes_on_devices(placed[0])[device]
    assert found.held["parameters"] * 4 == sum(x.nbytes for x in jax.tree.leaves(given))
    assert found.held["state"] == measure.bytes_on_devices(placed[1])[device]
    run = layouts.value_and_grad(layout, loss).lower(placed[0], batch()).compile()
    counted = sum(op.ring_bytes for op in measure.collectives(run).ops)
    told = found.sent["stage",]
    if schedule in FOLDED:
        assert 0.2 * counted < told <= counted, (told, counted)
    else:
        assert told == counted
