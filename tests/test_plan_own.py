"""`plan.own`: a stranger's model, loss and optimizer, by formula, by trace, and by the compiler."""

import dataclasses
import functools
import importlib.util

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardwise import context, layouts, marks, mesh, model, objective, plan, topology, train
from shardwise.layouts.placing import array_layouts
from shardwise.plan import compiling, notes, tables
from shardwise.plan.own import Own, candidate
from shardwise.plan.roles import layout_on
from shardwise.topology import gpu

mesh.simulate(8)
ROWS, WIDE, HIDDEN = 64, 128, 256
AGAIN = jax.checkpoint_policies.nothing_saveable
KEPT = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


def create(key):
    draw = jax.random.normal(key, (WIDE, HIDDEN)) / 8
    return {"into": draw, "out": draw.T * 2, "bias": jnp.zeros(HIDDEN)}


def loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["into"] + params["bias"][None])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


def batch(rows=ROWS):
    x = jax.ShapeDtypeStruct((rows, WIDE), jnp.float32)
    return {"x": x, "y": x}


@functools.cache
def usual():
    return own()


def own(chips="v5e:2x4", given=None, **settings):
    given = batch() if given is None else given
    return plan.own(create, loss, optax.adam(1e-2), chips, given, **settings)


EIGHT = topology.chips("v5e:2x4")


def on_eight(create, loss, tx, batch, has_aux=False, each=None, **settings):
    """(the program, its candidate of one layout on eight chips): the others need not be traced."""
    job = Own(create, loss, tx, batch, has_aux, settings)
    return job, candidate(job, each or plan.Roles(fsdp=8), EIGHT)


