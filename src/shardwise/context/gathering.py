"""A whole sequence on each device: K and V are gathered, or tokens exchanged for heads."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardwise import marks
from shardwise.context.forms import Axis, Sent, sizes
from shardwise.context.rotating import Ring, attention


def tiled(
    q: jax.Array, k: jax.Array, v: jax.Array, places: marks.Places, mask: Callable = marks.causal
) -> jax.Array:
    """Attention in tiles, on any device: a meaning of `marks.attend` that never keeps the scores.

    q [b, s, h, d]; k and v [b, s, k, d] of the same, whole sequences (Rabe and Staats, 2021).
    """
    return Ring(())(q, k, v, places, mask)


@dataclasses.dataclass(frozen=True)
class AllGather:
    """Attention of a device's queries to K and V gathered over `axis`.

    A meaning for `marks.attend` inside a shard_map that is manual over `axis`. The gathered K and
    V are kept for the backward pass, in which dK and dV are reduce-scattered, in float32.
    """

    axis: Axis

    def __call__(self, q, k, v, places, mask=marks.causal):
        everywhere = gather_places(self.axis, places, q)
        k, v = gather(self.axis, k), gather(self.axis, v)
        return attention(Ring(()), mask, q, k, v, jnp.stack(places), jnp.stack(everywhere))

    def bytes_sent(self, n: int, q: Any, k: Any) -> Sent:
        """The `Sent`: n - 1 other devices' K, V and places, and as many parts of dK and dV."""
        _, keys, gradients, places = sizes(n, q, k)
        return Sent((n - 1) * (2 * keys + places), (n - 1) * 2 * gradients)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather(axis: Axis, x: jax.Array) -> jax.Array:
    """x [b, s, ...] of all devices along `axis`, [b, S, ...]; its gradient is summed in float32."""
    return jax.lax.all_gather(x, axis, axis=1, tiled=True)


def _scatter(axis, _, g):
    total = jax.lax.psum_scatter(g.astype(jnp.float32), axis, scatter_dimension=1, tiled=True)
    return (total.astype(g.dtype),)


gather.defvjp(lambda axis, x: (gather(axis, x), None), _scatter)


def gather_places(axis: Axis, places: marks.Places, q: jax.Array) -> marks.Places:
    """The `Places` of all tokens along `axis`, in the order of `gather`; gathered for each q."""
    # Tied to q: otherwise a scan over layers gathers them once, or in each, as JAX sees fit.
    own = jax.lax.optimization_barrier((jnp.stack(places), jax.lax.stop_gradient(q)))[0]
    return marks.Places(*jax.lax.all_gather(own, axis, axis=2, tiled=True))


@dataclasses.dataclass(frozen=True)
class Ulysses:
    """Attention to the whole sequence by an n-th of the heads, with all-to-alls before and after.

    Bound as `AllGather`; `local`, another meaning of `marks.attend`, is what a device computes. n
    has to divide the kv heads, each of which is first copied `copies` times.

    Raises:
      ValueError: at the call, n does not divide the heads or the copied kv heads.
    """

    axis: Axis
    copies: int = 1
    local: Callable = tiled

    def __call__(self, q, k, v, places, mask=marks.causal):
        self._check(jax.lax.axis_size(self.axis), q.shape[2], k.shape[2])
        if self.copies > 1:
            k, v = (jnp.repeat(x, self.copies, axis=2) for x in (k, v))
        everywhere = gather_places(self.axis, places, q)
        q, k, v = (jax.lax.all_to_all(x, self.axis, 2, 1, tiled=True) for x in (q, k, v))
        out = self.local(q, k, v, everywhere, mask)
        return jax.lax.all_to_all(out, self.axis, 1, 2, tiled=True)

    def bytes_sent(self, n: int, q: Any, k: Any) -> Sent:
        """The `Sent`: (n - 1) / n of q, copied K and V, and the output; forward, also places."""
        queries, keys, _, places = sizes(n, q, k)
        exchanged = 2 * (queries + self.copies * keys) * (n - 1) // n
        return Sent(exchanged + (n - 1) * places, exchanged)

    def _check(self, n, heads, kv_heads):
        if heads % n:
            raise ValueError(
                f"context.ulysses: {heads} heads do not divide among {n} devices; {heads} heads "
                f"do among {_divisors(heads)}, and ring and all_gather work for any number."
            )
        group = heads // kv_heads
        if group % self.copies or (kv_heads * self.copies) % n:
            copies = next(c for c in _divisors(group) if kv_heads * c % n == 0)
            raise ValueError(
                f"context.ulysses: {kv_heads} kv heads, copied {self.copies} times for {heads} "
                f"heads, do not divide among {n} devices. Cut over {_divisors(kv_heads)} devices, "
                f"copy each kv head copies={copies} times, or use ring or all_gather."
            )


def _divisors(size):
    return [i for i in range(1, size + 1) if size % i == 0]
