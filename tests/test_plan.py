"""What `plan` says by formula is what layouts say, what devices hold, and what programs send."""

import collections
import dataclasses
import functools
import itertools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import marked, sample

from shardwise import context, data, layouts, measure, mesh, model, plan, schedules, topology, train
from shardwise.costs import memory, sent
from shardwise.costs.arrays import parts
from shardwise.layouts import gradients
from shardwise.layouts import sent as layouts_sent
from shardwise.pipeline import ticks
from shardwise.plan import arrays, compiling, planning, roles, seconds

CHIPS = topology.chips("v5e:2x4")
KEY = jax.random.key(0)
LENGTH = 32


def drawn(seed, staged=False, mixed=None):
    """(the roles of a random layout on eight devices, a random decoder, rows of a batch)."""
    rng, rows, tries = random.Random(seed), 64 if staged else 32, seed
    while True:
        config = _config(rng, rng.random() < 0.3 if mixed is None else mixed)
        config = dataclasses.replace(config, **_variant(random.Random(tries), config))
        tries += 1
        possible = [
            r
            for r in roles.every(8)
            if (r.stage > 1) == staged
            and config.vocab != config.embed  # or embedding and head travel together over stages
            and r.rows * r.context > 1
            and not roles.refusal(r, config, CHIPS, rows, LENGTH)
        ]
        if possible:
            each = list(roles.variants(rng.choice(possible), rows, CHIPS, config, LENGTH))
            chosen = rng.choice([r for r in each if r.microbatches <= 8] or each)
            chunks = (n for n in (1, 8) if n == 1 or (chosen.stage == 1 and chosen.context <= 4))
            return dataclasses.replace(chosen, loss_chunks=rng.choice([*chunks])), config, rows


def _config(rng, mixed):
    mixture = dict(experts=8, capacity_factor=1.25) if mixed else {}
    return model.Config(
        vocab=4 * rng.randrange(8, 30),
        embed=rng.choice([24, 30, 32, 40]),
        layers=rng.choice([2, 4]),
        heads=4 * rng.choice([1, 2]),
        kv_heads=4,
        head_dim=2 * rng.randrange(1, 5),
        mlp=4 * rng.randrange(3, 12),
        dtype=rng.choice([jnp.bfloat16, jnp.float32]),
        **mixture,
    )


def _variant(rng, config):
    """Of three, one is as the book has it."""
    if not rng.randrange(3):
        return {}
    return dict(
        tied=rng.random() < 0.5,
        qkv_bias=rng.random() < 0.5,
        qk_norm=rng.choice(["", "head", "heads"]),
        norms=rng.choice(["before", "after", "both"]),
        activation="silu" if config.experts else rng.choice(["silu", "gelu"]),
    )


def compare(part, layout, program, shapes):
    """State and bytes sent by formula with those of `layouts.predict`, for one stage."""
    told = dict(loss=program.loss, has_aux=program.has_aux, stage=part.stage)
    told = told if layout.stage else {}
    tx, again = train.optimizer(), part.roles.remat
    expected = layouts.predict(layout, shapes, program.batch, tx, remat=again, **told)
    found = memory.memory(part)
    names = ("parameters", "state", "batch")
    held = {name: getattr(found, name) for name in names if name in expected.held}
    assert held == expected.held
    if layout.stage and layout.tensor:  # what tensor cuts, `predict` counts whole there
        return
    ours = collections.Counter()
    for s in sent.sent(part):
        if s.kind not in ("tokens", "counts"):
            ours[tuple(sorted(s.roles))] += s.bytes
    theirs = {tuple(sorted(k)): v for k, v in expected.sent.items()}
    assert ours.keys() == theirs.keys()
    for along, size in theirs.items():
        plain = part.roles.stage == 1 and part.roles.context == 1 and not part.config.experts
        if along != ("tensor",) or plain:
            assert math.isclose(ours[along], size), along


@pytest.mark.parametrize("seed", marked(range(40), range(1, 7), 14))
def test_bytes_are_those_of_the_layout(seed):
    each, config, rows = drawn(seed)
    layout = compiling.layout_of(each, config, mesh.make(**each.sizes))
    program = compiling.program_of(each, config, rows, LENGTH)
    (part,) = parts(each, config, arrays.of_decoder(config), rows, LENGTH)
    compare(part, layout, program, jax.eval_shape(program.create, KEY))


NORMED = ("head", "heads")


