"""Gathering arrays where they are used; the transpose, which reduces their gradients.

Small arrays that are gathered at one place, a layer's norms and biases, travel together, flattened:
what a collective costs beside its bytes is then paid once. They are there twice meanwhile, flat and
in their own shapes: so they are little of what is gathered there.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardwise.fsdp.arrays import ArrayLayout
from shardwise.mesh import axes_of

SMALL = 2**14  # elements, of the whole arrays that travel together,
SHARE = 8  # and one of so many parts of all that is gathered there


class How(NamedTuple):
    """The settings by which one array is gathered, and its gradient reduced.

    `beside` is its spec over `others`, the mesh axes that the compiler has; None without them.
    """

    axis: tuple[str, ...]
    cut: int
    size: int
    dtype: Any
    reduce_dtype: Any
    beside: P | None = None
    others: frozenset[str] = frozenset()

    @classmethod
    def of(cls, array: ArrayLayout, mesh: Mesh, dtype: Any, reduce_dtype: Any, rows: Sequence):
        """The `How` of an array; None for one that is not gathered. `rows`: the axes by hand."""
        if array.cut is None:
            return None
        axis, size = axes_of(array.spec[array.cut]), array.shape[array.cut]
        pairs = zip(array.spec, array.manual, strict=True)
        entries = [None if by_hand else entry for entry, by_hand in pairs]
        beside, others = P(*entries) if any(entries) else None, frozenset(mesh.shape) - {*rows}
        return cls(axis, array.cut, size, dtype, reduce_dtype or dtype, beside, others)

    def shifted(self, by: int) -> "How":
        """The `How` of an array with `by` more leading axes (below 0: fewer)."""
        beside = self.beside
        if beside is not None:
            beside = P(*[None] * max(by, 0), *list(beside)[max(-by, 0) :])
        return self._replace(cut=self.cut + by, beside=beside)


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """`x` in the dtype asked for, if one is."""
    return x if dtype is None else x.astype(dtype)


def gather(xs: Sequence[jax.Array], hows: Sequence, wholes: Sequence | None) -> list[jax.Array]:
    """The arrays whole; their gradients come back reduced, in shares of the arrays' own dtypes.

    An array without a `How` stays as it is. `wholes` are the arrays if they were gathered before.
    """

    def bundle(xs, wholes, hows):
        @jax.custom_vjp
        def taken(xs, wholes):
            return _gathered(xs, hows) if wholes[0] is None else wholes

        def back(_, grads):
            return [*map(cast, _scattered(grads, hows), dtypes)], None

        dtypes = [x.dtype for x in xs]
        taken.defvjp(lambda *given: (taken(*given), None), back)
        return taken(xs, wholes)

    return _each_bundle(bundle, hows, xs, wholes or [None] * len(xs))


def all_gather(xs: Sequence[jax.Array], hows: Sequence[How | None]) -> list[jax.Array]:
    """The arrays whole, in the dtypes asked for; not to be differentiated."""
    return _each_bundle(_gathered, hows, xs)


def scatter(grads: Sequence[jax.Array], hows: Sequence[How | None]) -> list[jax.Array]:
    """The transpose of `gather`: gradients summed over the devices, to each its own part."""
    return _each_bundle(_scattered, hows, grads)


def _bundles(xs, hows):
    """The numbers of the arrays that travel together, one list for each collective."""
    # Counted whole, whether these are shares, to be gathered, or gradients, to be scattered.
    cut = [(i, x, how) for i, (x, how) in enumerate(zip(xs, hows, strict=True)) if how is not None]
    sizes = {i: x.size // x.shape[how.cut] * how.size for i, x, how in cut}
    most = min(SMALL, sum(sizes.values()) // SHARE)
    found, room = [], {}  # room: {what has to be equal: (members, elements that they may still be)}
    for i, x, how in cut:
        key = how.axis, how.dtype, how.reduce_dtype, x.dtype
        members, left = room.get(key, ([], 0))
        alone = how.beside is not None or sizes[i] > most
        if alone or sizes[i] > left:
            members, left = [], most
            found.append(members)
        members.append(i)
        if not alone:
            room[key] = members, left - sizes[i]
    return found


def _each_bundle(function, hows, *groups):
    """The first group of arrays, with what `function` makes of each bundle in its place."""
    out = list(groups[0])
    for members in _bundles(groups[0], hows):
        own = ([group[i] for i in members] for group in groups)
        found = function(*own, tuple(hows[i] for i in members))
        for i, x in zip(members, found, strict=True):
            out[i] = x
    return out


def _gathered(xs, hows):
    """The arrays whole, by one collective for all of them."""
    xs = [cast(x, how.dtype) for x, how in zip(xs, hows, strict=True)]
    if len(xs) == 1:
        return [_by_hand(jax.lax.all_gather, hows[0], axis=hows[0].cut)(xs[0])]
    xs = [jnp.moveaxis(x, how.cut, 0) for x, how in zip(xs, hows, strict=True)]
    flat = jax.lax.all_gather(jnp.concatenate([x.ravel() for x in xs]), hows[0].axis)
    parts = jnp.split(flat, np.cumsum([x.size for x in xs])[:-1], axis=1)
    return _unflattened(parts, xs, hows)


def _scattered(grads, hows):
    """The shares of gradients summed over devices, by one collective for all of them."""
    grads = [cast(g, how.reduce_dtype) for g, how in zip(grads, hows, strict=True)]
    axis = hows[0].axis
    if len(grads) == 1:
        return [_by_hand(jax.lax.psum_scatter, hows[0], scatter_dimension=hows[0].cut)(grads[0])]
    n = jax.lax.axis_size(axis)
    grads = [jnp.moveaxis(g, how.cut, 0) for g, how in zip(grads, hows, strict=True)]
    flat = jnp.concatenate([g.reshape(n, -1) for g in grads], axis=1)
    flat = jax.lax.psum_scatter(flat, axis, scatter_dimension=0)
    parts = jnp.split(flat, np.cumsum([g.size // n for g in grads])[:-1])
    return _unflattened(parts, grads, hows)


def _by_hand(collective, how, **options):
    """The collective, by hand over the other axes too: where these are left to the compiler, it
    gathers the array over them first, and sends all of it.
    """
    function = functools.partial(collective, axis_name=how.axis, tiled=True, **options)
    if how.beside is None:
        return function
    given = dict(in_specs=how.beside, out_specs=how.beside, axis_names=how.others)
    return jax.shard_map(function, check_vma=False, **given)


def _unflattened(parts, xs, hows):
    """The parts as arrays like `xs`, of any size along axis 0, which goes back to where it is cut.

    In front it makes the flat shares of an array stand one after the other.
    """
    groups = zip(parts, xs, hows, strict=True)
    return [jnp.moveaxis(p.reshape(-1, *x.shape[1:]), 0, how.cut) for p, x, how in groups]
