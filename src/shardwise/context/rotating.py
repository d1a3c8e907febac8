"""The ring: K and V visit every device, one hop at a time (Liu et al., 2023)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from shardwise import marks
from shardwise.context import tiles
from shardwise.context.forms import Axis, Sent, sizes


@dataclasses.dataclass(frozen=True)
class Ring:
    """Attention to K and V that go around `axis`; a device never has more than two n-ths of them.

    A meaning for `marks.attend` inside a shard_map (`check_vma=False`) that is manual over `axis`.
    Keys travel with their places, so any order of the sequence and any mask is right. Backward, K
    and V go around once more, and their gradients with them, summed in float32: only the device's
    own arrays are kept for it. `block` is the largest tile of scores. `apart` says that the mesh's
    other devices may run something else meanwhile, as other stages do: a hop is an all-to-all then,
    for which n - 1 times as much is sent. (A permute waits for all of the mesh's devices on CPU.)
    """

    axis: Axis  # (): one device alone
    block: int = 128
    apart: bool = False

    def __call__(self, q, k, v, places, mask=marks.causal):
        own = jnp.stack(places)
        return attention(self, mask, q, k, v, own, own)

    def bytes_sent(self, n: int, q: Any, k: Any) -> Sent:
        """The `Sent`: n - 1 hops of K, V and places each way, and n hops of dK and dV."""
        _, keys, gradients, places = sizes(n, q, k)
        hop = n - 1 if self.apart else 1
        around = hop * (n - 1) * (2 * keys + places)
        return Sent(around, around + hop * 2 * n * gradients if n > 1 else 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attention(ring, mask, q, k, v, query, key):
    """Attention of q [b, s, h, d] to k and v [b, t, kv_heads, d], which go around `ring`.

    `query` int32 [3, b, s] and `key` [3, b, t] are the fields of their `marks.Places`.
    """
    return _forward(ring, mask, q, k, v, query, key)[0]


def _forward(ring, mask, q, k, v, query, key):
    kept = q, k, v, query, key
    # Tied to q: JAX would take what depends on places alone, the mask of every tile, out of a scan
    # over layers, and keep it.
    q, query, key = jax.lax.optimization_barrier((q, query, key))
    queries, keys = _cut(ring.block, q, k, v, query, key)

    def step(carry, _):
        sums, keys = carry
        arriving = _hop(ring, keys)  # while these are worked on
        return (tiles.add(sums, queries, keys, mask), arriving), None

    sums, keys = _around(ring, step, (tiles.nothing(queries[0]), keys))
    out, log_total = tiles.result(tiles.add(sums, queries, keys, mask), q.dtype)
    out = tiles.joined(out).reshape(q.shape)
    return out, (*kept, out, log_total)


def _backward(ring, mask, kept, g):
    q, k, v, query, key, out, log_total = kept
    g_out = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
    g, g_out = (_grouped(x, k, ring.block) for x in (g, g_out))
    (q, query), keys = _cut(ring.block, q, k, v, query, key)
    queries = q, query, g, log_total, jnp.moveaxis(g_out[..., 0], 2, 4)
    zeros = functools.partial(jnp.zeros_like, dtype=jnp.float32)

    def step(carry, _):
        dq, dkv, keys = carry
        arriving = _hop(ring, keys)
        dq, dkv = tiles.add_gradients(dq, dkv, queries, keys, mask)
        return (dq, _hop(ring, dkv), arriving), None

    dq, dkv, keys = _around(ring, step, (zeros(q), (zeros(keys[0]), zeros(keys[1])), keys))
    dq, dkv = tiles.add_gradients(dq, dkv, queries, keys, mask)
    dk, dv = (tiles.joined(x).astype(k.dtype) for x in _hop(ring, dkv))  # home
    return tiles.joined(dq).reshape(out.shape).astype(out.dtype), dk, dv, None, None


attention.defvjp(_forward, _backward)


def _cut(block, q, k, v, query, key):
    """((q, their places), (k, v, their places)) in tiles."""
    keys = tiles.tiled(k, block), tiles.tiled(v, block), tiles.tiled(key, block, axis=2)
    return (_grouped(q, k, block), tiles.tiled(query, block, axis=2)), keys


def _grouped(x, k, block):
    """x [b, s, h, ...] in tiles of queries, its heads grouped by the kv head that serves them."""
    b, s, h, d = x.shape
    return tiles.tiled(x.reshape(b, s, k.shape[2], h // k.shape[2], d), block)


def _around(ring, step, carry):
    """The carry after all steps but the last, after which no keys have to be sent on."""
    n = jax.lax.axis_size(ring.axis)
    return carry if n == 1 else jax.lax.scan(step, carry, length=n - 1)[0]


def _hop(ring, arrays):
    """The arrays of the device before this one."""
    n = jax.lax.axis_size(ring.axis)
    if n == 1:
        return arrays
    if not ring.apart:
        return jax.lax.ppermute(arrays, ring.axis, [(i, (i + 1) % n) for i in range(n)])
    me = jax.lax.axis_index(ring.axis)

    def exchanged(x):
        out = jnp.zeros((n, *x.shape), x.dtype).at[(me + 1) % n].set(x)
        return jax.lax.all_to_all(out, ring.axis, 0, 0)[(me - 1) % n]

    return jax.tree.map(exchanged, arrays)
