"""A mixture of experts: several gated MLPs, and a router that gives each token a few of them.

Letters: b batch, s sequence, e embed, k choices of a token, n experts, c slots, m mlp.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from shardwise import marks
from shardwise.layers import Config, Linear


class Routing(NamedTuple):
    """The decisions of a layer's router; of a decoder, with a leading axis of layers.

    probabilities: float32 [b, s, n], scores that add up to 1, for a loss that balances experts;
    chosen: int32 [b, s, k], the numbers of each token's experts, the best first;
    kept: bool [b, s, k], False where an expert had no slot left.
    """

    probabilities: jax.Array
    chosen: jax.Array
    kept: jax.Array


class Experts(nnx.Module):
    """`config.experts` gated MLPs, of which a token uses those that its router scores highest.

    The router computes in float32 (Fedus et al., 2021). The weights of a token's experts are its
    scores there, divided by their sum if there are several; with one, the score itself, or the
    router would have no gradient. A bias, where there is one, has a part in the choice alone
    (DeepSeek-AI, 2024): its gradient is 0, and `experts.rebalanced` moves it. Shared experts are
    one wider MLP that every token uses.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs):
        c, n = config, config.experts
        self.router = Linear(c, (c.embed, n), ("embed", "router"), c.embed, rngs)
        inwards, outwards = ("experts", "embed", "mlp"), ("experts", "mlp", "embed")
        self.gate = Linear(c, (n, c.embed, c.mlp), inwards, c.embed, rngs)
        self.up = Linear(c, (n, c.embed, c.mlp), inwards, c.embed, rngs)
        self.down = Linear(c, (n, c.mlp, c.embed), outwards, c.mlp, rngs)
        if c.router_bias:
            self.bias = nnx.Param(jnp.zeros(n, jnp.float32), logical_axes=("router",))
        if c.shared_experts:
            wide = c.mlp * c.shared_experts
            self.shared_gate = Linear(c, (c.embed, wide), ("embed", "mlp"), c.embed, rngs)
            self.shared_up = Linear(c, (c.embed, wide), ("embed", "mlp"), c.embed, rngs)
            self.shared_down = Linear(c, (wide, c.embed), ("mlp", "embed"), wide, rngs)
        self.config = c

    def __call__(self, x: jax.Array, index: jax.Array | None = None) -> tuple[jax.Array, Routing]:
        """(y, routing) of x [b, s, e]; `index` as in `marks.experts`."""
        c = self.config
        probabilities, chosen, weights = self._route(x)
        stacked = [layer.kernel[...].astype(c.dtype) for layer in (self.gate, self.up, self.down)]
        y, kept = marks.experts(
            x, chosen, weights, gated, stacked, c.experts, c.capacity_factor, index
        )
        if c.shared_experts:
            inner = jax.nn.silu(self.shared_gate("bse,em->bsm", x)) * self.shared_up(
                "bse,em->bsm", x
            )
            y = y + self.shared_down("bsm,me->bse", inner)
        return y, Routing(probabilities, chosen, kept)

    def _route(self, x):
        c = self.config
        kernel = self.router.kernel[...].astype(jnp.float32)
        logits = jnp.einsum("bse,en->bsn", x.astype(jnp.float32), kernel)
        score = jax.nn.softmax(logits, axis=-1) if c.router == "softmax" else jax.nn.sigmoid(logits)
        ranked = score + self.bias[...][None, None] if c.router_bias else score
        chosen = jax.lax.top_k(jax.lax.stop_gradient(ranked), c.experts_per_token)[1]
        weights = jnp.take_along_axis(score, chosen, axis=-1)
        if c.experts_per_token > 1:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return score / jnp.sum(score, axis=-1, keepdims=True), chosen, weights


def gated(stacked: Any, xs: jax.Array, sizes: jax.Array | None = None) -> jax.Array:
    """The experts' gated MLPs, each on its own rows: of xs [n, c, e], or of groups of xs [rows, e].

    `stacked` is (gate [n, e, m], up [n, e, m], down [n, m, e]).
    """
    gate, up, down = stacked

    def product(a, w):
        if sizes is None:
            return jnp.einsum("nce,nem->ncm", a, w)
        return jax.lax.ragged_dot(a, w, sizes)

    xs = xs if sizes is not None else marks.constrain(xs, "expert_inputs")
    return product(jax.nn.silu(product(xs, gate)) * product(xs, up), down)
