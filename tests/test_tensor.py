import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from shardwise import data, marks, measure, mesh, model, objective, rules, tensor

GRID = mesh.make(data=2, model=4)
CONFIG = model.Config(vocab=256, embed=24, layers=2, heads=8, kv_heads=4, head_dim=6, mlp=36)
ROWS, LENGTH = 6, 16  # of which a device along data has half


def gap(ours, theirs):
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    pairs = [(np.array(a), np.array(b)) for a, b in pairs]
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in pairs)


@functools.cache
def on_one(config):
    graphdef, params = nnx.split(nnx.jit(lambda: model.Decoder(config, nnx.Rngs(0)))())
    step = objective.value_and_grad(functools.partial(model.loss, graphdef=graphdef))
    batch = next(data.batches(ROWS, LENGTH))
    batch["mask"] = (np.arange(LENGTH) < [[3], [16], [0], [9], [16], [1]]).astype(np.float32)
    return step, params, batch, jax.jit(step)(params, batch)


def compiled(config=CONFIG, changes=None, **options):
    """A step laid out by the table and the pins: held to one device, and returned to be counted."""
    step, params, batch, expected = on_one(config)
    rule = rules.LogicalRules(tensor.table("model") | (changes or {}))
    pins = tensor.activations("model", rows="data", **options)
    given = dict(in_rules=(rule, P("data")), out_rules=(P(), rule), names=pins)
    run = rules.jit(step, GRID, **given).lower(params, batch).compile()
    placed = rules.place((params, batch), (rule, P("data")), GRID)
    assert gap(run(*placed), expected) < 1e-5
    return measure.collectives(run)


def bytes_by_compiler(found, size):
    """Those of activations of `size` bytes: in the loop over layers, and outside it."""
    arrays = [
        (op.trips, op.kind, op.arrays[0][1])
        for op in found.ops
        for _ in op.arrays
        if np.prod(op.arrays[0][1]) * 4 == size
    ]
    return [sum(trips == t for trips, *_ in arrays) for t in (CONFIG.layers, 1)]


