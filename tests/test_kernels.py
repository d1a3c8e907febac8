"""Attention by Pallas' splash kernel, interpreted: alone, and where a layout's devices run it."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sampling import IN_FULL, sample

from shardwise import context, layouts, marks, measure, mesh, model, objective, topology

SPLASH = context.splash(block=128, interpret=True)
CONFIG = model.Config(layers=2, embed=32, heads=8, kv_heads=4, head_dim=8, mlp=32, vocab=64)
KEY = jax.random.key(0)


def arrays(rows, size, heads, kv_heads, depth, dtype=jnp.float32):
    """(q, k, v, what weighs the output, places of packed documents)."""
    keys = jax.random.split(KEY, 5)
    depth, width = depth if isinstance(depth, tuple) else (depth, depth)
    shapes = (heads, depth), (kv_heads, depth), (kv_heads, width), (heads, width)
    pairs = zip(keys, shapes, strict=False)
    found = [jax.random.normal(k, (rows, size, *last), dtype) for k, last in pairs]
    documents = jnp.sort(jax.random.randint(keys[4], (rows, size), 0, 4), axis=1)
    return *found, marks.places({"documents": documents}, rows, size)


@pytest.mark.parametrize(
    "shape, dtype, tolerance",
    [
        ((2, 256, 4, 2, (144, 24)), jnp.float32, 2e-6),
        pytest.param((1, 384, 3, 1, 128), jnp.bfloat16, 2e-2, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_is_attention(shape, dtype, tolerance):
    q, k, v, weights, places = arrays(*shape, dtype)

    @functools.partial(jax.jit, static_argnums=0)
    def both(attend, q, k, v):
        def total(q, k, v):
            out = attend(q, k, v, places)
            return jnp.sum((out * weights).astype(jnp.float32)), out

        return jax.value_and_grad(total, (0, 1, 2), has_aux=True)(q, k, v)

    ours, theirs = both(SPLASH, q, k, v), both(marks.attend, q, k, v)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=tolerance * (1 + np.abs(b).max()))


def test_a_sequence_in_another_order_is_not_a_number():
    q, k, v, _, places = arrays(2, 128, 2, 2, 8)
    places = places._replace(index=places.index.at[1].set(places.index[1, ::-1]))
    out = SPLASH(q, k, v, places)
    assert jnp.isfinite(out[0]).all() and jnp.isnan(out[1]).all()


def test_cudnn_takes_no_values_of_another_size():
    q, k, v, _, places = arrays(2, 96, 4, 2, (24, 16), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"v have 16 entries and those of k 24.*context\.tiled"):
        context.cudnn()(q, k, v, places)


@pytest.mark.parametrize("documents", [False, True])
def test_cudnn_is_attention_to_rows_of_one_document(documents):
    """By XLA in its place, since its kernel is for GPUs; rows of several documents are NaN."""
    q, k, v, weights, packed = arrays(2, 96, 4, 2, 24)
    attend, places = context.cudnn("xla"), packed if documents else marks.places(None, 2, 96)

    def total(attend, *given):
        return jnp.sum(attend(*given, places) * weights)

    ours, theirs = (
        jax.jit(jax.value_and_grad(functools.partial(total, each), (0, 1, 2)))(q, k, v)
        for each in (attend, marks.attend)
    )
    if documents:
        assert jnp.isnan(attend(q, k, v, places)).all() and jnp.isnan(ours[0])
        return
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * (1 + np.abs(b).max()))
    turned = places._replace(index=places.index.at[1].set(places.index[1, ::-1]))
    out = attend(q, k, v, turned)
    assert jnp.isfinite(out[0]).all() and jnp.isnan(out[1]).all()


def near(query, key):
    return marks.causal(query, key) & (query.index - key.index < 8)


@pytest.mark.parametrize(
    "size, mask, told",
    [
        (128, near, "the mask 'near'.*knows marks.causal alone"),
        (100, marks.causal, "a sequence of 100 tokens is no multiple of 128.*pad it to 128"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(size, mask, told):
    q, k, v, _, places = arrays(1, size, 2, 2, 8)
    with pytest.raises(ValueError, match=told):
        SPLASH(q, k, v, places, mask)


def test_what_cudnn_cannot_do_is_refused():
    q, k, v, _, places = arrays(1, 128, 2, 2, 8)
    with pytest.raises(ValueError, match="cudnn: the mask 'near'"):
        context.cudnn()(q, k, v, places, near)
    with pytest.raises(ValueError, match="q is float32, and the kernel computes in bfloat16"):
        context.cudnn()(q, k, v, places)


@functools.cache
def parts(stages=1):
    """(the loss, what creates the parameters, a batch of packed documents)."""
    config = dataclasses.replace(CONFIG, stages=stages)
    graphdef = nnx.split(nnx.eval_shape(lambda: model.Decoder(config, nnx.Rngs(0))))[0]
    rng = np.random.default_rng(5)
    batch = {name: rng.integers(0, 64, (8, 128)) for name in ("tokens", "targets")}
    batch["mask"] = (rng.random((8, 128)) < 0.8).astype(np.float32)
    batch["documents"] = np.sort(rng.integers(0, 3, (8, 128)), axis=1)

    def create(key):
        return nnx.state(model.Decoder(config, nnx.Rngs(params=key)))

    return functools.partial(model.loss, graphdef=graphdef), create, batch


@functools.cache
def one_device():
    loss, create, batch = parts()
    return jax.jit(objective.value_and_grad(loss))(jax.jit(create)(KEY), batch)


LAYOUTS = {
    "fsdp": dict(data=2, fsdp=4),
    "fsdp, tensor": dict(fsdp=4, tensor=2),
    "fsdp, tensor by compiler": dict(fsdp=4, tensor=2, by="compiler"),
    "ulysses": dict(context=2, tensor=2, data=2, attention="ulysses"),
    "stage, fsdp": dict(stage=2, fsdp=4, microbatches=2),
    "stage, tensor": dict(stage=2, tensor=4, microbatches=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sample(LAYOUTS, 2))
def test_under_a_layout_it_is_one_device(name):
    asked = LAYOUTS[name]
    sizes = {k: v for k, v in asked.items() if k in ("stage", "data", "fsdp", "context", "tensor")}
    settings = {k: v for k, v in asked.items() if k not in sizes} | {k: k for k in sizes}
    layout = layouts.Layout(mesh.make(**sizes), kernel=SPLASH, **settings)
    loss, create, batch = parts(layout.size("stage"))
    params, _ = layouts.init(layout, create, optax.sgd(0.1), KEY)
    mean, grads = layouts.value_and_grad(layout, loss)(params, batch)
    expected, theirs = one_device()
    np.testing.assert_allclose(mean, expected, rtol=2e-6)
    ours = layouts.whole(layout, grads)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6 * (1 + np.abs(b).max()))


@pytest.mark.parametrize("by", ["hand", "compiler"])
@pytest.mark.parametrize("sizes", [dict(fsdp=8), dict(fsdp=4, tensor=2)], ids=str)
def test_a_kernel_sees_the_rows_and_heads_of_its_device(sizes, by):
    seen = set()

    def kernel(q, k, v, places, mask):
        seen.update(x.shape for x in (q, k, v))
        return v

    def loss(params, batch):
        x = params["w"][None, None, :, None] * batch["x"]
        return jnp.mean(marks.attend(x, x, x, marks.places(None, *x.shape[:2])))

    heads = dict(tensor="tensor", over=P("tensor")) if "tensor" in sizes else {}
    layout = layouts.Layout(mesh.make(**sizes), fsdp="fsdp", by=by, kernel=kernel, **heads)
    x = np.random.default_rng(0).normal(size=(16, 3, 4, 2)).astype(np.float32)
    placed = layouts.place(layout, {"w": jnp.ones(4)})
    function = layouts.value_and_grad(layout, loss, check=False)  # a check tries other shapes
    mean, grads = function(placed, {"x": x})
    assert seen == {(16 // sizes["fsdp"], 3, 4 // sizes.get("tensor", 1), 2)}
    np.testing.assert_allclose(mean, x.mean(), atol=1e-6)
    np.testing.assert_allclose(layouts.whole(layout, grads)["w"], x.mean((0, 1, 3)) / 4, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"attention": "ulysses", "by": "compiler"}])
def test_a_kernel_needs_whole_sequences(settings):
    with pytest.raises(ValueError, match="kernel= computes attention to whole sequences"):
        layouts.Layout(mesh.make(context=8), context="context", kernel=SPLASH, **settings)


def test_the_compiler_cannot_cut_a_kernel_in_stages():
    with pytest.raises(ValueError, match="kernel= in stages takes rows that are cut by hand"):
        grid = mesh.make(stage=2, fsdp=4)
        layouts.Layout(grid, stage="stage", fsdp="fsdp", by="compiler", kernel=SPLASH)


needs_libtpu = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"), reason="libtpu is not installed"
)


@needs_libtpu
def test_on_a_chip_its_flops_are_those_of_the_tiles_that_are_seen(monkeypatch, tmp_path):
    """In a scan of rematerialised layers: twice forward, and both kernels of the backward pass."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    chips = topology.chips("v5e:2x4").mesh(fsdp=4, tensor=2)
    rows, size, heads, depth, block, layers = 8, 512, 4, 64, 128, 3
    spec = NamedSharding(chips.abstract, P("fsdp", None, "tensor"))
    q = jax.ShapeDtypeStruct((rows, size, heads, depth), jnp.bfloat16, sharding=spec)
    splash = context.splash(block=block)
    kernel = context.within(chips.abstract, (), splash, ("fsdp",), ("tensor",))

    def total(q):
        attend = jax.checkpoint(lambda q: kernel(q, q, q, marks.places(None, rows, size)))
        out = jax.lax.scan(lambda q, _: (attend(q).astype(q.dtype), None), q, None, layers)[0]
        return jnp.sum(out.astype(jnp.float32))

    program = topology.compile(chips.lower(jax.jit(jax.grad(total)), q), chips)
    seen = np.tril(np.ones((size, size))).reshape(size // block, block, -1, block).any((1, 3))
    product = 2 * (rows // 4) * (heads // 2) * seen.sum() * block**2 * 128  # depth, padded
    assert measure.flops(program) == layers * (2 + 2 + 3 + 4) * product
    assert measure.overlap(program, chips.chips.chip).share == 1  # nothing is sent


@pytest.mark.slow
@needs_libtpu
@pytest.mark.skipif(not IN_FULL, reason="half a minute of the compiler's: make stacks runs it")
def test_on_a_chip_it_keeps_no_scores(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    chips = topology.chips("v5e:2x4").mesh(fsdp=4, tensor=2)
    size, heads, depth = 4096, 16, 128  # 134 MB of scores a device: no room for them in VMEM
    spec = NamedSharding(chips.abstract, P("fsdp", None, "tensor"))
    q = jax.ShapeDtypeStruct((4, size, heads, depth), jnp.bfloat16, sharding=spec)
    kernel = context.within(chips.abstract, (), context.splash(), ("fsdp",), ("tensor",))

    def temporaries(attend):
        def total(q, k, v):
            return jnp.sum(attend(q, k, v, marks.places(None, 4, size)).astype(jnp.float32))

        lowered = chips.lower(jax.jit(jax.grad(total, (0, 1, 2))), q, q, q)
        return measure.fits(topology.compile(lowered, chips)).memory.temporaries

    scores = size**2 * heads // 2 * 2  # bytes on a device, in bfloat16
    assert temporaries(kernel) < scores / 2 < scores < temporaries(marks.attend)
