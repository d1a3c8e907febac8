"""Attention of some queries to some keys in tiles, by a running maximum, and its gradient.

The scores of a tile are all that exists of them at a time (Milakov and Gimelshein, 2018; Rabe and
Staats, 2021; Dao et al., 2022). A tile in which the mask lets nothing through is skipped.

Letters: b rows, s queries and t keys of a tile, k kv heads, g query heads for each, d head_dim (of
values too, which may have another).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardwise import marks

product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


class Sums(NamedTuple):
    """The sums that the softmax of a query needs of the keys seen so far, in float32."""

    top: jax.Array  # the largest score [b, k, g, s]
    total: jax.Array  # the sum of exp(score - top) [b, k, g, s]
    weighted: jax.Array  # the sum of exp(score - top) × value [b, k, g, s, d]


def tiled(x: jax.Array, block: int, axis: int = 1) -> jax.Array:
    """x cut along the tokens' axis into equal tiles of at most `block`, stacked in front.

    At least two, where the size is even: the halves that the zigzag order lets us skip.
    """
    size = x.shape[axis]
    fewest = max(math.ceil(size / block), 2 if size % 2 == 0 else 1)
    count = next(i for i in range(fewest, size + 1) if size % i == 0)
    if size // count < min(size // 2, block // 8):
        raise ValueError(
            f"context: {size} tokens on a device do not cut into tiles between {block // 8} and "
            f"{block} tokens; pad the sequence so that a device has {-(-size // block) * block}, "
            f"or give block={size}."
        )
    cut = x.reshape(*x.shape[:axis], count, size // count, *x.shape[axis + 1 :])
    return jnp.moveaxis(cut, axis, 0)


def joined(tiles: jax.Array) -> jax.Array:
    """The inverse of `tiled`, along axis 1."""
    return jax.lax.collapse(jnp.moveaxis(tiles, 0, 1), 1, 3)


def nothing(q: jax.Array, depth: int) -> Sums:
    """The `Sums` of query tiles [tiles, b, s, k, g, d] before any key, for values of `depth`."""
    tiles, b, s, k, g, _ = q.shape
    zero = jnp.zeros((tiles, b, k, g, s), jnp.float32)
    return Sums(zero - jnp.inf, zero, jnp.zeros((tiles, b, k, g, s, depth), jnp.float32))


def add(sums: Sums, queries: Any, keys: Any, mask: Callable) -> Sums:
    """`sums` and what `keys` contribute: both in tiles, (q, places) and (k, v, places)."""

    def row(given):
        (q, query), sums = given

        def column(sums, keys):
            k, v, key = keys
            visible = marks.seen(marks.Places(*query), marks.Places(*key), mask)
            more = functools.partial(_add, q, k, v, visible)
            return jax.lax.cond(jnp.any(visible), more, lambda sums: sums, sums), None

        return jax.lax.scan(column, sums, keys)[0]

    return jax.lax.map(row, (queries, sums))


def _add(q, k, v, visible, sums):
    scores = jnp.where(visible[:, None, None], _scores(q, k), -jnp.inf)
    top = jnp.maximum(sums.top, scores.max(axis=-1))
    level = jnp.where(jnp.isneginf(top), 0.0, top)  # for a query that has seen nothing yet
    weight, before = jnp.exp(scores - level[..., None]), jnp.exp(sums.top - level)
    weighted = product("bkgst,btkd->bkgsd", weight.astype(v.dtype), v)
    total = sums.total * before + weight.sum(axis=-1)
    return Sums(top, total, sums.weighted * before[..., None] + weighted)


def result(sums: Sums, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """The output's tiles [tiles, b, s, k, g, d], and log(sum of exp(score)) [tiles, b, k, g, s]."""
    out = jnp.moveaxis(sums.weighted / sums.total[..., None], 4, 2)
    return out.astype(dtype), sums.top + jnp.log(sums.total)


def add_gradients(dq: jax.Array, dkv: Any, queries: Any, keys: Any, mask: Callable) -> tuple:
    """(dq, dkv) and what these queries and keys add to them, all in tiles and in float32.

    `queries` are (q, places, gradient of the output, log of the sum, gradient · output).
    """

    def column(dq, given):
        (k, v, key), dkv = given

        def row(dkv, given):
            (q, query, *kept), dq = given
            visible = marks.seen(marks.Places(*query), marks.Places(*key), mask)
            more = functools.partial(_add_gradients, q, k, v, visible, *kept)
            return jax.lax.cond(jnp.any(visible), more, lambda *sums: sums, dkv, dq)

        dkv, dq = jax.lax.scan(row, dkv, (queries, dq))
        return dq, dkv

    return jax.lax.scan(column, dq, (keys, dkv))


def _add_gradients(q, k, v, visible, g, log_total, g_out, dkv, dq):
    weight = jnp.exp(_scores(q, k) - log_total[..., None])
    weight = jnp.where(visible[:, None, None], weight, 0.0)
    dscore = weight * (product("bskgd,btkd->bkgst", g, v) - g_out[..., None]) * q.shape[-1] ** -0.5
    dscore, weight = dscore.astype(k.dtype), weight.astype(g.dtype)
    dk = dkv[0] + product("bkgst,bskgd->btkd", dscore, q)
    dv = dkv[1] + product("bkgst,bskgd->btkd", weight, g)
    return (dk, dv), dq + product("bkgst,btkd->bskgd", dscore, k)


def _scores(q, k):
    return product("bskgd,btkd->bkgst", q, k) * q.shape[-1] ** -0.5
