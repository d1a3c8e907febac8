"""Attention with a cut sequence as recipes have it: meanings of `marks.attend` in plain JAX."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from shardwise import marks


@dataclasses.dataclass(frozen=True)
class PlainRing:
    """K and V go around in a Python loop, softmax is summed up; JAX differentiates all of it."""

    axis: str

    def __call__(self, q, k, v, places, mask=marks.causal):
        n = jax.lax.axis_size(self.axis)
        hop = [(i, (i + 1) % n) for i in range(n)]
        b, s, h, d = q.shape
        group = h // k.shape[2]
        top = jnp.full((b, h, s), -jnp.inf)
        total, out = jnp.zeros((b, h, s)), jnp.zeros((b, h, s, d))
        key = places
        for i in range(n):
            wide = (jnp.repeat(x, group, axis=2) for x in (k, v))
            top, total, out = _block(q, *wide, marks.seen(places, key, mask), top, total, out)
            if i < n - 1:
                k, v, key = jax.lax.ppermute((k, v, key), self.axis, hop)
        return jnp.moveaxis(out / total[..., None], 1, 2).astype(q.dtype)


def _block(q, k, v, visible, top, total, out):
    scores = jnp.einsum("bshd,bthd->bhst", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    highest = jnp.maximum(top, jax.lax.stop_gradient(scores.max(axis=-1)))
    level = jnp.where(jnp.isneginf(highest), 0.0, highest)
    before, weight = jnp.exp(top - level), jnp.exp(scores - level[..., None])
    out = out * before[..., None] + jnp.einsum("bhst,bthd->bhsd", weight, v)
    return highest, total * before + weight.sum(axis=-1), out


@dataclasses.dataclass(frozen=True)
class PlainGather:
    """All of K and V is gathered, and every score of the device's queries computed at once."""

    axis: str

    def __call__(self, q, k, v, places, mask=marks.causal):
        k, v = (jax.lax.all_gather(x, self.axis, axis=1, tiled=True) for x in (k, v))
        key = (jax.lax.all_gather(x, self.axis, axis=1, tiled=True) for x in places)
        visible = marks.seen(places, marks.Places(*key), mask)[:, None]
        group = q.shape[2] // k.shape[2]
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
        scores = jnp.einsum("bshd,bthd->bhst", q, k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        return jnp.einsum("bhst,bthd->bshd", weights, v)


RECIPES: dict[str, Callable] = {"ring": PlainRing, "all_gather": PlainGather}  # by form
