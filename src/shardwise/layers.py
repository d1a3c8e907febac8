"""The decoder's sizes, and what its layers are made of; `shardwise.model` has the decoder."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardwise import marks

_CHOICES = {
    "router": ("softmax", "sigmoid"),
    "qk_norm": ("", "head", "heads"),
    "norms": ("before", "after", "both"),
    "activation": ("silu", "gelu"),
}
_WIDTHS = "rope_dim", "value_dim", "latent", "query_latent", "dense_layers", "dense_mlp"


@dataclasses.dataclass(frozen=True)
class Config:
    """The decoder's sizes, its parts, and how it runs.

    The first six fields are sizes of axes, and numbers of layers and heads. `dtype` is that of
    activations, and of weights where they are used; `param_dtype` that of weights as they are held.

    Raises:
      ValueError: a value that is not allowed, or sizes that do not fit each other, as the fields
        say; `heads` is a multiple of `kv_heads`, `stages` at most `layers`, and `head_dim` is even.
    """

    vocab: int = 256
    embed: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    mlp: int = 384  #: Hidden size of a layer's MLP, or of each expert.
    experts: int = 0  #: MLPs of a layer, of which a token uses a few. With 0 there is one for all.
    experts_per_token: int = 2  #: The number of experts that a token uses, from 1 to `experts`.
    shared_experts: int = 0  #: The number of further experts, which every token uses.
    capacity_factor: float | None = None  #: The `capacity` of `marks.experts`; None drops nothing.
    #: The function of experts' scores, "softmax" or "sigmoid". Those of a token's experts, if there
    #: are several, are divided by their sum.
    router: str = "softmax"
    #: Whether a bias is added to scores to choose experts, only there. It has no gradient: after a
    #: step call `experts.rebalanced`, by the "loads" of `model.routed_loss`.
    router_bias: bool = False
    stages: int = 1  #: Stages of a pipeline, with `marks.stage_boundary` between their `spans`.
    dropout: float = 0.0  #: Probability, below 1, that an entry of a sublayer's output is dropped.
    dtype: jnp.dtype = jnp.float32  #: Of activations, and of weights where they are used.
    param_dtype: jnp.dtype = jnp.float32  #: Of weights as they are held.
    scan: bool = True  #: Whether the layers run by `jax.lax.scan`, or else by a Python loop.
    remat: bool = False  #: Whether the backward pass computes a layer's activations again.
    #: Chunks of a row's tokens, whose logits `model.loss` has one by one. The head's gradient is
    #: summed in float32, whole; in stages it waits in the last stage's slot.
    loss_chunks: int = 1
    tied: bool = False  #: Whether the embedding is the head too.
    qkv_bias: bool = False  #: Whether queries, keys and values have biases.
    qk_norm: str = ""  #: RMSNorm of queries and keys, over each "head" or all "heads"; "" for none.
    norms: str = "before"  #: RMSNorm "before" each sublayer, "after" it (on its output), or "both".
    activation: str = "silu"  #: The function of an MLP's gate, "silu", or "gelu" by tanh.
    rope_theta: float = 10_000.0  #: Base of the wavelengths of rotary positions.
    norm_epsilon: float = 1e-6  #: What RMSNorm adds to the mean square.
    rope_dim: int = 0  #: Last entries of queries and keys that positions turn, even; 0 for all.
    value_dim: int = 0  #: Entries of a head's values; 0 for `head_dim`.
    #: Width from which all heads' keys and values are made; 0: from activations. With it `kv_heads`
    #: is `heads`, `rope_dim` is above 0 and below `head_dim`, and no qkv_bias or qk_norm is set.
    latent: int = 0
    query_latent: int = 0  #: Width from which queries are made, beside `latent`; 0 likewise.
    dense_layers: int = 0  #: First layers that have one MLP in place of experts; not all layers.
    dense_mlp: int = 0  #: Hidden size of a dense layer's MLP: above 0 with `dense_layers`, else 0.

    def __post_init__(self):
        for name, wrong, expected in self._mistakes():
            if wrong:
                raise ValueError(f"Config: {name}={getattr(self, name)!r} must be {expected}.")

    @property
    def depth(self) -> int:
        """The number of entries of a head's values."""
        return self.value_dim or self.head_dim

    @property
    def stacks(self) -> tuple["Config", ...]:
        """The config of each stack of equal layers: of the dense ones, if any, and of others."""
        return _stacks(self) if self.dense_layers else (self,)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The (first layer, end) of each stage. Where stages do not divide the layers, those in the
        middle have one more: the first stage has the embedding besides, and the last the head.
        """
        return spans(self.layers, self.stages)

    def _mistakes(self) -> Iterator[tuple[str, Any, str]]:
        """(field, whether it is wrong, what it has to be) of each."""
        sizes = ("vocab", "embed", "layers", "heads", "kv_heads", "head_dim", "mlp", "stages")
        for name in (*sizes, "loss_chunks"):
            yield name, getattr(self, name) < 1, "at least 1"
        for name in ("experts", "shared_experts", *_WIDTHS):
            yield name, getattr(self, name) < 0, "0 or more"
        for name in ("rope_theta", "norm_epsilon"):
            yield name, not 0 < getattr(self, name) < float("inf"), "above 0, and finite"
        for name, known in _CHOICES.items():
            yield name, getattr(self, name) not in known, " or ".join(map(repr, known))
        yield "heads", self.heads % self.kv_heads, f"a multiple of kv_heads={self.kv_heads}"
        yield "stages", self.stages > self.layers, f"at most layers={self.layers}"
        turned = self.rope_dim or self.head_dim
        out = turned % 2 or turned > self.head_dim
        yield "rope_dim" if self.rope_dim else "head_dim", out, "even, and at most head_dim"
        yield "dropout", not 0 <= self.dropout < 1, "at least 0 and below 1"
        experts, factor = self.experts, self.capacity_factor
        out = experts and not 1 <= self.experts_per_token <= experts
        yield "experts_per_token", out, f"from 1 to experts={experts}"
        yield "shared_experts", self.shared_experts and not experts, "0 where experts=0"
        yield "activation", experts and self.activation != "silu", "'silu' in experts"
        latent = bool(self.latent)
        yield "query_latent", self.query_latent and not latent, "0 where latent=0"
        out = latent and not 0 < self.rope_dim < self.head_dim
        yield "rope_dim", out, f"above 0 and below head_dim={self.head_dim} beside latent"
        yield (
            "kv_heads",
            latent and self.kv_heads != self.heads,
            f"heads={self.heads} beside latent",
        )
        yield "qkv_bias", latent and self.qkv_bias, "False beside latent"
        yield "qk_norm", latent and self.qk_norm, "'' beside latent"
        n, most = self.dense_layers, self.layers - 1 if self.experts else 0
        yield "dense_layers", n > most, f"at most {most}, so that layers of experts follow"
        yield "dense_mlp", bool(n) != bool(self.dense_mlp), "above 0 with dense_layers, else 0"
        out = factor is not None and not factor > 0
        yield "capacity_factor", out, "above 0, or None for no drops"


@functools.lru_cache(maxsize=1024)  # outside of the config, whose `vars` are its fields alone
def _stacks(config):
    n = config.dense_layers
    dense = dict(layers=n, mlp=config.dense_mlp, experts=0, shared_experts=0)
    each = dense | dict(capacity_factor=None), dict(layers=config.layers - n)
    alone = dict(dense_layers=0, dense_mlp=0, stages=1)
    return tuple(dataclasses.replace(config, **alone | x) for x in each)


@functools.cache
def spans(layers: int, stages: int) -> tuple[tuple[int, int], ...]:
    """`Config.spans` of so many layers and stages."""
    each, more = divmod(layers, stages)
    first = (stages - more) // 2
    ends = [(s + 1) * each + min(max(s + 1 - first, 0), more) for s in range(stages)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


class Linear(nnx.Module):
    """A weight with these logical axes, by default without a bias; outputs sum over axes `over`.

    Sizes are the configuration's, or those in `sizes`. A bias has the axes of the weight but the
    first. The weight is uniform, of variance 1/fan_in, the number of entries that an output sums:
    inside jit uniform draws are bitwise the same under every sharding, unlike normal ones.
    """

    def __init__(
        self,
        config: Config,
        axes: tuple[str, ...],
        over: tuple[str, ...],
        rngs: nnx.Rngs,
        bias: bool = False,
        **sizes: int,
    ):
        sizes = {name: getattr(config, name) for name in axes if name not in sizes} | sizes
        shape = tuple(sizes[name] for name in axes)
        limit = (3 / math.prod(sizes[name] for name in over)) ** 0.5
        kernel = jax.random.uniform(rngs.params(), shape, config.param_dtype, -limit, limit)
        self.kernel = nnx.Param(kernel, logical_axes=axes)
        zeros = jnp.zeros(shape[1:], config.param_dtype)
        self.bias = nnx.Param(zeros, logical_axes=axes[1:]) if bias else None
        self.dtype = config.dtype

    def __call__(self, letters, x):
        y = jnp.einsum(letters, x, self.kernel[...].astype(self.dtype))
        return y if self.bias is None else y + self.bias[...].astype(self.dtype)[None, None]


class RMSNorm(nnx.Module):
    """RMSNorm in float32, over embed or other last axes (Zhang and Sennrich, 2019)."""

    def __init__(self, config: Config, axes: tuple[str, ...] = ("embed",)):
        ones = jnp.ones([getattr(config, axis) for axis in axes], config.param_dtype)
        self.scale = nnx.Param(ones, logical_axes=axes)
        self.axes = tuple(range(-len(axes), 0))
        self.epsilon = config.norm_epsilon

    def __call__(self, x):
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide**2, axis=self.axes, keepdims=True)
        scale = self.scale[...].astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(mean + self.epsilon)
        return (wide * scale[(None,) * (x.ndim - scale.ndim)]).astype(x.dtype)


def rotary(x: jax.Array, positions: jax.Array, theta: float = 10_000.0, size: int = 0) -> jax.Array:
    """Rotate the halves of x [b, s, h, d] by angles that grow with positions [b, s] (Su et al.);
    with a `size`, those of its last entries, so many.
    """
    if size and size < x.shape[-1]:
        return jnp.concatenate([x[..., :-size], rotary(x[..., -size:], positions, theta)], axis=-1)
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[:, :, None] * frequency[None, None, :]
    cos, sin = (f(angle).astype(x.dtype)[:, :, None, :] for f in (jnp.cos, jnp.sin))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def drop(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero each entry of x [b, s, e] with probability `rate`, scaling the rest; no key, no dropout.

    A draw depends on the key and on the entry's place in the whole batch: the mask is the same, bit
    for bit, however that is divided.
    """
    if key is None or rate == 0:
        return x
    rows, columns = marks.index("rows", x.shape[0]), marks.index("sequence", x.shape[1])
    # A threefry key, whatever was given: "rbg" draws otherwise under vmap.
    bits = key if key.dtype == jnp.uint32 else jax.random.key_data(key)
    bits = bits if bits.shape[-1] == 2 else bits[..., :2] ^ bits[..., 2:]
    key = jax.random.wrap_key_data(bits, impl="threefry2x32")

    def vector(row, column):
        place = jax.random.fold_in(jax.random.fold_in(key, row), column)
        return jax.random.bernoulli(place, 1 - rate, x.shape[2:])

    kept = jax.vmap(jax.vmap(vector, (None, 0)), (0, None))(rows, columns)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def unrolled(body: Callable, x: Any, stack: Any) -> tuple[Any, Any]:
    """`jax.lax.scan` of a body over a stack of layers, as a Python loop."""
    found = []
    for i in range(len(jax.tree.leaves(stack)[0])):
        x, routing = body(x, jax.tree.map(lambda a, i=i: a[i], stack))
        found.append(routing)
    return x, jax.tree.map(lambda *layers: jnp.stack(layers), *found)