@pytest.mark.slow
def test_scales_of_all_norms_are_summed_along_tensor():
    """By the planner and by `layouts.predict`: those of heads, and those after sublayers, too;
    and over all heads, which tensor cuts, a number of each token four times in each layer.
    """
    each, sent_along = roles.Roles(data=4, tensor=2), []
    for changes in ({}, dict(norms="both"), *(dict(norms="both", qk_norm=x) for x in NORMED)):
        config = dataclasses.replace(SMALL, **changes)
        layout = compiling.layout_of(each, config, mesh.make(**each.sizes))
        program = compiling.program_of(each, config, 32, LENGTH)
        (part,) = parts(each, config, arrays.of_decoder(config), 32, LENGTH)
        compare(part, layout, program, jax.eval_shape(program.create, KEY))
        (along,) = [s.bytes for s in sent.sent(part) if s.roles == ("tensor",)]
        sent_along.append(along)
    scales = 2 * config.layers * config.embed, 2 * config.layers * config.head_dim
    numbers = 4 * 2 * config.layers * 32 // 4 * LENGTH * 4 // 2
    *summed, over_heads = [b - a for a, b in itertools.pairwise(sent_along)]
    assert summed == [4 * n for n in scales] and over_heads == numbers - 4 * scales[1]


@pytest.mark.parametrize("seed", marked(range(12), [], 3))
def test_bytes_of_stages_are_those_of_the_layout(seed):
    each, config, rows = drawn(seed, staged=True)
    layout = compiling.layout_of(each, config, mesh.make(**each.sizes))
    program = compiling.program_of(each, config, rows, LENGTH)
    shapes = jax.eval_shape(program.create, KEY)
    for part in parts(each, config, arrays.of_decoder(config), rows, LENGTH):
        compare(part, layout, program, shapes)


SMALL = model.Config(vocab=512, embed=64, layers=8, heads=8, kv_heads=4, head_dim=16, mlp=128)
NARROW = dataclasses.replace(SMALL, dtype=jnp.bfloat16)
LATENT = dict(latent=12, query_latent=20, kv_heads=8, head_dim=12, rope_dim=4, value_dim=8)
DEEP = dict(experts=8, capacity_factor=1.25, shared_experts=1, router_bias=True, mlp=32, layers=3)
DEEP |= LATENT | dict(dense_layers=1, dense_mlp=96)
MIXED = dict(experts=8, capacity_factor=1.25)
SIZES = {"dense first": DEEP | dict(layers=5, dense_layers=2), "latent": LATENT | dict(layers=3)}
SIZES |= {"wide": dict(layers=7), "few": dict(layers=5), "experts": dict(layers=5, **MIXED)}
ALONG = dict(stage=2, fsdp=4), dict(stage=4, fsdp=2), dict(stage=2, fsdp=2, expert=2)
ALONG += dict(stage=2, fsdp=2, data=2), dict(stage=4, data=2)
UNEQUAL = [
    (name, along, remat)
    for (name, changes), along, remat in itertools.product(SIZES.items(), ALONG, (True, False))
    if changes["layers"] >= along["stage"] and ("expert" not in along or "experts" in changes)
]


@pytest.mark.parametrize("name, along, remat", marked(UNEQUAL, UNEQUAL[:1], 3), ids=str)
def test_bytes_of_unequal_stages_are_those_of_the_layout(name, along, remat):
    each = roles.Roles(**along, microbatches=4, remat=remat)
    config = dataclasses.replace(SMALL, **SIZES[name])
    layout = compiling.layout_of(each, config, mesh.make(**each.sizes))
    program = compiling.program_of(each, config, 64, LENGTH)
    shapes = jax.eval_shape(program.create, KEY)
    found = gradients.program(layout, program.loss, program.has_aux, shapes, program.batch)
    for part in parts(each, config, arrays.of_decoder(config), 64, LENGTH):
        compare(part, layout, program, shapes)
        assert sent.sends(part) == pytest.approx(found.sends())


# Of those drawn first, one for each choice of axes, microbatches and what is computed again.
LOWERED = [(0, seed) for seed in (1, 2, 4, 5, 7, 10, 11)]
LOWERED += [(1, seed) for seed in (0, 1, 3, 4, 5, 6, 8, 10, 11)]


