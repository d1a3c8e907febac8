"""Sums over rows in one order, whatever device has the rows: blocks, added up as a binary tree.

A sum of floating-point numbers depends on its order, and so on the number of devices. Here a batch
is so many blocks of consecutive rows, each computed alone by one program, and block c stands at
leaf c of a binary tree of sums. Of c = (a · here + b) · inner + i, devices along the `outer` axes
have the numbers a, those along the `inner` ones i, and each computes its own b one after the other.
So the tree's lowest levels are sums over inner axes, of shares where arrays are cut along them, the
next ones are within a device, and the highest over outer axes: as many bytes as with microbatches.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from shardwise import jaxprs, marks
from shardwise.objective.means import wide

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The division of a batch into `count` blocks, over `inner` and `outer` mesh axes by hand.

    For use where these axes have names; `here` of the blocks are this device's.
    """

    count: int
    inner: Axes
    outer: Axes

    @property
    def here(self) -> int:
        """The number of a device's own blocks."""
        return self.count // (_size(self.inner) * _size(self.outer))

    def numbers(self) -> jax.Array:
        """The numbers of a device's own blocks, int32 [here]."""
        outer = jax.lax.axis_index(self.outer) if self.outer else 0
        inner = jax.lax.axis_index(self.inner) if self.inner else 0
        own = outer * self.here + jnp.arange(self.here, dtype=jnp.int32)
        return own * _size(self.inner) + inner

    def split(self, batch: Any) -> Any:
        """Each array [rows, ...], of consecutive rows of the batch, as a device's blocks of them.

        Devices along the inner axes, whose blocks take turns, exchange rows for that.
        """
        return jax.tree.map(
            lambda x: self._exchanged(x.reshape(self.here, -1, *x.shape[1:])), batch
        )

    def _exchanged(self, x):
        n, here = _size(self.inner), self.here
        if n == 1 or here == 1:
            return x
        i, own = jax.lax.axis_index(self.inner), jnp.arange(here)
        each = max(here // n, 1)
        if here >= n:
            sent = jnp.swapaxes(x.reshape(each, n, *x.shape[1:]), 0, 1)
        else:  # to some of the devices alone
            sent = jnp.zeros((n, *x.shape[1:]), x.dtype).at[(i * here + own) % n].set(x)[:, None]
        got = jax.lax.all_to_all(sent, self.inner, 0, 0)
        got = got.reshape(n * each, *x.shape[1:])
        return got if here >= n else got[own * n // here + i // here]

    def here_on(self, mesh: Mesh) -> int:
        """The number of blocks of a device of `mesh`."""
        return self.count // math.prod(mesh.shape[name] for name in (*self.inner, *self.outer))

    def in_order(self, x: jax.Array, mesh: Mesh) -> jax.Array:
        """An array of rows, whole and as devices have them, in the batch's own order again."""
        n, here = math.prod(mesh.shape[name] for name in self.inner), self.here_on(mesh)
        parts = x.reshape(-1, n, here, x.shape[0] // self.count, *x.shape[1:])
        return jnp.swapaxes(parts, 1, 2).reshape(x.shape)

    def total(self, stacked: jax.Array) -> jax.Array:
        """The sum of an array of each block; `stacked` [here, ...] has those of this device."""
        x = over([stacked.astype(wide(stacked.dtype))], self.inner)[0]
        return over([tree(x)], self.outer)[0]

    def reduced(self, stacked: jax.Array, way: str) -> jax.Array:
        """The array that `way` makes of one of each block, on every device; of rows, its own."""
        if way == "concatenate":
            if stacked.ndim < 2:
                raise ValueError("aux='concatenate' of a scalar; expected an array that has rows.")
            return stacked.reshape(-1, *stacked.shape[2:])
        if way == "max":
            axes = (*self.inner, *self.outer)
            return jax.lax.pmax(jnp.max(stacked, axis=0), axes)
        x = self.total(stacked)
        return (x / self.count if way == "mean" else x).astype(stacked.dtype)

    def added(self, one: Callable[[Any], tuple[Any, Any]], steps: Any) -> tuple[Any, Any]:
        """(sum, stacked) of the two that `one` makes of each of this device's blocks, `steps`.

        A sum waits until its neighbour of as many blocks is there, as a counter carries, so that
        there are as many as the number of blocks has digits.
        """
        first = jax.tree.map(lambda x: x[0], steps)
        summed, kept = jax.eval_shape(one, first)
        sums = jax.tree.map(
            lambda x: jnp.zeros((self.here.bit_length(), *x.shape), x.dtype), summed
        )
        kept = jax.tree.map(lambda x: jnp.zeros((self.here, *x.shape), x.dtype), kept)

        def turn(state):
            j, sums, kept = state
            # Of one block alone, all would else be the same in each turn, and leave the loop.
            step, j = jax.lax.optimization_barrier((_at(steps, j), j))
            found, new = one(step)
            return j + 1, _carried(sums, found, j), _put(kept, new, j)

        # A loop of one turn, were it known, would be joined with what is around it.
        turns = jnp.where(jaxprs.always(steps[0]), self.here, 0)
        with marks.turns(self.here):
            _, sums, kept = jax.lax.while_loop(lambda s: s[0] < turns, turn, (0, sums, kept))
        return jax.tree.map(lambda x: x[-1], sums), kept


def tree(x: jax.Array) -> jax.Array:
    """The sum along the first axis, whose size is a power of two, as a binary tree."""
    while x.shape[0] > 1:
        x = x[0::2] + x[1::2]
    return x[0]


def over(xs: Sequence[jax.Array], axes: Axes) -> list[jax.Array]:
    """The arrays of one dtype, each added up over these mesh axes as a tree; whole everywhere.

    An exchange of parts, the tree, and a gather of sums: the bytes of an all-reduce.
    """
    n = _size(axes)
    if n == 1 or not xs:
        return list(xs)
    flat = jnp.concatenate([x.ravel() for x in xs])
    flat = jnp.pad(flat, (0, -flat.size % n))
    own = scatter(flat.reshape(n, -1), axes)
    flat = jax.lax.all_gather(own, axes, tiled=True)
    ends = list(itertools.accumulate(x.size for x in xs))
    parts = jnp.split(flat, ends)
    return [part.reshape(x.shape) for part, x in zip(parts, xs, strict=False)]


def scatter(parts: jax.Array, axes: Axes) -> jax.Array:
    """The sum over devices of the part that is this one's; `parts` [devices, ...] has all.

    It is sent in the dtype that is given, and added up in a wide one.
    """
    parts = jax.lax.all_to_all(parts, axes, 0, 0) if parts.shape[0] > 1 else parts
    return tree(parts.astype(wide(parts.dtype)))


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """`x` in this dtype, rounded there in every program: compilers leave a narrow one out that is
    widened again.
    """
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < jnp.finfo(x.dtype).bits:
        told = jnp.finfo(dtype)
        x = jax.lax.reduce_precision(x, told.nexp, told.nmant)
    return x.astype(dtype)


def _carried(sums, found, j):
    """`sums`, of 1, 2, 4 ... blocks, after what is `found` of block j."""

    def add(state):
        level, x = state
        return level + 1, jax.tree.map(jnp.add, _at(sums, level), x)

    level, x = jax.lax.while_loop(lambda s: (j >> s[0]) & 1 == 1, add, (0, found))
    return _put(sums, x, level)


def _at(tree, i):
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def _put(tree, new, i):
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, i, 0), tree, new)


def _size(axes):
    return jax.lax.axis_size(axes) if axes else 1
