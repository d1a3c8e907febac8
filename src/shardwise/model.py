"""A present-day decoder in Flax NNX, written for one device.

Every parameter carries the names of its logical axes (metadata `logical_axes`) and the code
carries marks: `marks.constrain` names embedding_output, attention_input, attended,
attention_output, mlp_input, mlp_hidden, mlp_output and logits. Of meshes it knows nothing. Letters
in einsums: b batch, s and t sequence, e embed, h heads, k kv_heads, g query heads for each kv head,
d head_dim, m mlp, v vocab.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from shardwise import marks


@dataclasses.dataclass(frozen=True)
class Config:
    """The decoder's sizes and how it runs.

    Raises:
      ValueError: sizes that do not fit each other.
    """

    vocab: int = 256
    embed: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    mlp: int = 384
    stages: int = 1  # stacks of layers, with a stage boundary between them
    dropout: float = 0.0
    dtype: jnp.dtype = jnp.float32  # of activations, and of weights where they are used
    param_dtype: jnp.dtype = jnp.float32  # of weights where they are held
    scan: bool = True  # run the layers by scan, or by a Python loop
    remat: bool = False  # recompute a layer's activations in the backward pass

    def __post_init__(self):
        for name in ("vocab", "embed", "layers", "heads", "kv_heads", "head_dim", "mlp", "stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"Config: {name}={getattr(self, name)} must be at least 1.")
        for whole, part in [("heads", "kv_heads"), ("layers", "stages")]:
            if getattr(self, whole) % getattr(self, part):
                raise ValueError(
                    f"Config: {whole}={getattr(self, whole)} must be a multiple of "
                    f"{part}={getattr(self, part)}."
                )
        if self.head_dim % 2:
            raise ValueError(f"Config: head_dim={self.head_dim} must be even for rotary positions.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"Config: dropout={self.dropout} must be at least 0 and below 1.")


class Linear(nnx.Module):
    """A weight without bias; `fan_in` counts the entries that one output sums over.

    Uniform in ±√(3/fan_in), hence of variance 1/fan_in: inside jit, uniform draws are bitwise
    the same under every sharding; normal ones are not on every JAX that we support.
    """

    def __init__(
        self,
        config: Config,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        fan_in: int,
        rngs: nnx.Rngs,
    ):
        limit = (3 / fan_in) ** 0.5
        kernel = jax.random.uniform(rngs.params(), shape, config.param_dtype, -limit, limit)
        self.kernel = nnx.Param(kernel, logical_axes=axes)
        self.dtype = config.dtype

    def __call__(self, letters, x):
        return jnp.einsum(letters, x, self.kernel[...].astype(self.dtype))


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over embed, in float32 (Zhang and Sennrich, 2019)."""

    def __init__(self, config: Config):
        self.scale = nnx.Param(jnp.ones(config.embed, config.param_dtype), logical_axes=("embed",))

    def __call__(self, x):
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
        return (wide * self.scale[...].astype(jnp.float32)[None, None, :]).astype(x.dtype)


