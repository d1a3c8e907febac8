"""Keeping experts equally busy: an auxiliary loss, or a bias that no gradient moves."""

import jax
import jax.numpy as jnp

from shardwise import marks


def loads(chosen: jax.Array, mask: jax.Array, experts: int) -> jax.Array:
    """The number of real tokens' choices of each expert, [..., experts]; chosen is [..., b, s, k].

    `mask` [b, s] is 1 for real tokens. Sums over rows: those of parts of a batch add up.
    """
    return jnp.sum(_by_row(chosen, mask, experts), axis=-2)


def penalty(
    chosen: jax.Array, probabilities: jax.Array, mask: jax.Array, over: str = "batch"
) -> jax.Array:
    """The balance loss as a sum over real tokens: divided by their number it is n·Σ f·P.

    f is the share of all choices that an expert has, P its mean probability (Fedus et al., 2021,
    Switch), over all real tokens of the "batch", or of each of its "rows" (DeepSeek-AI, 2024, a
    complementary loss), averaged over rows by their tokens. Even routing gives 1. With leading axes
    (of layers) it is summed over them. chosen [..., b, s, k], probabilities [..., b, s, n],
    mask [b, s].

    Over the batch it needs `marks.total`: exact where rows are cut over devices, and refused with
    several microbatches, of which none sees the whole batch. Over rows it is exact for both.
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
    """The biases [..., experts] after a step in which experts had these loads.

    Up by `rate` where an expert had fewer choices than the mean, down where it had more
    (DeepSeek-AI, 2024). The loads must be those of the whole batch, of all devices and all
    microbatches: the sign of a part's is another.
    """
    loads = loads.astype(jnp.float32)
    return bias + rate * jnp.sign(jnp.mean(loads, axis=-1, keepdims=True) - loads)


def _by_row(chosen, mask, experts):
    """The choices of each expert by row, float32 [..., b, experts]: exact below 2²⁴ of a row."""
    hot = jax.nn.one_hot(chosen, experts, dtype=jnp.float32)
    return jnp.einsum("...bskn,bs->...bn", hot, mask.astype(jnp.float32))
