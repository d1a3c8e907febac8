"""The forms of attention by hand: a ring; K and V gathered; tokens exchanged for heads."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from shardwise import marks
from shardwise.context import tiles
from shardwise.mesh import axes_of

Axis = str | tuple[str, ...]  # one mesh axis, or several as one


class Sent(NamedTuple):
    """The bytes that one device sends in one layer's attention, in its `forward` pass and in its
    `backward` one, by `form.bytes_sent(n, q, k, v)`.
    """

    forward: int
    backward: int


def sizes(n: int, q: Any, k: Any, v: Any = None) -> tuple[int, int, int, int]:
    """Bytes of a device's n-th of q [b, S, h, d] and the output, of k [b, S, kv_heads, d] and v, of
    dK and dV in float32, and of the tokens' places. Without `v` it is like k.
    """
    (*tokens, heads, depth), v = q.shape, k if v is None else v
    queries = math.prod(tokens) // n * heads * (depth + v.shape[-1])
    keys = (math.prod(k.shape) + math.prod(v.shape)) // n
    places = 3 * 4 * q.shape[0] * (q.shape[1] // n)
    return queries * q.dtype.itemsize, keys * k.dtype.itemsize, keys * 4, places


@dataclasses.dataclass(frozen=True)
class Within:
    """`form`, another meaning of `marks.attend`, for whole arrays under jit, outside a shard_map.

    It is a shard_map by itself, manual over `axis`, which cuts the sequence (() where none does),
    and the mesh axes in `rows` and `heads`; others stay the compiler's. Name in `rows` those that
    cut rows: whether a tile is skipped is then asked of a device's rows alone. Name in `heads`
    those that cut heads, if `form` is a kernel, which the compiler cannot cut.
    """

    mesh: Mesh | AbstractMesh
    axis: Axis
    form: Callable
    rows: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()

    def __call__(self, q, k, v, places, mask=marks.causal):
        here = jax.sharding.get_abstract_mesh()
        tokens = P(self.rows or None, self.axis or None)
        spec = P(*tokens, self.heads or None)
        run = jax.shard_map(
            lambda q, k, v, places: self.form(q, k, v, places, mask),
            mesh=self.mesh if here.empty else here,
            in_specs=(spec, spec, spec, tokens),
            out_specs=spec,
            axis_names={*self.rows, *axes_of(self.axis), *self.heads},
            check_vma=False,
        )
        return run(q, k, v, places)


@dataclasses.dataclass(frozen=True)
class Ring:
    """Attention to K and V that go around `axis`; a device never has more than two n-ths of them.

    A meaning of `marks.attend` inside a shard_map (`check_vma=False`) that is manual over `axis`
    (Liu et al., 2023). Keys travel with their places, so any order of the sequence and any mask is
    right. Backward, K and V go around once more, and their gradients with them, summed in float32:
    only the device's own arrays are kept for it. `block` is the most tokens along a side of a tile
    of scores, into which a device's tokens are cut evenly. `apart` says that the mesh's other
    devices may run something else meanwhile, as other stages do: a hop is an all-to-all then, for
    which n - 1 times as much is sent. (A permute waits for all of the mesh's devices on CPU.)

    Raises:
      ValueError: at the call, equal tiles of `block` tokens or fewer would have fewer than
        `block` / 8, as for a large prime number of tokens on a device.
    """

    axis: Axis  # (): one device alone
    block: int = 128
    apart: bool = False

    def __call__(self, q, k, v, places, mask=marks.causal):
        own = jnp.stack(places)
        return attention(self, mask, q, k, v, own, own)

    def bytes_sent(self, n: int, q: Any, k: Any, v: Any = None) -> Sent:
        """The bytes of n - 1 hops of K, V and places, and backward of n hops of dK and dV too."""
        _, keys, gradients, places = sizes(n, q, k, v)
        hop = n - 1 if self.apart else 1
        around = hop * (n - 1) * (keys + places)
        return Sent(around, around + hop * n * gradients if n > 1 else 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attention(ring, mask, q, k, v, query, key):
    """Attention of q [b, s, h, d] to k [b, t, kv_heads, d] and v, which go around `ring`.

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

    sums, keys = _around(ring, step, (tiles.nothing(queries[0], v.shape[-1]), keys))
    out, log_total = tiles.result(tiles.add(sums, queries, keys, mask), q.dtype)
    out = tiles.joined(out).reshape(*q.shape[:3], v.shape[-1])
    return out, (*kept, out, log_total)


def _backward(ring, mask, kept, g):
    q, k, v, query, key, out, log_total = kept
    shape = q.shape
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
    return tiles.joined(dq).reshape(shape).astype(q.dtype), dk, dv, None, None


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


def tiled(
    q: jax.Array, k: jax.Array, v: jax.Array, places: marks.Places, mask: Callable = marks.causal
) -> jax.Array:
    """Attention in tiles, on any device: a meaning of `marks.attend` that never keeps the scores.

    q [b, s, heads, d], k [b, s, kv_heads, d] and v are of the same, whole sequences, at the
    `Places` that `marks.places` returns; `mask` is as in `marks.attend` (Rabe and Staats, 2021).
    """
    return Ring(())(q, k, v, places, mask)


@dataclasses.dataclass(frozen=True)
class AllGather:
    """Attention of a device's queries to K and V gathered over `axis`.

    A meaning of `marks.attend` inside a shard_map that is manual over `axis`. The gathered K and
    V are kept for the backward pass, in which dK and dV are reduce-scattered, in float32.
    """

    axis: Axis

    def __call__(self, q, k, v, places, mask=marks.causal):
        everywhere = gather_places(self.axis, places, q)
        k, v = gather(self.axis, k), gather(self.axis, v)
        return attention(Ring(()), mask, q, k, v, jnp.stack(places), jnp.stack(everywhere))

    def bytes_sent(self, n: int, q: Any, k: Any, v: Any = None) -> Sent:
        """The bytes of n - 1 devices' K, V and places, and backward of as many dK and dV."""
        _, keys, gradients, places = sizes(n, q, k, v)
        return Sent((n - 1) * (keys + places), (n - 1) * gradients)


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

    A meaning of `marks.attend` inside a shard_map that is manual over `axis` (Jacobs et al., 2023).
    `local` is the meaning by which a device computes its heads. `copies` is how often each kv
    head is repeated first, where there are fewer than devices: n has to divide kv_heads · copies,
    and `copies` the query heads of a kv head.

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

    def bytes_sent(self, n: int, q: Any, k: Any, v: Any = None) -> Sent:
        """The bytes of (n - 1)/n of q, copied K and V, and the output; forward also of places."""
        queries, keys, _, places = sizes(n, q, k, v)
        exchanged = (queries + self.copies * keys) * (n - 1) // n
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