def rotary(x: jax.Array) -> jax.Array:
    """Rotate the halves of x [b, s, h, d] by angles that grow with the position (Su et al.)."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency[None, :]
    cos, sin = (f(angle).astype(x.dtype)[None, :, None, :] for f in (jnp.cos, jnp.sin))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention, q [b, s, h, d], k and v [b, t, k, d]: a kv head serves h/k query heads."""
    b, s, h, d = q.shape
    q = q.reshape(b, s, k.shape[2], h // k.shape[2], d)
    scores = jnp.einsum("bskgd,btkd->bkgst", q, k).astype(jnp.float32) * d**-0.5
    causal = jnp.tril(jnp.ones((s, s), bool))[None, None, None]
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("bkgst,btkd->bskgd", weights, v).reshape(b, s, h, d)


class Block(nnx.Module):
    """One layer: grouped-query attention, then a gated MLP, each after an RMSNorm."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        c = config
        self.attention_norm = RMSNorm(c)
        query = ("embed", "heads", "head_dim")
        self.q = Linear(c, (c.embed, c.heads, c.head_dim), query, c.embed, rngs)
        key_value = ("embed", "kv_heads", "head_dim")
        self.k = Linear(c, (c.embed, c.kv_heads, c.head_dim), key_value, c.embed, rngs)
        self.v = Linear(c, (c.embed, c.kv_heads, c.head_dim), key_value, c.embed, rngs)
        out = ("heads", "head_dim", "embed")
        self.o = Linear(c, (c.heads, c.head_dim, c.embed), out, c.heads * c.head_dim, rngs)
        self.mlp_norm = RMSNorm(c)
        self.gate = Linear(c, (c.embed, c.mlp), ("embed", "mlp"), c.embed, rngs)
        self.up = Linear(c, (c.embed, c.mlp), ("embed", "mlp"), c.embed, rngs)
        self.down = Linear(c, (c.mlp, c.embed), ("mlp", "embed"), c.mlp, rngs)
        self.dropout = c.dropout

    def __call__(self, x, key=None):
        keys = (None, None) if key is None else jax.random.split(key)
        y = marks.constrain(self.attention_norm(x), "attention_input")
        q, k = rotary(self.q("bse,ehd->bshd", y)), rotary(self.k("bse,ekd->bskd", y))
        y = marks.constrain(attend(q, k, self.v("bse,ekd->bskd", y)), "attended")
        y = self.o("bshd,hde->bse", y)
        x = marks.constrain(x + drop(y, self.dropout, keys[0]), "attention_output")
        y = marks.constrain(self.mlp_norm(x), "mlp_input")
        y = jax.nn.silu(self.gate("bse,em->bsm", y)) * self.up("bse,em->bsm", y)
        y = self.down("bsm,me->bse", marks.constrain(y, "mlp_hidden"))
        return marks.constrain(x + drop(y, self.dropout, keys[1]), "mlp_output")


def drop(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero each entry of x [b, s, e] with probability `rate`, scaling the rest; no key, no dropout.

    A draw depends on the key and on the entry's place in the whole batch: however that is divided,
    the mask is the same, bit for bit. An "rbg" key, which draws otherwise under vmap, gives a
    threefry key first.
    """
    if key is None or rate == 0:
        return x
    rows, columns = marks.index("rows", x.shape[0]), marks.index("sequence", x.shape[1])
    key = _threefry(key)

    def vector(row, column):
        place = jax.random.fold_in(jax.random.fold_in(key, row), column)
        return jax.random.bernoulli(place, 1 - rate, x.shape[2:])

    kept = jax.vmap(jax.vmap(vector, (None, 0)), (0, None))(rows, columns)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def _threefry(key):
    bits = key if key.dtype == jnp.uint32 else jax.random.key_data(key)
    bits = bits if bits.shape[-1] == 2 else bits[..., :2] ^ bits[..., 2:]
    return jax.random.wrap_key_data(bits, impl="threefry2x32")


class Decoder(nnx.Module):
    """tokens int [b, s] to logits float32 [b, s, vocab].

    The layers are stacked: each parameter under `blocks` has a leading axis of `config.layers`,
    which its logical axes do not name.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        table = (config.vocab, config.embed)
        self.embed = Linear(config, table, ("vocab", "embed"), config.embed, rngs)
        keys = jax.random.split(rngs.params(), config.layers)
        self.blocks = nnx.vmap(lambda key: Block(config, nnx.Rngs(params=key)))(keys)
        self.final_norm = RMSNorm(config)
        head = (config.embed, config.vocab)
        self.head = Linear(config, head, ("embed", "vocab"), config.embed, rngs)

    def __call__(self, tokens, key=None):
        """Logits; with a `key` dropout is on, without one it is off."""
        x = self.embed.kernel[...].astype(self.config.dtype)[tokens]
        x = marks.constrain(x, "embedding_output")
        x = self._layers(x, key)
        logits = self.head("bse,ev->bsv", self.final_norm(x)).astype(jnp.float32)
        return marks.constrain(logits, "logits")

    def _layers(self, x, key):
        c = self.config
        graphdef, stack = nnx.split(self.blocks)
        keys = None if key is None or c.dropout == 0 else jax.random.split(key, c.layers)

        def layer(x, weights_and_key):
            weights, key = weights_and_key
            return nnx.merge(graphdef, marks.use(weights))(x, key), None

        body = jax.checkpoint(layer) if c.remat else layer
        size = c.layers // c.stages
        for first in range(0, c.layers, size):
            part = jax.tree.map(lambda a, i=first: a[i : i + size], (stack, keys))
            x = marks.stage_boundary(x) if first else x
            x = _run(body, x, part, size, c.scan)
        return x


def _run(body, x, stack, size, scan):
    if scan:
        return jax.lax.scan(body, x, stack)[0]
    for i in range(size):
        x, _ = body(x, jax.tree.map(lambda a, i=i: a[i], stack))
    return x