def test_the_decoder_by_rules_equals_one_device_and_sums_what_the_formula_says():
    found = compiled()
    activation = ROWS // 2 * LENGTH * CONFIG.embed * 4
    # XLA for CPU sums q, k, v, and gate, up each by itself: 5 for Megatron's 2 on the way back.
    assert bytes_by_compiler(found, activation) == [7, 2]
    sent = tensor.bytes_sent(4, ROWS // 2, LENGTH, CONFIG.embed, CONFIG.layers)
    along_model = sum(op.ring_bytes for op in found.ops if op.group_size == 4)
    assert along_model == pytest.approx(sent.total - sent.layers + 7 / 4 * sent.layers)


def test_sequence_parallelism_by_rules_equals_one_device_and_gathers_no_weight():
    found = compiled(sequence=True)
    assert "all-to-all" not in found
    inside = [op.arrays[0][1] for op in found.ops if op.kind == "all-gather" and op.trips == 2]
    assert inside == [(ROWS // 2, LENGTH // 4, CONFIG.embed)] * 4  # two each way


@pytest.mark.slow
def test_kv_heads_that_do_not_divide_may_stay_whole():
    few = model.Config(**{**vars(CONFIG), "kv_heads": 2})
    compiled(few, {"kv_heads": None})


def test_what_does_not_divide_is_an_error_with_the_numbers_that_would_do():
    sizes = {"heads": 12, "kv_heads": 12, "mlp": 36, "vocab": 60, "embed": 7}
    tensor.check("model", 4, sizes)
    with pytest.raises(ValueError, match=r"kv_heads=2 .* 4 devices along 'model'.*: 1, 2 divide"):
        tensor.check("model", 4, sizes | {"kv_heads": 2})
    with pytest.raises(ValueError, match=r"sequence=30 .* multiple of 4.*: 1, 2, 3 divide all of"):
        tensor.check("model", 4, sizes, length=30)
    with pytest.raises(ValueError, match=r"vocab=60 does not divide over 8.*: 1, 2, 3, 4, 6 div"):
        tensor.check("model", 8, sizes | {"mlp": 48})


def test_a_logical_axis_that_the_table_lacks_is_asked_for():
    rule = rules.LogicalRules(tensor.table("model"), names={"w": ("embed", "experts")})
    with pytest.raises(ValueError, match="no rule for 'experts'"):
        rule({"w": jnp.zeros((4, 4))}, GRID)


def test_specs_of_activations_name_each_axis_once():
    plain = tensor.activations("model", rows=("data", "fsdp"), context="context")
    assert plain["mlp_output"] == P(("data", "fsdp"), "context")
    assert plain["logits"] == P(("data", "fsdp"), "context", "model")
    cut = tensor.activations("model", rows="fsdp", context="context", sequence=True)
    assert cut["mlp_output"] == P("fsdp", ("context", "model"))
    assert cut["mlp_input"] == P("fsdp", "context")
    assert cut["attended"] == P("fsdp", "context", "model")
    assert tensor.activations("model", sequence=True)["mlp_output"] == P(None, "model")


@jax.custom_vjp
def enter(x):
    return x


enter.defvjp(lambda x: (x, None), lambda _, g: (jax.lax.psum(g, "model"),))


@jax.custom_vjp
def leave(x):
    return jax.lax.psum(x, "model")


leave.defvjp(lambda x: (leave(x), None), lambda _, g: (g,))


def gather(x):
    return jax.lax.all_gather(x, "model", axis=1, tiled=True)


def scatter(x):
    return jax.lax.psum_scatter(x, "model", scatter_dimension=1, tiled=True)


FORMS = {
    "plain": ((enter, leave), {}),
    "sequence": ((gather, scatter), {"sequence": True}),
    "again": ((gather, scatter), {"sequence": True, "gathers_again": True}),
}


def by_hand(form, graphdef, places):
    """A layer's loss and gradients on n devices, its four sums written out."""
    before, after = FORMS[form][0]

    def then(f, g):
        return lambda *args: g(f(*args))

    def layer(weights, x):
        block = nnx.merge(graphdef, weights)
        block.attention_norm = then(block.attention_norm, before)
        block.mlp_norm = then(block.mlp_norm, before)
        block.o, block.down = then(block.o, after), then(block.down, after)
        return block(x, None, places)

    if form == "again":
        layer = jax.checkpoint(layer, policy=lambda kind, *_, **__: kind.name != "all_gather")

    def run(weights, x, y):
        def loss(weights, x):
            return jnp.sum(layer(weights, x) * y)

        value, (grads, back) = jax.value_and_grad(loss, (0, 1))(weights, x)
        if form != "plain":
            norms = ("attention_norm", "mlp_norm")
            for name in norms:
                grads[name]["scale"][...] = jax.lax.psum(grads[name]["scale"][...], "model")
            value = jax.lax.psum(value, "model")
        return value, grads, back

    return run


@pytest.mark.parametrize("form", FORMS)
@given(draw=st.data())
@settings(max_examples=2, phases=[hypothesis.Phase.generate])  # each compiles
def test_a_layer_by_hand_sends_the_formulas_bytes(form, draw):
    n = draw.draw(st.sampled_from([2, 3, 4]))
    pick = functools.partial(lambda low, high: draw.draw(st.integers(low, high)))
    kv_heads = n * pick(1, 2)
    config = model.Config(
        embed=pick(3, 9), heads=kv_heads * pick(1, 2), kv_heads=kv_heads, head_dim=2, mlp=n
    )
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: model.Block(config, nnx.Rngs(0))))
    normal = np.random.default_rng(0).normal  # of jax.random each shape would compile
    weights = jax.tree.map(lambda x: normal(size=x.shape).astype("f"), shapes)
    rows, length = pick(1, 3), n * pick(1, 3)
    x, y = normal(size=(2, rows, length, config.embed)).astype("f")
    grid, options = mesh.make(model=n), FORMS[form][1]
    specs = rules.LogicalRules(tensor.table("model"))(weights, grid)
    tokens = P(None, "model") if options else P()
    run = jax.shard_map(
        by_hand(form, graphdef, marks.places(None, rows, length)),
        mesh=grid,
        in_specs=(specs, tokens, tokens),
        out_specs=(P(), specs, tokens),
        check_vma=False,
    )
    program = jax.jit(run).lower(weights, x, y)

    def on_one(weights, x):
        return jnp.sum(nnx.merge(graphdef, weights)(x) * y)

    value, (grads, back) = jax.jit(jax.value_and_grad(on_one, (0, 1)))(weights, x)
    assert gap(program.compile()(weights, x, y), (value, grads, back)) < 1e-4
    sent = tensor.bytes_sent(n, rows, length, config.embed, 1, **options)
    found = measure.collectives(program)
    assert found.dynamic == {"plain": 4, "sequence": 8 + 3, "again": 10 + 3}[form]
    loss, final = 2 * 4 * (n - 1) / n, 2 * config.embed * 4 * (n - 1) / n
    extra = loss - final if options else 0  # a layer has two norms, the formula counts the last
    assert found.ring_bytes == pytest.approx(sent.layers + sent.norms + extra)