def test_memory_of_two_products_is_the_count():
    """What tanh gave, and its slope's factor; what is left of y, twice, and the weights used."""
    found = {(c.roles.fsdp, c.roles.microbatches): c for c in usual().fitting}
    assert {n for n, _ in found} == {1, 2, 4, 8} and {m for _, m in found} == {1, 2, 4, 8}
    size, rows = 4 * (2 * WIDE * HIDDEN + HIDDEN), ROWS // 8
    for n in (1, 8):
        held = found[n, 1].memory
        assert (held.parameters, held.state) == (size // n, 2 * size // n + 4)
        assert held.batch == 2 * 4 * rows * WIDE
    cut, whole = found[8, 1].memory.terms, found[1, 1].memory.terms
    # Of the weights the backward pass needs the last alone: x has no gradient.
    assert cut.kept - whole.kept == 4 * WIDE * HIDDEN
    assert 4 * rows * (HIDDEN + WIDE) <= whole.kept <= 4 * rows * 2 * (HIDDEN + WIDE)
    assert whole.logits == 4 * rows * HIDDEN  # the gradient of tanh's: a product needs both
    assert whole.gradients == size and whole.summed == 0
    assert found[1, 4].memory.terms.summed == size
    assert found[1, 4].memory.terms.kept == whole.kept // 4


def test_parameters_that_the_optimizer_freezes_have_no_state():
    kinds = {"into": "freeze", "out": "train", "bias": "train"}
    each = {"train": optax.adam(1e-2), "freeze": optax.set_to_zero()}
    _, frozen = on_eight(create, loss, optax.multi_transform(each, kinds), batch())
    _, usual = on_eight(create, loss, optax.adam(1e-2), batch())
    assert frozen.memory.parameters == usual.memory.parameters
    assert usual.memory.state - frozen.memory.state == 2 * 4 * WIDE * HIDDEN // 8


def test_seconds_are_those_of_the_products():
    step = usual().fitting[0].step
    chip = topology.chips("v5e:2x4").chip
    products = 5 * 2 * ROWS * WIDE * HIDDEN  # two forward, two for weights, one for what is between
    assert step.arithmetic == pytest.approx(products / 8 / chip.peak("bfloat16"))
    assert usual().fitting[0].flops == products and usual().fitting[0].mfu_bound <= 1


def test_what_is_summed_along_fsdp_is_told_from_weights():
    """The gradient of an array that no axis divides, and the loss."""

    def scaled(params, batch):
        return loss(params, batch) * jnp.sum(params["scale"])

    def more(key):
        return create(key) | {"scale": jnp.ones(3)}

    _, c = on_eight(more, scaled, optax.adam(1e-2), batch())
    size, passed = 2 * WIDE * HIDDEN + HIDDEN, 2 * 4 * 7 / 8
    assert {(s.roles, s.kind): s.bytes for s in c.sent} == {
        (("fsdp",), "weights"): size * passed,
        (("fsdp",), "gradients"): 3 * passed,
        (("fsdp",), "loss"): 2 * passed,
    }


def test_weights_in_another_dtype_are_kept_in_it():
    wide = next(c for c in usual().fitting if c.roles.fsdp == 8 and c.roles.microbatches == 1)
    _, narrow = on_eight(create, loss, optax.adam(1e-2), batch(), dtype=jnp.bfloat16)
    assert wide.memory.parameters == narrow.memory.parameters
    assert narrow.memory.terms.kept < wide.memory.terms.kept
    sent = [sum(s.bytes for s in c.sent if s.kind == "weights") for c in (wide, narrow)]
    assert sent[0] / sent[1] == pytest.approx(2, rel=0.01)


def test_what_waits_on_the_host_is_not_planned():
    config = model.Config(vocab=256, embed=64, layers=2, heads=4, kv_heads=4, head_dim=16, mlp=128)
    program = compiling.program_of(plan.Roles(), config, 16, 64)
    job = program.create, program.loss, train.optimizer()
    with pytest.raises(ValueError, match="moves arrays to the host"):
        plan.own(*job, "v5e:2x4", program.batch, remat=layouts.offload)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_of_the_books_decoder_it_is_the_planners(remat):
    """State and bytes sent; products but for what no formula of products has."""
    config = model.Config(vocab=256, embed=64, layers=2, heads=4, kv_heads=4, head_dim=16, mlp=128)
    known = plan.plan(config, "v5e:2x2", 8, 64)
    program = compiling.program_of(plan.Roles(remat=remat, loss_chunks=8), config, 8, 64)
    job = program.create, program.loss, train.optimizer()
    given = dict(kernel=context.tiled, remat=AGAIN if remat else None)
    found = {c.roles: c for c in plan.own(*job, "v5e:2x2", program.batch, **given).fitting}
    seen = 0
    assert len(found) == 6  # three divisions, in one microbatch or two
    for c in known.fitting:
        if c.roles.offload or c.roles.products:
            continue
        if c.roles.remat == remat and not set(c.roles.sizes) - {"data", "fsdp"}:
            ours = found[dataclasses.replace(c.roles, remat=False, loss_chunks=1)]
            assert ours.memory.parameters == c.memory.parameters
            assert ours.memory.state == c.memory.state
            by_axes = [{s.roles: 0.0 for s in p.sent} for p in (ours, c)]
            for total, p in zip(by_axes, (ours, c), strict=True):
                for s in p.sent:
                    total[s.roles] += s.bytes
            assert by_axes[0] == pytest.approx(by_axes[1])
            seen += 1
    assert seen == len(found)


def test_what_a_setting_does_again_is_counted():
    """A forward pass more, of the layers: by the setting as by the loss's own checkpoint."""
    alone, of_loss, of_setting = (
        Own(stacked, loss, optax.sgd(1e-2), batch(), settings=settings).flops
        for loss, settings in (
            (through, {}),
            (functools.partial(through, checkpoint=jax.checkpoint), {}),
            (through, dict(remat=AGAIN)),
        )
    )
    forward = 3 * 2 * WIDE**2
    assert of_loss == of_setting == alone + forward


def stacked(key):
    return {"layers": jax.random.normal(key, (3, WIDE, WIDE)) / 8}


def through(params, batch, checkpoint=lambda body: body):
    """The loss of three layers in a scan, each the last thing that its checkpoint keeps."""

    def layer(x, w):
        return jnp.tanh(jnp.tanh(x @ marks.use(w)) * 2), None

    x = jax.lax.scan(checkpoint(marks.layer(layer)), batch["x"], params["layers"])[0]
    return jnp.mean((x - batch["y"]) ** 2)


class Mixer(nn.Module):
    """A block of an MLP-Mixer in Linen, with dropout left out and a norm."""

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(16)(nn.gelu(nn.Dense(32)(jnp.swapaxes(nn.LayerNorm()(x), 1, 2))))
        x = x + jnp.swapaxes(y, 1, 2)
        return nn.Dense(10)(x.mean(1))


def images():
    pixels = jax.ShapeDtypeStruct((8, 16, 48), jnp.uint8)
    return {"patches": pixels, "label": jax.ShapeDtypeStruct((8,), jnp.int32)}


def classify(params, batch):
    logits = Mixer().apply(params, batch["patches"] / 255)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return objective.Mean(each.sum(), jnp.float32(each.size)), {"right": jnp.sum(each)}


def mixer():
    make = lambda key: Mixer().init(key, jnp.zeros((1, 16, 48)))  # noqa: E731
    return make, classify, optax.adamw(1e-3)


def test_a_strangers_module_has_a_plan_to_read():
    given = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), images())  # of arrays, the shapes
    found = plan.own(*mixer(), "v5e:2x4", given, has_aux=True)
    assert {c.roles.fsdp for c in found.fitting} == {1, 2, 4, 8}
    told = plan.text(found, top=4)
    assert told.startswith("8 rows on")
    assert notes.NOTES_OF_OWN[0] in told and tables.of_plan(found, 2)["sequence"] is None