def normed(norm: RMSNorm | None, x: jax.Array) -> jax.Array:
    """`norm(x)`, or `x` where there is no norm."""
    return x if norm is None else norm(x)


class Latent(nnx.Module):
    """Queries, keys and values of all heads from narrow vectors (DeepSeek-AI, 2024: multi-head
    latent attention). The entries of keys that positions turn are one vector for all heads.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = c = config
        entered = ("query_latent",) if c.query_latent else ("embed",)
        if c.query_latent:
            self.q_down = Linear(c, ("embed", *entered), ("embed",), rngs)
            self.q_norm = RMSNorm(c, entered)
        self.q = Linear(c, (*entered, "heads", "head_dim"), entered, rngs)
        self.down = Linear(c, ("embed", "latent"), ("embed",), rngs)
        self.norm = RMSNorm(c, ("latent",))
        both = c.head_dim - c.rope_dim + c.depth  # in one product, whose gradient is summed once
        self.kv = Linear(c, ("latent", "kv_heads", "both_dim"), ("latent",), rngs, both_dim=both)
        self.k_turned = Linear(c, ("embed", "rope_dim"), ("embed",), rngs)

    def __call__(
        self, x: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(q, k, v) [b, s, heads, ...] of x [b, s, e] at positions [b, s]."""
        c = self.config
        q = self.q_norm(self.q_down("bse,el->bsl", x)) if c.query_latent else x
        q = rotary(self.q("bsl,lhd->bshd", q), positions, c.rope_theta, c.rope_dim)
        narrow, turned = self.norm(self.down("bse,el->bsl", x)), self.k_turned("bse,er->bsr", x)
        turned = rotary(turned[:, :, None], positions, c.rope_theta)
        turned = jnp.broadcast_to(turned, (*q.shape[:3], c.rope_dim))
        k, v = jnp.split(self.kv("bsl,lkd->bskd", narrow), [c.head_dim - c.rope_dim], axis=-1)
        return q, jnp.concatenate([k, turned], axis=-1), v
