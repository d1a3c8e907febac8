"""A mixture of experts: several gated MLPs, a router that gives each token a few of them, and what
keeps them equally busy: an auxiliary loss, or a bias that no gradient moves.

Letters: b batch, s sequence, e embed, k choices of a token, n experts, c slots, m mlp.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from shardwise import marks
from shardwise.layers import Config, Linear


class Routing(NamedTuple):
    """The decisions of a layer's router; of a decoder, with a leading axis of layers with experts.

    Fields:
      probabilities: float32 [b, s, n], scores that add up to 1, for a loss that balances experts.
      chosen: int32 [b, s, k], the numbers of each token's experts, the best first.
      kept: bool [b, s, k], False where an expert had no slot left.
    """

    probabilities: jax.Array
    chosen: jax.Array
    kept: jax.Array


class Experts(nnx.Module):
    """`config.experts` gated MLPs, of which a token uses those that its router scores highest.

    The router computes in float32 (Fedus et al., 2021). The weights of a token's experts are its
    scores, if there are several divided by their sum (by which one would have no gradient). A bias
    has a part in the choice alone (DeepSeek-AI, 2024): its gradient is 0, and `experts.rebalanced`
    moves it. Shared experts are one wider MLP.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs):
        c, inwards = config, ("experts", "embed", "mlp")
        self.router = Linear(c, ("embed", "router"), ("embed",), rngs, router=c.experts)
        self.gate = Linear(c, inwards, ("embed",), rngs)
        self.up = Linear(c, inwards, ("embed",), rngs)
        self.down = Linear(c, ("experts", "mlp", "embed"), ("mlp",), rngs)
        if c.router_bias:
            self.bias = nnx.Param(jnp.zeros(c.experts, jnp.float32), logical_axes=("router",))
        if c.shared_experts:
            wide = {"mlp": c.mlp * c.shared_experts}
            self.shared_gate = Linear(c, ("embed", "mlp"), ("embed",), rngs, **wide)
            self.shared_up = Linear(c, ("embed", "mlp"), ("embed",), rngs, **wide)
            self.shared_down = Linear(c, ("mlp", "embed"), ("mlp",), rngs, **wide)
        self.config = c

    def __call__(self, x: jax.Array, index: jax.Array | None = None) -> tuple[jax.Array, Routing]:
        """(y, routing) of x [b, s, e]; `index` as in `marks.experts`."""
        c = self.config
        probabilities, chosen, weights = self._route(x)
        stacked = [layer.kernel[...].astype(c.dtype) for layer in (self.gate, self.up, self.down)]
        given = x, chosen, weights, gated, stacked, c.experts, c.capacity_factor, index
        y, kept = marks.experts(*given)
        if c.shared_experts:
            gate, up = (f("bse,em->bsm", x) for f in (self.shared_gate, self.shared_up))
            y = y + self.shared_down("bsm,me->bse", jax.nn.silu(gate) * up)
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


def loads(chosen: jax.Array, mask: jax.Array, experts: int) -> jax.Array:
    """The number of real tokens' choices of each expert, [..., experts]; chosen is [..., b, s, k].

    `mask` [b, s] is 1 for real tokens. Sums over rows: those of parts of a batch add up.
    """
    return jnp.sum(_by_row(chosen, mask, experts), axis=-2)


def penalty(
    chosen: jax.Array, probabilities: jax.Array, mask: jax.Array, over: str = "batch"
) -> jax.Array:
    """The balance loss of n experts, n·Σ f·P (1 for even routing), times the number of real tokens.

    f is the share of all choices that an expert has, P its mean probability (Fedus et al., 2021,
    Switch), over all real tokens of the "batch", or of each of its "rows" (DeepSeek-AI, 2024, a
    complementary loss), averaged over rows by their tokens. chosen [..., b, s, k], probabilities
    [..., b, s, n], mask [b, s]; it is summed over leading axes, of layers. Add this scalar to the
    total of a `Mean` that counts real tokens. Of a part of a batch it has the part's tokens alone.

    Raises:
      ValueError: another `over`; "batch" in several microbatches, none of which sees the others.
    """
    n = probabilities.shape[-1]
    counts = _by_row(chosen, mask, n)
    if over == "batch":
        counts = marks.total(jnp.sum(counts, axis=-2, keepdims=True))
    elif over == "rows":
        counts = marks.total(counts, ("sequence",))
    else:
        raise ValueError(f"experts.penalty: over={over!r}; expected 'batch' or 'rows'.")
    share = counts / jnp.maximum(jnp.sum(counts, axis=-1, keepdims=True), 1)
    each = jnp.sum(probabilities * share[..., None, :], axis=-1)
    lead = (None,) * (each.ndim - mask.ndim)
    return n * jnp.sum(each * mask[lead])


def rebalanced(bias: jax.Array, loads: jax.Array, rate: float = 0.001) -> jax.Array:
    """The router's biases [..., experts] after a step with these `loads` [..., experts] in a batch.

    They go up by `rate` where an expert had fewer choices than the mean, and down where it had
    more (DeepSeek-AI, 2024).
    """
    loads = loads.astype(jnp.float32)
    return bias + rate * jnp.sign(jnp.mean(loads, axis=-1, keepdims=True) - loads)


def _by_row(chosen, mask, experts):
    """The choices of each expert by row, float32 [..., b, experts]: exact below 2²⁴ of a row."""
    hot = jax.nn.one_hot(chosen, experts, dtype=jnp.float32)
    return jnp.einsum("...bskn,bs->...bn", hot, mask.astype(jnp.float32))
