"""Decoders as others build them: tied, with biases, with norms elsewhere, equal to one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from sampling import IN_FULL, marked

from shardwise import data, layouts, mesh, model, objective

mesh.simulate(8)
SIZES = dict(embed=32, layers=2, heads=16, kv_heads=8, head_dim=2, mlp=48, vocab=256)
CONFIGS = {
    "gemma": dict(tied=True, norms="both", activation="gelu", qk_norm="head", qkv_bias=True),
    "olmo": dict(norms="after", qk_norm="heads"),
    "deepseek": dict(experts=8, capacity_factor=1.25, mlp=16, router="sigmoid", router_bias=True)
    | dict(shared_experts=1, latent=12, query_latent=20, kv_heads=16, head_dim=6, rope_dim=2)
    | dict(value_dim=4, layers=3, dense_layers=1, dense_mlp=48),  # stages take two and one
    "qwen": dict(qkv_bias=True, qk_norm="head", experts=8, capacity_factor=1.25, mlp=16),
}
KEY, TX = jax.random.key(3), optax.sgd(1.0)  # a step is the gradient


def program(name, stages=1, chunks=1):
    config = model.Config(**SIZES | CONFIGS[name], stages=stages, loss_chunks=chunks)
    graphdef = nnx.split(nnx.eval_shape(lambda: model.Decoder(config, nnx.Rngs(0))))[0]
    loss = functools.partial(model.loss, graphdef=graphdef)
    if config.experts:
        loss = functools.partial(model.routed_loss, graphdef=graphdef, over="rows")
    # A stack of layers is the same stack, however many stages there are.
    params = _drawn(dataclasses.replace(config, stages=1, loss_chunks=1))
    return params, loss, bool(config.experts)


@functools.cache
def _drawn(config):
    """With scales and biases away from 1 and 0, at which their gradients would hide a fault."""

    def create(key):
        state = nnx.state(model.Decoder(config, nnx.Rngs(params=key)))
        leaves, tree = jax.tree.flatten(state)
        spread = [jnp.linspace(-0.1, 0.1, x.size).reshape(x.shape) for x in leaves]
        return jax.tree.unflatten(tree, [x + s for x, s in zip(leaves, spread, strict=True)])

    return jax.jit(create)(KEY)


def batch():
    return next(iter(data.batches(16, 32, seed=5)))


@functools.cache
def alone(name):
    params, loss, has_aux = program(name)
    out, grads = jax.jit(objective.value_and_grad(loss, has_aux=has_aux))(params, batch())
    return jax.tree.leaves(out)[0], [np.asarray(g) for g in jax.tree.leaves(grads)]


LAYOUTS = ["fsdp, context, tensor", "stage, fsdp, tensor by hand", "fsdp, tensor by compiler"]
LAYOUTS += ["fsdp", "stage, fsdp", "fsdp, expert, context"]
STANDING = {("olmo", LAYOUTS[0]), ("qwen", LAYOUTS[5]), ("deepseek", LAYOUTS[5])}
STANDING |= {("gemma", LAYOUTS[1]), ("gemma", LAYOUTS[2]), ("deepseek", LAYOUTS[4])}


CASES = [
    (n, x)
    for n, config in CONFIGS.items()
    for x in LAYOUTS
    if "expert" not in x or "experts" in config
]
OTHERS = [case for case in CASES if case not in STANDING]
CHUNKED = "gemma", LAYOUTS[0]
UNCHUNKED = [case for case in CASES if case != CHUNKED]


@pytest.mark.parametrize("name, layout", [*marked(sorted(STANDING), ()), *marked(OTHERS, (), 1)])
def test_a_variant_is_one_device(name, layout, chunks=1):
    layout = layouts.LAYOUTS[layout](max(4, 2 ** len(layout.split(", "))))
    before, loss, has_aux = program(name, layout.size("stage"), chunks)
    expected, grads = alone(name)
    params, state = layouts.init(layout, lambda key: before, TX, KEY)
    step = layouts.step(layout, loss, TX, has_aux=has_aux, check=IN_FULL)
    after, _, *out = step(params, state, batch())
    np.testing.assert_allclose(jax.tree.leaves(out)[0], expected, rtol=2e-5)
    ours = jax.tree.leaves(layouts.whole(layout, after))
    for a, b, g in zip(ours, jax.tree.leaves(before), grads, strict=True):
        np.testing.assert_allclose(b - a, g, rtol=1e-3, atol=3e-6 * (1 + np.abs(g).max()))


@pytest.mark.parametrize("name, layout", [*marked([CHUNKED], ()), *marked(UNCHUNKED, (), 2)])
def test_a_loss_in_chunks_is_one_device_whole(name, layout):
    test_a_variant_is_one_device(name, layout, chunks=4)


def test_a_loss_in_chunks_sums_the_heads_gradient_in_float32():
    """Of bfloat16 weights, what 32 chunks add up to is as near the truth as what one product is."""
    errors = []
    params, exact, _ = program("olmo")
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    truth = jax.grad(lambda p: sum(exact(p, batch())))(
        jax.tree.map(lambda x: x.astype(jnp.float32), narrow)
    )["head"]["kernel"][...]
    for chunks in (1, 32):
        config = model.Config(**SIZES | CONFIGS["olmo"], loss_chunks=chunks, dtype=jnp.bfloat16)
        _, loss, _ = model.program(config)
        found = jax.jit(jax.grad(lambda p, loss=loss: loss(p, batch()).total))(narrow)
        found = found["head"]["kernel"][...]
        assert found.dtype == jnp.bfloat16
        errors.append(np.abs(found.astype(jnp.float32) - truth).mean())
    assert errors[1] < 1.1 * errors[0]


def test_a_loss_of_routed_tokens_without_experts_says_so():
    params, _, _ = program("olmo")
    graphdef = nnx.graphdef(
        nnx.eval_shape(lambda: model.Decoder(model.Config(**SIZES | CONFIGS["olmo"]), nnx.Rngs(0)))
    )
    with pytest.raises(ValueError, match=r"the decoder has no experts; take model\.loss"):
        model.routed_loss(params, batch(), graphdef=graphdef)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_variant_has_the_parameters_that_it_says(name):
    config = model.Config(**SIZES | CONFIGS[name])
    paths = {"/".join(map(str, keys)) for keys, _ in nnx.to_flat_state(program_state(config))}
    assert ("head/kernel" not in paths) == config.tied
    assert ("blocks/q/bias" in paths) == config.qkv_bias and "blocks/o/bias" not in paths
    assert ("blocks/attention_norm/scale" in paths) == (config.norms != "after")
    assert ("blocks/mlp_end/scale" in paths) == (config.norms != "before")
    shapes = {"/".join(map(str, k)): v.shape for k, v in nnx.to_flat_state(program_state(config))}
    width = {"head": (2, 2), "heads": (2, 8, 2), "": None}[config.qk_norm]
    assert shapes.get("blocks/k_norm/scale") == width
    assert ("blocks/latent/q_down/kernel" in paths) == bool(config.latent)
    assert (
        ("dense/gate/kernel" in paths) == ("dense/latent/kv/kernel" in paths) == bool(config.latent)
    )


def program_state(config):
    return nnx.state(nnx.eval_shape(lambda: model.Decoder(config, nnx.Rngs(0))))


def test_norms_and_biases_are_computed_as_published():
    """A layer in NumPy, by the papers: Gemma 2 (norms both), Qwen 3 (norm of each head)."""
    config = model.Config(
        **SIZES | dict(norms="both", qk_norm="head", qkv_bias=True, activation="gelu", layers=1)
    )
    state = _drawn(config)
    w = {k: np.asarray(v, np.float64)[0] for k, v in _flat(state["blocks"]).items()}
    x = np.random.default_rng(0).normal(size=(2, 5, config.embed))

    def norm(x, name):
        mean = (x**2).mean(-1, keepdims=True) + config.norm_epsilon
        return x / np.sqrt(mean) * w[f"{name}/scale"]

    y, half = norm(x, "attention_norm"), config.head_dim // 2
    q, k, v = (np.einsum("bse,ehd->bshd", y, w[f"{n}/kernel"]) + w[f"{n}/bias"] for n in "qkv")
    angle = np.arange(5)[:, None] * config.rope_theta ** (-np.arange(half) / half)

    def turned(x):
        a, b = x[..., :half], x[..., half:]
        cos, sin = np.cos(angle)[None, :, None], np.sin(angle)[None, :, None]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    q, k = turned(norm(q, "q_norm")), turned(norm(k, "k_norm"))
    k, v = (np.repeat(t, config.heads // config.kv_heads, 2) for t in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(config.head_dim)
    scores = np.where(np.tril(np.ones((5, 5), bool)), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    y = np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), v)
    x2 = x + norm(np.einsum("bshd,hde->bse", y, w["o/kernel"]), "attention_end")
    y = norm(x2, "mlp_norm")
    g, u = y @ w["gate/kernel"], y @ w["up/kernel"]
    g = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
    expected = x2 + norm((g * u) @ w["down/kernel"], "mlp_end")
    graphdef = nnx.split(nnx.eval_shape(lambda: model.Block(config, nnx.Rngs(0))))[0]
    block = nnx.merge(graphdef, jax.tree.map(lambda a: a[0], state["blocks"]))
    found = jax.jit(lambda x: block(x))(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found, expected, atol=2e-5)


def _flat(state):
    return {"/".join(map(str, k)): v[...] for k, v in nnx.to_flat_state(state)}


@pytest.mark.parametrize(
    "sizes, told",
    [
        (dict(norms="none"), "norms='none' must be 'before' or 'after' or 'both'"),
        (dict(qk_norm="all"), "qk_norm='all'"),
        (dict(activation="relu"), "activation='relu'"),
        (dict(experts=4, activation="gelu"), "activation='gelu' must be 'silu' in experts"),
    ],
)
def test_what_is_no_variant_is_named(sizes, told):
    with pytest.raises(ValueError, match=told):
        dataclasses.replace(model.Config(), **sizes)