def test_a_loss_that_keeps_less_is_no_rematerialised_layer():
    """By either loss the logits are kept once, and the backward pass begins with their gradient."""

    def plans(entropy):
        def loss(params, batch):
            logits = batch["x"] @ params["w"] @ params["v"]
            return entropy(logits, batch["y"]).mean()

        def create(key):
            return {"w": jax.random.normal(key, (64, 32)), "v": jax.random.normal(key, (32, 4096))}

        rows = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        shapes = {"x": rows, "y": jax.ShapeDtypeStruct((64,), jnp.int32)}
        each = plan.Roles(data=8)
        return on_eight(create, loss, optax.sgd(1e-3), shapes, each=each)[1].memory.terms

    indexed = plans(optax.softmax_cross_entropy_with_integer_labels)
    compared = plans(model.cross_entropy)
    assert compared.logits == indexed.logits == 0  # it takes their place: no product needs them
    assert compared.layer == 0 and compared.kept == pytest.approx(indexed.kept, rel=0.05)


def test_rows_that_do_not_divide_are_left_out_with_the_reason():
    found = own("v5e:4x4", batch(24))
    assert not found.fitting and found.why_not
    assert "24" in str(found.why_not)


@pytest.mark.parametrize(
    "change, told",
    [
        ({"tensor": "model"}, "tensor= is no setting here; min_size, stacked"),
        ({"given": {"x": jnp.zeros((4, 2)), "y": jnp.zeros((5, 2))}}, "has x 4, y 5"),
        ({"given": {"x": jnp.zeros(())}}, "has x 0"),
        ({"given": {}}, "the batch has none"),
        ({"chips": "v5e"}, "v5e"),
    ],
)
def test_what_cannot_be_planned_is_said(change, told):
    with pytest.raises(ValueError, match=told):
        own(**change)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
def test_the_compiler_is_asked_as_for_the_decoder():
    job, chosen = on_eight(*mixer(), images(), has_aux=True)
    said = compiling.check(chosen, plan.Plan(None, EIGHT, job.rows, None, own=job))
    assert said.fit
    ours = sum(s.bytes for s in chosen.sent)
    assert said.lowered == ours + 2 * 4 * 7 / 8  # aux is one number, summed over devices
    assert sum(d.written for d in said.differences.values()) == pytest.approx(said.lowered)


