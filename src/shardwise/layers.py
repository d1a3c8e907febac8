"""The decoder's sizes, and what its layers are made of; `shardwise.model` has the whole."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

_CHOICES = {
    "router": ("softmax", "sigmoid"),
    "qk_norm": ("", "head", "heads"),
    "norms": ("before", "after", "both"),
    "activation": ("silu", "gelu"),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The decoder's sizes and how it runs; a ValueError where they do not fit each other."""

    vocab: int = 256
    embed: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    mlp: int = 384  # of a layer's MLP, or of each expert
    experts: int = 0  # MLPs of a layer, of which each token uses a few; 0: one for all tokens
    experts_per_token: int = 2
    shared_experts: int = 0  # further ones, which every token uses
    capacity_factor: float | None = None  # see marks.experts; None: nothing is dropped
    router: str = "softmax"  # or "sigmoid"
    router_bias: bool = False  # added to the scores by which experts are chosen, nowhere else
    stages: int = 1  # stacks of layers, with a stage boundary between them
    dropout: float = 0.0
    dtype: jnp.dtype = jnp.float32  # of activations, and of weights where they are used
    param_dtype: jnp.dtype = jnp.float32  # of weights where they are held
    scan: bool = True  # run the layers by scan, or by a Python loop
    remat: bool = False  # recompute a layer's activations in the backward pass
    loss_chunks: int = 1  # parts of a row whose logits `model.loss` has one after the other
    tied: bool = False  # the embedding is the head too
    qkv_bias: bool = False  # added to queries, keys and values
    qk_norm: str = ""  # of queries and keys before they turn: of each "head", or of all "heads"
    norms: str = "before"  # each sublayer; or "after" it and before it is added; or "both"
    activation: str = "silu"  # of the MLP's gate, or "gelu", by tanh
    rope_theta: float = 10_000.0  # base of the wavelengths of rotary positions
    norm_epsilon: float = 1e-6  # added to the mean square in RMSNorm

    def __post_init__(self):
        for name, wrong, expected in self._mistakes():
            if wrong:
                raise ValueError(f"Config: {name}={getattr(self, name)!r} must be {expected}.")

    def _mistakes(self) -> Iterator[tuple[str, Any, str]]:
        """(field, whether it is wrong, what it has to be) of each."""
        sizes = ("vocab", "embed", "layers", "heads", "kv_heads", "head_dim", "mlp", "stages")
        for name in (*sizes, "loss_chunks"):
            yield name, getattr(self, name) < 1, "at least 1"
        for name in ("experts", "shared_experts"):
            yield name, getattr(self, name) < 0, "0 or more"
        for name in ("rope_theta", "norm_epsilon"):
            yield name, not 0 < getattr(self, name) < float("inf"), "above 0, and finite"
        for name, known in _CHOICES.items():
            yield name, getattr(self, name) not in known, " or ".join(map(repr, known))
        yield "heads", self.heads % self.kv_heads, f"a multiple of kv_heads={self.kv_heads}"
        yield "layers", self.layers % self.stages, f"a multiple of stages={self.stages}"
        yield "head_dim", self.head_dim % 2, "even for rotary positions"
        yield "dropout", not 0 <= self.dropout < 1, "at least 0 and below 1"
        experts, factor = self.experts, self.capacity_factor
        out = experts and not 1 <= self.experts_per_token <= experts
        yield "experts_per_token", out, f"from 1 to experts={experts}"
        yield "shared_experts", self.shared_experts and not experts, "0 where experts=0"
        yield "activation", experts and self.activation != "silu", "'silu' in experts"
        out = factor is not None and not factor > 0
        yield "capacity_factor", out, "above 0, or None for no drops"


class Linear(nnx.Module):
    """A weight of these logical axes, by default without a bias; outputs sum over the axes `over`.

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
    """Root-mean-square normalisation in float32, over embed or other last axes of an activation
    (Zhang and Sennrich, 2019).
    """

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