@pytest.mark.parametrize("mixed, seed", marked(LOWERED, [], 4))
def test_bytes_sent_by_hand_are_those_in_the_lowered_program(mixed, seed):
    """All of them: of tokens that travel to experts, too."""
    each, config, rows = drawn(100 + seed, mixed=bool(mixed))
    if each.tensor > 1:  # what the compiler cuts there is whole in a lowered program
        changes = dict(tensor=1, data=each.data * each.tensor, microbatches=1)
        each = dataclasses.replace(each, **changes)
    layout = compiling.layout_of(each, config, mesh.make(**each.sizes))
    program = compiling.program_of(each, config, rows, LENGTH)
    counted = measure.collectives(lowered_by(layout, program)).ring_bytes
    (part,) = parts(each, config, arrays.of_decoder(config), rows, LENGTH)
    assert math.isclose(sum(s.bytes for s in sent.sent(part)), counted)


def on_host(jaxpr, times=1):
    """Bytes that a device writes to its host, by the program as it is traced."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "device_put" and "Host" in str(eqn.params["devices"]):
            total += times * sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.invars)
        inner = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        for value in jax.tree.leaves(list(eqn.params.values())):
            value = getattr(value, "jaxpr", value)
            total += on_host(value, inner) if hasattr(value, "eqns") else 0
    return total


@pytest.mark.parametrize("seed", marked(range(1, 7), [1], 2))
def test_what_waits_on_the_host_is_what_enters_layers(seed):
    each, config, rows = drawn(300 + seed)
    each = dataclasses.replace(each, remat=True, offload=True, products=False)
    if each.tensor > 1:  # what the compiler cuts there is whole in a traced program
        each = dataclasses.replace(each, tensor=1, data=each.data * each.tensor, microbatches=1)
    layout = compiling.layout_of(each, config, mesh.make(**each.sizes))
    program = compiling.program_of(each, config, rows, LENGTH)
    placed = jax.eval_shape(lambda key: layouts.place(layout, program.create(key)), KEY)
    function = layouts.value_and_grad(layout, program.loss, program.has_aux, check=False)
    written = on_host(jax.make_jaxpr(function)(placed, program.batch).jaxpr)
    (part,) = parts(each, config, arrays.of_decoder(config), rows, LENGTH)
    assert each.microbatches * memory.memory(part).host == written


OPTIMIZERS = [("adafactor", None), ("adamw", None), ("adamw", "bfloat16"), ("adagrad", None)]
OPTIMIZERS += [("lion", "bfloat16"), ("sgd", None)]


@pytest.mark.parametrize("seed", marked(range(6), [], 2))
def test_state_is_what_devices_hold(seed):
    each, config, rows = drawn(200 + seed)
    layout = compiling.layout_of(each, config, mesh.make(**each.sizes))
    program = compiling.program_of(each, config, rows, LENGTH)
    name, moments = OPTIMIZERS[seed % len(OPTIMIZERS)]
    optimizer = train.Optimizer(name=name, moments=moments)
    params, state = layouts.init(layout, program.create, optimizer.transformation(), KEY)
    (part,) = parts(each, config, arrays.of_decoder(config, optimizer), rows, LENGTH)
    found = memory.memory(part)
    assert set(measure.bytes_on_devices(params).values()) == {found.parameters}
    assert set(measure.bytes_on_devices(state).values()) == {found.state}


LATENT_ROLES = dict(fsdp=2, expert=2, context=2, remat=True), dict(fsdp=8, microbatches=2)
LATENT_ROLES += dict(data=2, context=4), dict(expert=4, context=2, microbatches=2, remat=True)


@pytest.mark.parametrize("sizes", marked(LATENT_ROLES, LATENT_ROLES[:1]), ids=str)
def test_latent_attention_and_dense_layers_are_held_and_sent_by_the_formula(sizes):
    each, config = roles.Roles(**sizes), dataclasses.replace(SMALL, **DEEP)
    layout = compiling.layout_of(each, config, mesh.make(**each.sizes))
    program = compiling.program_of(each, config, 32, LENGTH)
    (part,) = parts(each, config, arrays.of_decoder(config), 32, LENGTH)
    counted = measure.collectives(lowered_by(layout, program)).ring_bytes
    assert math.isclose(sum(s.bytes for s in sent.sent(part)), counted)
    laid = layouts.shardings(layout, jax.eval_shape(program.create, KEY))
    shapes = jax.tree.leaves(jax.eval_shape(program.create, KEY))
    held = [
        math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize
        for s, x in zip(jax.tree.leaves(laid), shapes, strict=True)
    ]
    assert memory.memory(part).parameters == sum(held)


@functools.cache
def small(batch=64, sequence=64, name="v5e:2x4", **changes):
    return plan.plan(dataclasses.replace(SMALL, **changes), name, batch, sequence)


@settings(max_examples=20)
@given(st.integers(1, 360))
def test_every_division_of_the_devices_comes_once(n):
    found = list(roles.every(n))
    sizes = [(r.stage, r.data, r.fsdp, r.expert, r.context, r.tensor) for r in found]
    assert len(set(sizes)) == len(found)
    assert all(math.prod(each) == n for each in sizes)
    exponents = [next(e for e in range(9, -1, -1) if n % p**e == 0) for p in (2, 3, 5, 7, 11, 13)]
    rest = n // math.prod(p**e for p, e in zip((2, 3, 5, 7, 11, 13), exponents, strict=True))
    if rest == 1:  # as many as ways to give each prime's exponents to six roles
        assert len(found) == math.prod(math.comb(e + 5, 5) for e in exponents)


def test_a_plan_leaves_nothing_out_and_is_in_order():
    found = small(experts=4, capacity_factor=1.0)
    plain = dict(microbatches=1, remat=False, offload=False, products=False, loss_chunks=1)
    told = {str(dataclasses.replace(c.roles, **plain)) for c in found.fitting}
    refused = {str(r.roles) for r in found.refused}
    assert not found.too_large and not told & refused
    assert told | refused == {str(r) for r in roles.every(8)}
    times = [c.step.seconds for c in found.best]
    assert times == sorted(times) and times[0] == min(c.step.seconds for c in found.fitting)
    assert len({str(c.roles.sizes) for c in found.best}) == len(found.best) == len(told)
    assert sum(count for count, _ in found.why_not.values()) == len(found.refused)
    for c in found.fitting:
        assert 0 < c.mfu <= c.mfu_bound <= 1 and c.step.bound <= c.step.seconds
        products, step = max(c.step.arithmetic, c.step.weights), c.step
        work = products + step.hidden + step.waited + 2 * step.host
        assert step.in_turn == pytest.approx(work / (1 - step.bubble) + step.update, rel=1e-9)
        assert step.seconds <= step.in_turn + 1e-12
        if step.hidden > products:  # what runs beside them takes longer
            assert step.binds not in ("arithmetic", "weights")
        elif not step.waited + step.host:
            assert step.binds in ("arithmetic", "weights")


@settings(max_examples=40)
@given(st.integers(0, 10**6))
def test_more_needs_more(index):
    """Rows, tokens, layers and a batch in one piece need more memory, and remat less."""
    found = small()
    kept_here = [c for c in found.fitting if not c.roles.offload]
    c = kept_here[index % len(kept_here)]

    def needed(batch=64, sequence=64, layers=8, **changes):
        config = dataclasses.replace(found.config, layers=layers)
        held = arrays.of_decoder(config)
        each = dataclasses.replace(c.roles, **changes)
        return planning.candidate(each, config, held, CHIPS, batch, sequence).memory

    def total(**changes):
        return needed(**changes).total

    assert math.isclose(total(), c.memory.total)
    if c.roles.stage == 1:
        assert needed(layers=16).terms.kept == 2 * c.memory.terms.kept
        assert needed(layers=16).terms.layer == c.memory.terms.layer
    plain = dict(remat=True, products=False)
    assert total(**plain) <= total(remat=False, products=False)
    again, away = (needed(offload=offload, **plain) for offload in (False, True))
    if c.roles.stage == 1:
        assert total(**plain) < total(remat=True, products=True)
        assert away.terms.kept == again.terms.kept / 4  # two layers of eight are entered
        assert away.host == again.terms.kept and not again.host
    assert total() < total(batch=128) and total() < total(sequence=128)
    assert total() < total(layers=16)
    assert total(batch=128, microbatches=2 * c.roles.microbatches) < total(batch=128)


def test_what_is_too_large_is_told_with_its_bytes():
    found = plan.plan("llama3-8b", "v5e:2x4", 64, 8192)
    assert not found.fitting and not found.best
    count, example = found.why_not["more memory than a device has"]
    least = min(c.memory.total for c in found.too_large)
    assert count == len(found.too_large) and f"{least / 2**30:.1f} of 15.8 GiB" in example
    roomy = plan.plan("llama3-8b", "v5e:4x4", 64, 8192)
    both = len(roomy.fitting), len(roomy.too_large)
    assert all(both) and all(c.memory.total <= roomy.usable for c in roomy.fitting)
    assert all(c.memory.total > roomy.usable for c in roomy.too_large)


REFUSED = {
    "kv_heads": (dict(tensor=8), {}, 64, 64, r"kv_heads=4 over 8 devices; 1, 2, 4 divide"),
    "heads": (dict(tensor=8), dict(heads=12, kv_heads=12), 64, 64, "kv_heads=12 over 8"),
    "vocab": (dict(tensor=4, data=2), dict(vocab=510), 64, 64, "vocab=510 over 4"),
    "mlp": (dict(tensor=4, data=2), dict(mlp=102), 64, 64, "mlp=102 over 4"),
    "no experts": (dict(expert=8), {}, 64, 64, "needs a mixture"),
    "experts": (dict(expert=8), dict(experts=4), 64, 64, "experts=4 over 8 devices; 1, 2, 4"),
    "layers": (dict(stage=8), dict(layers=7), 64, 64, "7 layers and 8 stages"),
    "latent": (dict(tensor=8), LATENT, 64, 64, "no formula here"),
    "rows": (dict(data=2, fsdp=4), {}, 12, 64, "rows=12 over 8 devices; 1, 2, 3, 4, 6, 12 divide"),
    "few rows": (dict(stage=4, data=2), {}, 4, 64, "2 rows on a device, of 4, and 4 stages"),
    "sequence": (dict(context=8), {}, 64, 24, "over 16 devices"),
    "tokens": (dict(tensor=4, context=2), {}, 64, 4, "tokens=2 over 4 devices"),
    "host": (dict(data=8, offload=True), {}, 64, 64, "computed from again; stages keep"),
    "products": (dict(data=8, products=True), {}, 64, 64, "no formula here"),
    "host, stages": (dict(data=4, stage=2, remat=True, offload=True), {}, 64, 64, "in slots"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_with_numbers_that_would_do(name):
    given_roles, changes, batch, sequence, told = REFUSED[name]
    config = dataclasses.replace(SMALL, **changes)
    each = roles.Roles(**given_roles)
    found = roles.refusal(each, config, CHIPS, batch, sequence)
    assert found is not None
    with pytest.raises(ValueError, match=told):
        raise ValueError(found.reason)


def test_slices_refuse_what_they_cut_unevenly():
    six = topology.chips("v5e:2x4", 6)
    found = roles.refusal(roles.Roles(data=4, fsdp=12), SMALL, six, 96, 64)
    assert found and "lies along 6 slices" in found.reason


@settings(max_examples=12)
@given(st.integers(2, 6), st.integers(0, 9))
def test_the_bubble_and_the_slots_are_those_of_the_schedule(p, more):
    m = p + more
    table = ticks(schedules.SCHEDULES["1f1b"](p, p, m))
    each = roles.Roles(stage=p, microbatches=m)
    config = dataclasses.replace(SMALL, layers=p)
    part = parts(each, config, arrays.of_decoder(config), m, LENGTH)[0]
    assert len(table.columns["kind"]) == sent.ticks(part)
    assert math.isclose(seconds.bubble(p, m), 1 - 3 * m / sent.ticks(part))
    assert table.slots == {"act": 1, "cot": 1, "kept": p, "pend": 1}


STAGED = {"kept": (False, {}), "remat": (True, {}), "remat, experts": (True, MIXED)}


@pytest.mark.parametrize("name", marked(STAGED, ["kept"]))
def test_what_stages_keep_is_what_the_program_keeps(name):
    """All arrays in slots but some numbers for each token, and counted for the last stage too."""
    again, mixed = STAGED[name]
    config = model.Config(
        vocab=512, embed=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp=256, **mixed,
        dtype=jnp.bfloat16,
    )  # fmt: skip
    each = roles.Roles(stage=2, fsdp=4, microbatches=4, remat=again)
    layout = compiling.layout_of(each, config, mesh.make(**each.sizes))
    program = compiling.program_of(each, config, 64, LENGTH)
    shapes = jax.eval_shape(program.create, KEY)
    found = gradients.program(layout, program.loss, program.has_aux, shapes, program.batch)
    buffers = found.buffers
    kept, pend = (int(np.dot(buffers[n].sizes, buffers[n].slots)) for n in ("kept", "pend"))
    part = parts(each, config, arrays.of_decoder(config), 64, LENGTH)[0]
    terms = memory.memory(part).terms
    held = kept + sum(sum(buffers[name].sizes) for name in ("act", "cot"))
    assert 0.95 < terms.kept / held < 1.05
    assert 0.95 < terms.pending / pend < 1.05
    assert sent.sends(part) == found.sends()
    (along,) = [s.bytes for s in sent.sent(part) if s.roles == ("stage",)]
    parts_of = layouts_sent.LayoutLedger(layout)
    parts_of.pipeline(layout.stage, *found.sends())
    assert math.isclose(along, sum(parts_of.values()))


def test_dense_layers_beside_experts_are_counted_each_by_itself():
    """Without latent attention, too; in FLOPs, in memory, and refused beside tensor."""
    sizes = dict(experts=8, capacity_factor=1.25, layers=3, mlp=32)
    config = dataclasses.replace(SMALL, **sizes, dense_layers=1, dense_mlp=2048)
    mixed, dense = (
        dataclasses.replace(SMALL, **sizes | changes)
        for changes in (dict(layers=2), dict(layers=1, mlp=2048, experts=0, capacity_factor=None))
    )
    head = 6 * SMALL.embed * SMALL.vocab * 2 * LENGTH
    apart = sum(plan.model_flops(c, 2, LENGTH) for c in (mixed, dense)) - head
    assert math.isclose(plan.model_flops(config, 2, LENGTH), apart)
    one = roles.Roles()
    part, *others = (
        parts(one, c, arrays.of_decoder(c), 2, LENGTH)[0] for c in (config, mixed, dense)
    )
    assert math.isclose(seconds.flops(part), sum(map(seconds.flops, others)) - head)
    layers = [memory.memory(x).terms.layer for x in others]
    assert memory.memory(part).terms.layer == max(layers) == layers[1]
    found = plan.plan(config, "v5e:2x4", 32, LENGTH)
    assert found.fitting and not any(c.roles.tensor > 1 for c in found.fitting)


@pytest.mark.parametrize("chunks, changes", [(1, {}), (8, {}), (1, LATENT)])
def test_flops_are_those_of_the_program(chunks, changes):
    """Of the step that is differentiated, with attention over all pairs; in chunks no more."""
    config = dataclasses.replace(SMALL, layers=2, scan=False, **changes)
    program = compiling.program_of(roles.Roles(context=8, loss_chunks=chunks), config, 2, 64)
    params = jax.eval_shape(program.create, KEY)
    step = jax.jit(jax.grad(lambda params, batch: program.loss(params, batch).total))
    counted = measure.flops(step.lower(params, program.batch).compile())
    expected = plan.model_flops(config, 2, 64, causal=False)
    assert abs(counted / expected - 1) < 0.02
    causal = plan.model_flops(config, 2, 64)
    entries = config.heads * (config.head_dim + config.depth)
    assert expected - causal == 6 * entries * 2 * 64**2


PACKED = dict(fsdp=2, context=4), dict(fsdp=4, stage=2, microbatches=2)


@pytest.mark.parametrize("sizes", PACKED, ids=str)
def test_documents_in_a_row_are_held_sent_and_counted(sizes):
    """MFU counts what each sees of itself, by numbers of pairs; a kernel of one document is out."""
    each, config = roles.Roles(**sizes), dataclasses.replace(SMALL, stages=sizes.get("stage", 1))
    layout = compiling.layout_of(each, config, mesh.make(**each.sizes))
    program = compiling.program_of(each, config, 32, LENGTH, packed=True)
    made = next(data.batches(32, LENGTH, packed=True))
    assert {n: (x.shape, x.dtype) for n, x in made.items()} == {
        n: (x.shape, x.dtype) for n, x in program.batch.items()
    }
    held = arrays.of_decoder(config)
    for part in parts(each, config, held, 32, LENGTH, packed=True):
        compare(part, layout, program, jax.eval_shape(program.create, KEY))
    if not layout.stage:
        counted = measure.collectives(lowered_by(layout, program)).ring_bytes
        assert math.isclose(sum(s.bytes for s in sent.sent(part)), counted)
    whole, apart = (plan.plan(config, "h100:8", 32, LENGTH, document=n) for n in (None, 4))
    pairs = 32 * (LENGTH**2 - LENGTH * 4) / 2
    entries = config.layers * config.heads * (config.head_dim + config.depth)
    assert whole.best[0].flops - apart.best[0].flops == 6 * entries * pairs
    assert whole.best[0].step == apart.best[0].step
    narrow = (dataclasses.replace(found, config=NARROW) for found in (whole, apart))
    assert [*map(compiling.kernel, narrow)] == ["cudnn", "tiles"]


SLOTS = {
    "expert, context": dict(expert=4, context=2),
    "context over experts": dict(expert=2, context=4),
    "context": dict(context=8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOTS)
def test_an_expert_has_the_slots_of_a_whole_row_on_each_part_of_it(name):
    """But no more than there are tokens: in what is sent, and in what is multiplied."""
    config = model.Config(
        vocab=64, embed=64, layers=2, heads=4, kv_heads=4, head_dim=8, mlp=512, experts=8,
        capacity_factor=1.25,
    )  # fmt: skip
    each = roles.Roles(**SLOTS[name])
    part = parts(each, config, arrays.of_decoder(config), 8, LENGTH)[0]
    layout = compiling.layout_of(each, config, mesh.make(**each.sizes))
    lowered = lowered_by(layout, compiling.program_of(each, config, 8, LENGTH))
    counted = measure.collectives(lowered).ring_bytes
    assert math.isclose(counted, sum(s.bytes for s in sent.sent(part)))
    counted = measure.flops(lowered.compile())
    assert 1 <= counted / seconds.flops(part) < 1.1  # attention's tiles, masked or not, besides


def lowered_by(layout, program):
    """The loss and gradients of a program under a layout, lowered for its parameters' places."""
    placed = jax.eval_shape(lambda key: layouts.place(layout, program.create(key)), KEY)
    function = layouts.value_and_grad(layout, program.loss, program.has_aux, check=False)
    return function.lower(placed, program.batch)