def test_layers_done_again_keep_less_and_gather_twice():
    """By the loss's own checkpoint, and by a layout's policy for what it marks."""

    def cost(checkpoint=lambda body: body, **settings):
        loss = functools.partial(through, checkpoint=checkpoint)
        told = stacked, loss, optax.sgd(1e-2), batch()
        _, c = on_eight(*told, stacked=lambda path: True, **settings)
        return c.memory.terms.kept, sum(s.bytes for s in c.sent if s.kind == "weights")

    kept, sent = cost()
    for again in (cost(jax.checkpoint), cost(remat=jax.checkpoint_policies.nothing_saveable)):
        assert again[0] <= kept - 3 * 4 * WIDE * (WIDE + ROWS // 8)  # weights, and a tanh's slope
        assert again[1] / sent == pytest.approx(3 / 2, rel=0.01)


class Block(nn.Module):
    """A transformer's, of Flax's own parts."""

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(4)(y, y)
        return x + nn.Dense(WIDE)(nn.gelu(nn.Dense(4 * WIDE)(nn.LayerNorm()(x))))


def unrolled(layers=3, wrap=lambda block: block, tokens=256, rows=ROWS):
    """The program of so many of them, which no scan holds."""
    stack = nn.Sequential([nn.Dense(WIDE), *(wrap(Block)() for _ in range(layers)), nn.Dense(512)])

    def likelihood(params, batch):
        logits = stack.apply(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    given = {
        "x": jax.ShapeDtypeStruct((rows, tokens, WIDE), jnp.float32),
        "y": jax.ShapeDtypeStruct((rows, tokens), jnp.int32),
    }
    make = lambda key: stack.init(key, jnp.zeros((1, tokens, WIDE)))  # noqa: E731
    return Own(make, likelihood, optax.adamw(1e-3), given)


def kept_of_eight(job):
    """What a device keeps where fsdp cuts the parameters over eight."""
    layout = layout_on(EIGHT.mesh(fsdp=8).abstract, plan.Roles(fsdp=8))
    return job.kept(array_layouts(layout, job.params), job.rows // 8)


def test_layers_outside_of_a_scan_keep_their_scores_once():
    tokens, rows = 256, 1
    kept = [kept_of_eight(unrolled(layers=n, rows=8)).kept for n in (2, 3)]
    scores, token = 4 * rows * 4 * tokens**2, 4 * rows * tokens
    products = token * (3 * WIDE + WIDE + WIDE + 4 * WIDE + WIDE)  # q, k, v; sums; out; up; down
    of_weights = 4 * 12 * WIDE**2
    assert 0.8 <= (kept[1] - kept[0]) / (scores + products + of_weights) <= 1.2


def test_a_layer_done_again_stands_beside_all_that_is_kept():
    """However many there are, and by a setting or the loss's own checkpoint."""

    def needed(layers, checkpoint=lambda body: body, **settings):
        create = lambda key: {"layers": jax.random.normal(key, (layers, WIDE, WIDE))}  # noqa: E731
        loss = functools.partial(through, checkpoint=checkpoint)
        return kept_of_eight(Own(create, loss, optax.sgd(1e-2), batch(), settings=settings))

    for how in (dict(remat=AGAIN), dict(checkpoint=jax.checkpoint)):
        few, many = (needed(n, **how) for n in (4, 64))
        entered, gathered = WIDE * ROWS // 8, WIDE**2  # of each layer
        assert many.kept - few.kept == 60 * 4 * (entered + gathered)
        assert few.layer == many.layer >= 2 * 4 * WIDE * ROWS // 8


@pytest.mark.slow
def test_layers_done_again_need_one_at_a_time():
    usual, again = (kept_of_eight(unrolled(wrap=wrap)) for wrap in (lambda b: b, nn.remat))
    assert again.kept < usual.kept / 3
    assert again.layer > (usual.kept - again.kept) / 4  # one of three, and more


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
def test_of_layers_outside_of_a_scan_it_is_near_the_compilers():
    """Large enough that what is kept does not lie in the chip's own memory, VMEM."""
    job = unrolled(layers=2, tokens=1024)
    chosen = candidate(job, plan.Roles(fsdp=8), EIGHT)
    needed = compiling.check(chosen, plan.Plan(None, EIGHT, job.rows, None, own=job)).fit.needed
    assert 0.8 <= chosen.memory.total / needed <= 1.2


def test_on_gpus_all_that_jax_keeps_is_asked_to_fit():
    """The least is as on TPUs, but for the sum of microbatches."""
    tpus, gpus = (
        {c.roles: c.memory for c in own(chips).fitting} for chips in ("v5e:2x4", "h100:8")
    )
    assert tpus.keys() == gpus.keys() and all(m.most == m.total for m in tpus.values())
    for each, m in gpus.items():
        more = 0.5 * m.terms.summed if each.microbatches > 1 else 0
        assert m.total == tpus[each].total + more
        t, held = m.terms, m.parameters + m.state + m.batch
        at_once = t.kept + t.gradients + t.layer + t.logits + 1.5 * t.summed
        assert m.most >= 1.02 * (held + at_once) > m.total

    def waves(params, batch):
        return jnp.mean((jnp.sin(batch["x"] @ params["into"]) @ params["out"] - batch["y"]) ** 2)

    job = Own(create, waves, optax.adam(1e-2), batch())
    t = candidate(job, plan.Roles(fsdp=8), topology.chips("h100:8")).memory.terms
    wave = 4 * HIDDEN * ROWS // 8  # of sine and cosine JAX keeps both, and one can be made again
    gathered = 4 * WIDE * HIDDEN  # the largest that is kept, whose gradient may be there too
    assert t.beside == t.gradients + t.layer + wave + gathered


@pytest.mark.slow
@pytest.mark.skipif(not gpu.folder().exists(), reason="needs XLA's compiler for GPUs")
def test_on_gpus_what_the_compiler_needs_lies_between():
    job, chips = unrolled(layers=2, tokens=1024), topology.chips("h100:8")
    chosen = candidate(job, plan.Roles(fsdp=8), chips)
    needed = compiling.check(chosen, plan.Plan(None, chips, job.rows, None, own=job)).fit.needed
    assert chosen.memory.total < needed < chosen.memory.most


def test_a_loss_in_chunks_needs_one_chunk_s_logits_the_head_and_no_flops():
    sizes = dict(embed=64, layers=2, heads=4, kv_heads=4, head_dim=16, mlp=128)
    config, found = model.Config(vocab=32_768, **sizes), {}
    for chunks in (1, 2, 8):
        program = compiling.program_of(plan.Roles(loss_chunks=chunks), config, 32, 512)
        job = program.create, program.loss, train.optimizer()
        given = dict(kernel=context.tiled, remat=None)
        every = plan.own(*job, "v5e:2x2", program.batch, **given).fitting
        (found[chunks],) = (c for c in every if c.roles == plan.Roles(fsdp=4))
    assert len({c.flops for c in found.values()}) == 1
    logits, head = 32 * 512 // 4 * config.vocab * 4, 64 * config.vocab * 4  # gathered
    for chunks in (2, 8):
        least = found[chunks].memory
        assert least.terms.logits >= logits / chunks + head and least.total < found[1].memory.total
    assert found[2].memory.total - found[8].memory.total > 0.9 * (logits / 2 - logits / 8)


def test_marked_layers_are_recomputed_where_no_setting_says_how():
    """In whole or but for products, each as the setting of that policy has it."""
    job = stacked, through, optax.sgd(1e-2), "v5e:2x2", batch()
    found = plan.own(*job)
    every = {c.roles: c for c in found.fitting if c.roles.fsdp == 4}
    ways = {None: {}, AGAIN: dict(remat=True), KEPT: dict(remat=True, products=True)}
    for policy, sizes in ways.items():
        with_setting = plan.own(*job, remat=policy)
        for c in (c for c in with_setting.fitting if c.roles.fsdp == 4):
            same = every.pop(dataclasses.replace(c.roles, **sizes))
            assert (same.memory, same.sent, same.flops) == (c.memory, c.sent, c.flops)
            assert same.step.arithmetic == c.step.arithmetic
            programs = (
                compiling.lowered(x.roles, p)[1] for x, p in ((same, found), (c, with_setting))
            )
            assert len({program.as_text() for program in programs}) == 1
    assert not every


def test_a_layout_is_told_as_code():
    """With names of the settings that were given, which are the caller's."""
    given = plan.own(stacked, through, optax.sgd(1e-2), "v5e:2x2", batch(), dtype=jnp.bfloat16)
    names = dict(jax=jax, layouts=layouts, mesh=mesh)
    for c in given.best:
        expected = layout_on(
            mesh.make(**c.roles.axes), c.roles, **given.own.under(c.roles).settings
        )
        told = compiling.code(c.roles, given)
        assert told.endswith("  # with dtype=")
        assert dataclasses.replace(eval(told, names), dtype=jnp.bfloat16) == expected
        assert told in tables.text(dataclasses.replace(given, fitting=(c,)), 1)
