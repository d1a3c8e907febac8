"""The reference model of all benchmarks: a stack of GPT-2 blocks in plain JAX, no framework.

Parameters are a dict of arrays, those under `blocks` stacked along a leading axis of layers, which
run by scan. The same marks stand in it as in `shardwise.model.Decoder`. It has 4,238,336
parameters: LayerNorm with bias, learned positions, an ungated MLP with biases, attention without
biases, an untied head with a bias, and no norm before it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardwise import marks, objective

BATCH, HEAD_DIM, PARAMETERS = 16, 64, 4_238_336
SIZES = dict(layers=4, vocab=2048, sequence=128, embed=256, heads=256, mlp=1024)

NORM = {"scale": ("embed",), "bias": ("embed",)}
AXES = {  # names of the logical axes; the layers' own axis, which leads under blocks, goes unnamed
    "tokens": ("vocab", "embed"),
    "positions": ("sequence", "embed"),
    "blocks": {
        "attention_norm": NORM,
        "q": ("embed", "heads"),
        "k": ("embed", "heads"),
        "v": ("embed", "heads"),
        "o": ("heads", "embed"),
        "mlp_norm": NORM,
        "up": {"kernel": ("embed", "mlp"), "bias": ("mlp",)},
        "down": {"kernel": ("mlp", "embed"), "bias": ("embed",)},
    },
    "head": {"kernel": ("embed", "vocab"), "bias": ("vocab",)},
}


def init(seed=0):
    """The parameters, as NumPy arrays: kernels uniform of variance 1/fan_in, scales 1, biases 0."""
    random = np.random.default_rng(seed)

    def draw(path, axes):
        stacked = ("layers",) if path[0].key == "blocks" else ()
        shape = tuple(SIZES[axis] for axis in (*stacked, *axes))
        if len(axes) == 1:
            fill = np.ones if path[-1].key == "scale" else np.zeros
            return fill(shape, np.float32)
        limit = (3 / SIZES[axes[0]]) ** 0.5
        return random.uniform(-limit, limit, shape).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(draw, AXES, is_leaf=lambda x: isinstance(x, tuple))
    count = sum(x.size for x in jax.tree.leaves(params))
    assert count == PARAMETERS, f"the reference model has {count} parameters, not {PARAMETERS}"
    return params


def random_batch(seed=0):
    """Random tokens and what follows each: a dict as `shardwise.data.batches` makes them."""
    shape = BATCH, SIZES["sequence"] + 1
    tokens = np.random.default_rng(seed).integers(SIZES["vocab"], size=shape, dtype=np.int32)
    mask = np.ones((BATCH, SIZES["sequence"]), np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}


# Of a layer's activations the products with weights are kept; the rest is computed again.
KEPT = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


def loss(params, batch, policy=KEPT):
    """`objective.Mean`: the sum of -log p over the tokens, in nats, and their number.

    `policy` says which of a layer's activations the backward pass finds and which it computes
    again, as `jax.checkpoint` takes it: None keeps a layer's input alone.
    """
    x = params["tokens"][batch["tokens"]] + params["positions"][None]
    x = marks.constrain(x, "embedding_output")

    def body(x, weights):
        return block(marks.use(weights), x), None

    x, _ = jax.lax.scan(jax.checkpoint(body, policy=policy), x, params["blocks"])
    logits = x @ params["head"]["kernel"] + params["head"]["bias"]
    logits = marks.constrain(logits, "logits")
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return objective.Mean(jnp.sum(each * batch["mask"]), jnp.sum(batch["mask"]))


def block(weights, x):
    """One layer, on x [batch, sequence, embed]."""
    y = norm(weights["attention_norm"], x)
    q, k, v = (split_heads(y @ weights[name]) for name in "qkv")
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
    x = marks.constrain(x + y @ weights["o"], "attention_output")
    y = norm(weights["mlp_norm"], x)
    y = jax.nn.gelu(y @ weights["up"]["kernel"] + weights["up"]["bias"])
    y = y @ weights["down"]["kernel"] + weights["down"]["bias"]
    return marks.constrain(x + y, "mlp_output")


def norm(weights, x):
    """LayerNorm over embed (Ba et al., 2016)."""
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5)
    return x * weights["scale"] + weights["bias"]


def split_heads(x):
    return x.reshape(*x.shape[:-1], -1, HEAD_DIM)