@pytest.mark.parametrize(
    "given_to, told",
    [
        (("llama9", "v5e:2x4", 8, 8), "known are llama3-8b, llama3-70b"),
        (("llama3-8b", "v5e:8", 8, 8), "2 axes; write its chips along each"),
        (("llama3-8b", "v5e:2x4", 0, 8), "batch=0; expected 1 or more"),
        (("llama3-8b", "v5e:2x4", 8, -1), "sequence=-1; expected 1 or more"),
        (("llama3-8b", "v5e:2x4", 8, 8, train.Optimizer(), 9), "document=9 .*; expected 1 to the"),
    ],
)
def test_a_mistake_is_named(given_to, told):
    with pytest.raises(ValueError, match=told):
        plan.plan(*given_to)


def test_the_compiler_is_given_the_kernel_where_devices_see_whole_sequences():
    """128 tokens are a tile of the splash kernel; cuDNN's takes 16 bits, and heads of up to 128; a
    context axis cuts the sequence.
    """
    devices = mesh.make(data=8)
    gpus, wide = topology.chips("h100:8"), dataclasses.replace(NARROW, head_dim=256)
    for chips, config, length, kernel in (
        (CHIPS, SMALL, 256, "splash"),
        (CHIPS, SMALL, 96, "tiles"),
        (gpus, SMALL, 256, "tiles"),
        (gpus, NARROW, 96, "cudnn"),
        (gpus, wide, 256, "tiles"),
    ):
        assert compiling.kernel(plan.Plan(config, chips, 8, length, (), (), ())) == kernel
    each = roles.Roles(data=8)
    assert compiling.layout_of(each, SMALL, devices).kernel is context.tiled
    made = compiling.layout_of(each, SMALL, devices, kernel="splash")
    assert isinstance(made.kernel, context.splash)
    cut = roles.Roles(fsdp=4, context=2), SMALL, mesh.make(fsdp=4, context=2), "splash"
    assert compiling.layout_of(*cut).kernel is None
    whole = plan.Plan(dataclasses.replace(SMALL, layers=2), CHIPS, 8, 128, (), (), ())
    _, lowered = compiling.lowered(each, whole)
    assert "splash_mha_fwd" in lowered.as_text()


