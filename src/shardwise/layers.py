"""The decoder's sizes, and what its layers are made of; `shardwise.model` has the whole."""

import dataclasses

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
    tied: bool = False  # the embedding is the head too
    qkv_bias: bool = False  # added to queries, keys and values
    qk_norm: str = ""  # of queries and keys before they turn: of each "head", or of all "heads"
    norms: str = "before"  # each sublayer; or "after" it and before it is added; or "both"
    activation: str = "silu"  # of the MLP's gate, or "gelu", by tanh
    rope_theta: float = 10_000.0  # base of the wavelengths of rotary positions
    norm_epsilon: float = 1e-6  # added to the mean square in RMSNorm

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
        self._check_experts()
        if not 0 <= self.dropout < 1:
            raise ValueError(f"Config: dropout={self.dropout} must be at least 0 and below 1.")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"Config: {name}={getattr(self, name)!r}; expected "
                    f"{' or '.join(map(repr, known))}."
                )
        for name in ("rope_theta", "norm_epsilon"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"Config: {name}={getattr(self, name)} must be above 0.")

    def _check_experts(self):
        if min(self.experts, self.shared_experts) < 0 or (self.shared_experts and not self.experts):
            raise ValueError(
                f"Config: experts={self.experts} and shared_experts={self.shared_experts} must be "
                f"0 or more, and shared ones stand beside others."
            )
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"Config: experts_per_token={self.experts_per_token} must be from 1 to "
                f"experts={self.experts}."
            )
        if self.experts and self.activation != "silu":
            raise ValueError(f"Config: activation={self.activation!r}; experts have 'silu'.")
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ValueError(
                f"Config: capacity_factor={self.capacity_factor} must be above 0, or None for no "
                f"drops."
            )


class Linear(nnx.Module):
    """A weight, by default without a bias; `fan_in` counts the entries that one output sums over.

    A bias has the shape and the axes of the weight's but the first. The weight is uniform in
    ±√(3/fan_in), hence of variance 1/fan_in: inside jit, uniform draws are bitwise the same under
    every sharding; normal ones are not on every JAX that we support.
    """

    def __init__(
        self,
        config: Config,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        fan_in: int,
        rngs: nnx.Rngs,
        bias: bool = False,
    ):
        limit = (3 / fan_in) ** 0.5
        kernel = jax.random.uniform(rngs.params(), shape, config.param_dtype, -limit, limit)
        self.kernel = nnx.Param(kernel, logical_axes=axes)
        if bias:
            zeros = jnp.zeros(shape[1:], config.param_dtype)
            self.bias = nnx.Param(zeros, logical_axes=axes[1:])
        self.has_bias, self.dtype = bias, config.dtype

    def __call__(self, letters, x):
        y = jnp.einsum(letters, x, self.kernel[...].astype(self.dtype))
        return y + self.bias[...].astype(self.dtype)[None, None] if self.has_bias else y


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
