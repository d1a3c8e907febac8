"""Layouts with stages on chips that are not here: what their programs hold, send and say."""

import dataclasses
import importlib.util
import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import layouts, marks, measure, schedules, topology
from shardwise.pipeline import live

needs_libtpu = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"),
    reason="libtpu, the TPU compiler, is not installed: pip install 'shardwise[tpu]'",
)
NOTHING = live.Held(*[0] * len(live.Held._fields))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))


def fullest(schedule, **held):
    """Of each device, the most that lies there when one of its tasks starts."""
    every = [NOTHING._replace(**held)] * schedule.stages
    found = [0] * schedule.devices
    for stage, name, size in live.moments(schedule, every):
        if name in "FBIW":
            found[schedule.device_of[stage]] = max(found[schedule.device_of[stage]], size)
    return tuple(found)


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_what_lies_there_is_what_the_schedule_keeps_live(name):
    """Data lies from a forward's start to its backward's end, as `Timeline` counts; and so on."""
    stages = 8 if name in ("interleaved_1f1b", "zb_v", "dualpipe_v") else 4
    schedule = schedules.SCHEDULES[name](stages, 4, 8)
    line = schedules.timeline(schedule)
    assert fullest(schedule, data=1) == line.peak_live
    assert fullest(schedule, pending=1) == line.peak_weights_pending
    assert fullest(schedule, own=3, state=5, sums=7, found=11) == (26 * stages // 4,) * 4


def spans(schedule, line, stage):
    """{what: [(from, to)]} of each microbatch of a stage, as the sender and the reader have it."""
    start, end, last = line.start, line.end, schedule.stages - 1
    found = {name: [] for name in ("data", "kept", "pending", "carry", "cotangents", "outputs")}
    for j in range(schedule.microbatches):
        of = {kind: schedules.Task(stage, kind, j) for kind in "FBIW"}
        gone = end[of["B"]] if of["B"] in end else end[of["W"]]
        read = end[schedule.backward(stage, j)]
        found["data"].append((start[of["F"]], gone))
        found["kept"].append((end[of["F"]], gone))
        if of["I"] in end:
            found["pending"].append((end[of["I"]], gone))
        if stage > 0:
            sent = end[schedules.Task(stage - 1, "F", j)]
            found["carry"].append((sent, end[of["F"]]))
        if stage < last:
            found["cotangents"].append((end[schedule.backward(stage + 1, j)], read))
        else:
            found["outputs"].append((end[of["F"]], math.inf))
    return found


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
def test_each_array_lies_there_from_when_it_is_made_until_it_was_read(name):
    schedule = schedules.SCHEDULES[name](4, 4, 8)
    line = schedules.timeline(schedule)
    for what in ("data", "kept", "pending", "carry", "cotangents", "outputs"):
        every = [NOTHING._replace(**{what: 1})] * 4
        found = {(m.stage, m.name): m.live for m in live.moments(schedule, every)}
        for stage, order in enumerate(schedule.tasks):
            lies = spans(schedule, line, stage)[what]
            for kind in {task.kind for task in order}:
                at = [line.start[task] for task in order if task.kind == kind]
                most = max(sum(a <= time < b for a, b in lies) for time in at)
                assert found[stage, kind] == most, (what, stage, kind)


def test_gpipe_holds_all_and_1f1b_as_many_as_stages_follow():
    at_start = lambda name: fullest(schedules.SCHEDULES[name](4, 4, 8), kept=1)  # noqa: E731
    assert at_start("gpipe") == (8, 8, 8, 8)
    assert at_start("1f1b") == (4, 3, 2, 1)


def test_what_is_sent_stays_on_a_device_that_has_both_stages():
    held = [NOTHING._replace(outputs=10, back=1)] * 8
    looped = schedules.SCHEDULES["interleaved_1f1b"](8, 4, 4)
    assert live.transfers(looped, held) == [
        4 * 21,
        4 * 22,
        4 * 22,
        4 * 12,
    ]  # the last has nothing to send on
    there_and_back = dataclasses.replace(looped, device_of=(0, 1, 2, 3, 3, 2, 1, 0))
    assert live.transfers(there_and_back, held) == [4 * 11, 4 * 22, 4 * 22, 4 * 11]


D, ROWS, M = 512, 1024, 4
ARRAY = ROWS // M // 4 * D * 4  # bytes of one device's rows of a microbatch
WEIGHT = D * D * 4


def create(key):
    keys = jax.random.split(key, 4)
    return {f"w{i}": jax.random.normal(k, (D, D)) for i, k in enumerate(keys)}


def loss(params, batch):
    """Of products alone: what one keeps is what enters it."""
    x = batch["x"] @ params["w0"] @ params["w1"]
    x = marks.stage_boundary(x) @ params["w2"] @ params["w3"]
    return jnp.mean(x)


ADAM = optax.adam(1e-3)
BATCH = {"x": jax.ShapeDtypeStruct((ROWS, D), jnp.float32)}


def staged(by, schedule, chips="v5e:2x4", tx=ADAM, **axes):
    mesh = topology.chips(chips).mesh(**(axes or dict(stage=2, fsdp=4)))
    roles = {name: name for name in mesh.shape}
    options = dict(by=by, schedule=schedule, microbatches=M)
    layout = layouts.Layout(mesh.abstract, **roles, **options)
    return mesh, layouts.lower(layout, create, tx, loss, BATCH)


def sent_by_hand():
    """Bytes that a device sends in F and in B of stage 0, written without any of our stages."""
    mesh = topology.chips("v5e:2x2").mesh(fsdp=4)

    def of(fn, outputs, *shapes):
        specs = tuple(P("fsdp") for _ in shapes)
        given = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=_laid(mesh, P("fsdp")))
                 for s in shapes]  # fmt: skip
        mapped = jax.shard_map(fn, mesh=mesh.abstract, in_specs=specs, out_specs=outputs)
        compiled = topology.compile(topology.lower(jax.jit(mapped), *given), mesh)
        return measure.collectives(compiled).ring_bytes

    def whole(w):
        return jax.lax.all_gather(w, "fsdp", tiled=True)

    def forward(x, w0, w1):
        h = x @ whole(w0)
        return h @ whole(w1), h

    def backward(x, h, g, w1):
        grads = x.T @ (g @ whole(w1).T), h.T @ g
        return [jax.lax.psum_scatter(grad, "fsdp", tiled=True) for grad in grads]

    rows, weight = (ROWS // M, D), (D, D)
    return of(forward, P("fsdp"), rows, weight, weight), of(
        backward, P("fsdp"), rows, rows, rows, weight
    )


def _laid(mesh, spec):
    return NamedSharding(mesh.abstract, spec)


# When a backward starts: microbatches live on each stage, and how many arrays wait for it there.
LIVE = {"gpipe": ((4, 4), (1, 0)), "1f1b": ((2, 1), (1, 1))}


def check_memory(found, step, schedule):
    """Parameters, Adam's two moments and the sums, and what products keep: counted by hand."""
    parts, waiting = LIVE[schedule]
    own = 2 * WEIGHT // 4
    held = step.compiled(lambda s, name, lowered: found.programs[s, name])[1]
    lies = {(m.stage, m.name): m.live for m in step.moments(held)}
    for s, kept in enumerate((2, 2)):  # x and what enters w1; what enters w2 and w3
        live_then = own + 2 * own + own + (parts[s] * kept + waiting[s]) * ARRAY
        program, rank = found.programs[s, "B"], found.ranks[s]
        beyond = measure.fits(program).needed - program.memory_analysis().argument_size_in_bytes
        assert live_then <= lies[s, "B"] <= live_then + M * 16  # and some numbers
        assert rank.stages == (s,) and rank.live == lies[s, rank.name]
        assert rank.needed >= lies[s, "B"] + beyond and rank.needed > rank.live
    assert found.fit.needed == max(rank.needed for rank in found.ranks)
    assert found.fit.allowed == topology.CHIPS["v5e"].usable_hbm


BY = ["hand", pytest.param("compiler", marks=pytest.mark.slow)]


@needs_libtpu
@pytest.mark.parametrize("by", BY)
def test_memory_and_bytes_are_those_counted_by_hand(by):
    for name in LIVE:
        mesh, step = staged(by, name)
        found = topology.compile_stages(step, mesh)
        check_memory(found, step, name)
        assert found.sent["stage",] == M * ARRAY
        kinds = {(s, kind) for s in (0, 1) for kind in ("F", "B", "finish", "update")}
        assert set(found.programs) == kinds
        assert {c.mesh.devices for c in found.programs.values()} == {4}
        for rank in found.ranks:
            assert f"{rank.needed:,}" in repr(found)
    if by == "hand":
        forward, backward = sent_by_hand()
        assert found.ranks[0].sent["fsdp",] == M * (forward + backward)
        # Of stage 1: two gathers in F, two and two scatters in B; in the first B w0 is not read.
        written = M * (6 * WEIGHT * 3 // 4 + ARRAY)
        assert written <= found.sent_by_hand <= written + M * 64  # the loss's numbers
        assert sum(found.sent_by_kind.values()) >= found.ranks[1].sent["fsdp",] + M * ARRAY
        became = found.differences(found.busiest)
        assert found.busiest == 1 and "left over" not in became
        assert sum(d.written for d in became.values()) == found.sent_by_hand - M * ARRAY
        assert sum(d.compiled for d in became.values()) == found.ranks[1].sent["fsdp",]


@needs_libtpu
@pytest.mark.slow
def test_layers_are_cast_on_their_own_stage_alone():
    """What a stage holds and needs by the compiler is, with weights used in bfloat16, no more."""

    def stacked(params, batch):
        def layers(x, stack):
            return jax.lax.scan(lambda x, w: (jnp.tanh(x @ marks.use(w)), None), x, stack)[0]

        x = layers(batch["x"], params["w"][:4])
        return jnp.mean(layers(marks.stage_boundary(x), params["w"][4:]))

    def made(key):
        return {"w": jax.random.normal(key, (8, D, D))}

    mesh, needed = topology.chips("v5e:2x4").mesh(stage=2, fsdp=4), []
    for dtype in (None, jnp.bfloat16):
        options = dict(stage="stage", fsdp="fsdp", by="compiler", microbatches=M, dtype=dtype)
        layout = layouts.Layout(mesh.abstract, **options)
        step = layouts.lower(layout, made, ADAM, stacked, BATCH)
        found = topology.compile_stages(step, mesh)
        held = step.compiled(lambda s, name, lowered: found.programs[s, name])[1]  # noqa: B023
        assert [h.own for h in held] == [4 * WEIGHT // 4] * 2
        needed.append([rank.needed for rank in found.ranks])
    assert all(narrow <= wide for wide, narrow in zip(*needed, strict=True))


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("by", ["hand", "compiler"])
def test_halves_of_a_backward_are_programs_of_their_own(by):
    clipped = optax.chain(optax.clip_by_global_norm(1.0), ADAM)
    mesh, step = staged(by, "zb_h1", tx=clipped)
    found = topology.compile_stages(step, mesh)
    names = {"F", "I", "W", "finish", "update 0", "update"}  # the norm is of all stages
    assert {name for _, name in found.programs} == names
    assert found.sent["stage",] == M * ARRAY
    own = 2 * WEIGHT // 4
    for rank in found.ranks:
        assert rank.live >= 4 * own + 2 * ARRAY


@needs_libtpu
@pytest.mark.slow
def test_a_stage_may_have_fewer_chips_than_a_host():
    mesh, step = staged("compiler", "1f1b", "v5e:2x2", stage=2, data=2)
    found = topology.compile_stages(step, mesh)
    assert found.sent["stage",] == M * 2 * ARRAY
    for program in found.programs.values():
        assert len(program.coordinates) == 2
        assert measure.collectives(program).ring_bytes <= 2 * (2 * WEIGHT + 64)  # sums of gradients


@needs_libtpu
def test_a_part_is_compiled_as_a_slice_of_its_size_and_no_box_is_refused():
    whole, alone = topology.chips("v5e:2x4").mesh(stage=2, x=4), topology.chips("v5e:2x2").mesh(x=4)

    def on(mesh):
        x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=_laid(mesh, P("x")))
        jitted = jax.jit(lambda x: (x @ x.T, jnp.tanh(x).sum(0)))
        return topology.compile(topology.lower(jitted, x), mesh)

    ours = on(whole.part(stage=1))
    assert ours.outputs == (P("x"), P())
    assert {place[:2] for place in ours.coordinates} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    said, theirs = (measure.collectives(c).ring_bytes for c in (ours, on(alone)))
    assert said == theirs > 0
    with pytest.raises(ValueError, match=r"no box of the torus(?s:.*)Put its axis first"):
        on(topology.chips("v5e:2x4").mesh(x=4, stage=2).part(stage=0))


def test_what_cannot_be_is_named_before_anything_is_compiled():
    mesh = topology.chips("v5e:2x4").mesh(stage=2, fsdp=4)
    for places in ({"stage": 2}, {"rows": 0}):
        with pytest.raises(ValueError, match=r"no part at \w+=\d; the mesh has"):
            mesh.part(**places)
    one = layouts.Layout(topology.chips("v5e:2x4").mesh(fsdp=8).abstract, fsdp="fsdp")
    with pytest.raises(ValueError, match=r"without stages.* is one program"):
        layouts.lower(one, create, ADAM, loss, BATCH)
    _, step = staged("hand", "1f1b")
    other = topology.chips("v5e:2x4").mesh(stage=4, fsdp=2)
    with pytest.raises(ValueError, match=re.escape("has 2 ranks along 'stage'")):
        topology.compile_stages(step, other)


def test_weights_that_several_stages_hold_are_refused_by_name():
    def tied(params, batch):
        x = marks.stage_boundary(batch["x"] @ params["w0"])
        return jnp.mean(x @ params["w0"].T)

    mesh = topology.chips("v5e:2x4").mesh(stage=2, fsdp=4)
    layout = layouts.Layout(
        mesh.abstract, stage="stage", fsdp="fsdp", schedule="1f1b", microbatches=M
    )
    with pytest.raises(ValueError, match=r"w0 is read by the stages \[0, 1\]"):
        layouts.lower(layout, lambda key: {"w0": create(key)["w0"]}, ADAM, tied, BATCH)