@pytest.mark.parametrize("seed", marked(range(40), range(8)))
def test_what_the_compiler_inserts_sends_what_the_formula_says(seed):
    """One by one, and in all."""
    each, config, rows = drawn(300 + seed, staged=seed % 2 == 0)
    for part in parts(each, config, arrays.of_decoder(config), rows, LENGTH):
        found = sent.inserted(part)
        expected = sum(s.bytes for s in sent.sent(part) if s.roles == ("tensor",))
        assert math.isclose(sum(op.ring_bytes for op in found), expected)
        assert bool(found) == (each.tensor > 1)


KEEPS = {
    "plain": {},
    "gemma": dict(norms="both", qk_norm="head", tied=True, activation="gelu"),
    "olmo": dict(norms="after", qk_norm="heads", qkv_bias=True),
}


def with_products(name):
    """(the decoder, its part of a layout that computes all again, and of one but the products)."""
    config = dataclasses.replace(SMALL, mlp=512, dtype=jnp.bfloat16, **KEEPS[name])
    several = [roles.Roles(fsdp=8, remat=True, products=products) for products in (False, True)]
    held = arrays.of_decoder(config)
    return config, [parts(each, config, held, 32, LENGTH)[0] for each in several]


@pytest.mark.parametrize("name", marked(KEEPS, ["gemma", "olmo"]))
def test_products_that_are_kept_are_those_that_jax_keeps(name, monkeypatch):
    """To the byte, beside what enters layers."""
    config, both = with_products(name)
    config = dataclasses.replace(config, remat=True)
    program = compiling.program_of(roles.Roles(), config, 4, LENGTH)
    params, kept = jax.eval_shape(program.create, KEY), []
    for policy in ("nothing_saveable", "dots_with_no_batch_dims_saveable"):
        how = getattr(jax.checkpoint_policies, policy)
        monkeypatch.setattr(jax, "checkpoint", functools.partial(jax.checkpoint, policy=how))
        back = jax.eval_shape(
            lambda p, batch: jax.vjp(lambda p: program.loss(p, batch).total, p)[1],
            params,
            program.batch,
        )
        kept.append(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(back)))
        monkeypatch.undo()
    ours = [memory.memory(part).terms.kept for part in both]
    assert kept[1] - kept[0] == ours[1] - ours[0] > 0


