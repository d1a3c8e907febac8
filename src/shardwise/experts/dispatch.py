"""Tokens to experts and back, on one device: places in queues, buffers, groups of rows.

Letters: b rows, s tokens of a row, k choices of a token, e embed; n experts, c slots of a buffer.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp


def slots(capacity: float, tokens: int, per_token: int, experts: int) -> int:
    """The number of slots of an expert for one row: `capacity` times what an even router needs.

    It is rounded up, and at most `tokens`. A `capacity` that is not positive is a ValueError.
    """
    if not capacity > 0:
        raise ValueError(f"capacity={capacity}; expected a factor above 0 (1.25), or None.")
    even = capacity * tokens * per_token / experts
    return min(tokens, math.ceil(round(even, 6)))  # a token is in one queue once


def queued(chosen: jax.Array, experts: int, index: jax.Array | None = None) -> jax.Array:
    """The place int32 [b, s, k] of each choice in the queue of its expert, from 0 on.

    `chosen` int [b, s, k] are experts' numbers; one below 0, or from `experts` on, is of none, and
    has the place -1. `index` [b, s] are the tokens' places in the row, if memory's differ.
    """
    b, s, k = chosen.shape
    if index is not None:
        order = jnp.argsort(index, axis=1)
        found = queued(jnp.take_along_axis(chosen, order[..., None], axis=1), experts)
        return jnp.take_along_axis(found, jnp.argsort(order, axis=1)[..., None], axis=1)
    hot = jax.nn.one_hot(chosen.reshape(b, s * k), experts, dtype=jnp.int32)
    return (jnp.sum(jnp.cumsum(hot, axis=1) * hot, axis=2) - 1).reshape(b, s, k)


def buffered(x, chosen, slot, weights, apply: Callable, experts: int, size: int):
    """The weighted sum [b, s, e] of experts' outputs, by buffers [n, b·c, e] of so many slots.

    A choice of another expert or slot is left out, and yields 0.
    """
    b, _, e = x.shape
    rows = jnp.broadcast_to(jnp.arange(b)[:, None, None], chosen.shape)
    beyond = jnp.iinfo(jnp.int32).max  # below 0 an index would count from the end
    at = jnp.where(chosen < 0, beyond, chosen), rows, jnp.where(slot < 0, beyond, slot)
    buffers = jnp.zeros((experts, b, size, e), x.dtype).at[at].set(x[:, :, None], mode="drop")
    found = apply(buffers.reshape(experts, b * size, e)).reshape(experts, b, size, -1)
    return weighted(found.at[at].get(mode="fill", fill_value=0), weights)


def weighted(found, weights):
    """The sum over choices [b, s, e] of found [b, s, k, e], by weights [b, s, k]."""
    return jnp.einsum("bske,bsk->bse", found, weights.astype(found.dtype))


def by_expert(chosen, experts: int):
    """(order int32 [b·s·k], sizes int32 [experts]): the choices' numbers, sorted by their expert.

    A choice below 0, or from `experts` on, is of none: it comes last, and is not in the sizes.
    """
    flat = jnp.where((chosen >= 0) & (chosen < experts), chosen, experts).reshape(-1)
    sizes = jnp.sum(flat[:, None] == jnp.arange(experts)[None], axis=0, dtype=jnp.int32)
    return jnp.argsort(flat, stable=True), sizes


def in_order(found, order, weights):
    """The weighted sum [b, s, e] of rows in this order of choices; 0 for those that it lacks."""
    out = jnp.zeros((weights.size, found.shape[-1]), found.dtype).at[order].set(found)
    return weighted(out.reshape(*weights.shape, -1), weights)


def grouped(x, chosen, weights, apply: Callable, n: int):
    """The weighted sum [b, s, e] of n experts' outputs, without buffers and without drops.

    Rows stand in groups, one for each expert; a choice of none of them yields 0.
    """
    b, s, k = chosen.shape
    order, sizes = by_expert(chosen, n)
    order = order[: b * s * min(k, n)]  # who is of no group comes last
    real = (jnp.arange(order.size) < jnp.sum(sizes))[:, None]
    rows = jnp.where(real, x.reshape(b * s, -1)[order // k], 0)
    return in_order(jnp.where(real, apply(rows, sizes), 0), order, weights)


def check(x, chosen, weights, stacked, experts: int, devices: int, axis: str | None) -> None:
    """Raise ValueError where shapes do not fit each other, or experts the devices of `axis`."""
    if x.ndim != 3 or chosen.shape[:2] != x.shape[:2] or chosen.shape != weights.shape:
        raise ValueError(
            f"marks.experts: x {list(x.shape)}, chosen {list(chosen.shape)}, weights "
            f"{list(weights.shape)}; expected [rows, tokens, embed] and twice [rows, tokens, k]."
        )
    divides(experts, devices, axis)
    found = sorted({jnp.shape(x)[0] for x in jax.tree.leaves(stacked)})
    if found != [experts // devices]:
        place = f"each of {devices} devices of axis {axis!r}" if axis else "one device"
        raise ValueError(
            f"marks.experts: weights of {' and '.join(map(str, found))} experts on {place}, and "
            f"{experts} experts in all; expected those of {experts // devices}."
        )


def divides(experts: int, devices: int, axis: str | None) -> None:
    """Raise ValueError, with the numbers that would do, where experts do not divide."""
    if left := experts % devices:
        would = " or ".join(str(m) for m in (experts - left, experts - left + devices) if m)
        others = ", ".join(str(d) for d in range(1, experts + 1) if experts % d == 0)
        raise ValueError(
            f"{experts} experts do not divide over the {devices} devices of axis {axis!r}: take "
            f"{would} experts, or an axis of {others} devices."
        )