def flops_of_fsdp(config, each):
    """Those of a compiled program with the layers' products kept, or with all computed again."""
    layout = compiling.layout_of(each, config, mesh.make(fsdp=8))
    program = compiling.program_of(roles.Roles(), config, 32, LENGTH)
    return measure.flops(lowered_by(layout, program).compile())


@pytest.mark.slow
@pytest.mark.parametrize("name", sample(KEEPS, 2))
def test_of_a_steps_products_that_are_kept_attentions_come_again(name):
    config, both = with_products(name)
    flops = [flops_of_fsdp(config, part.roles) for part in both]
    for part, counted in zip(both, flops, strict=True):
        assert 1 <= counted / seconds.flops(part) < 1.1  # tiles of attention that a mask hides
    assert flops[1] < 0.85 * flops[0]


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(1, 40_000), st.integers(64, 16_384))
def test_chunks_divide_a_row_and_are_no_smaller_than_asked(rows, length, embed):
    n, least = roles.chunks(rows, length, embed), max(3 * embed // 2, 1024)
    assert n in (1, 2, 4, 8) and length % n == 0 and (n == 1 or rows * length // n >= least)
    assert all(length % more or rows * length // more < least for more in (2, 4, 8) if more > n)


@pytest.mark.parametrize("chips", ["v5e:2x4", "h100:1x8"])
def test_losses_are_proposed_in_chunks_but_in_stages(chips):
    def proposed(**sizes):
        given = roles.Roles(**sizes), 64, topology.chips(chips), SMALL, 4096
        return {each.loss_chunks for each in roles.variants(*given)}

    assert proposed(fsdp=8) == {8, 4}  # four of one row
    assert proposed(stage=2, fsdp=4) == {1}


def test_a_layers_gradients_are_whole_along_fsdp_alone():
    """In bytes of the layer's weights as used: all, half where experts or latent attention are."""
    config = dataclasses.replace(SMALL, dtype=jnp.bfloat16)

    def whole(config, **sizes):
        held, each = arrays.of_decoder(config), roles.Roles(**sizes)
        return memory.memory(parts(each, config, held, 32, LENGTH)[0]).terms.whole

    stacked = [a for a in arrays.of_decoder(config).parameters if a.stacked]
    of_layer = 2 * sum(a.size // config.layers for a in stacked if len(a.shape) > 2)
    norms = 2 * sum(a.size // config.layers for a in stacked) - of_layer
    assert of_layer <= whole(config, fsdp=4) <= of_layer + norms
    assert whole(config, fsdp=4, microbatches=2) == whole(config, fsdp=4)
    assert whole(config, data=4) == whole(config, fsdp=2, tensor=2) == 0
    mixed = dataclasses.replace(config, experts=8, capacity_factor=1.25)
    of_experts = 2 * 3 * 8 * config.embed * config.mlp
    assert whole(mixed, fsdp=4) == of_experts / 2 and whole(mixed, fsdp=4, microbatches=2) == 0
