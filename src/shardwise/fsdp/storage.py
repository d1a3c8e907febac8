"""How arrays are kept between steps: cut evenly, padded where they do not divide."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import tree as trees


class Stored(NamedTuple):
    """How one array is kept: cut along `cut` (None: whole on every device), padded to `padded`."""

    path: str
    shape: tuple
    stacked: bool
    cut: int | None
    padded: int | None

    def spec(self, axis):
        """The PartitionSpec of the stored array."""
        return P() if self.cut is None else P(*[None] * self.cut, axis)

    def local_shape(self, n):
        """What each of `n` devices holds."""
        if self.cut is None:
            return self.shape
        return (*self.shape[: self.cut], self.padded // n, *self.shape[self.cut + 1 :])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sharded:
    """A pytree in its stored form: `tree` has the original structure, with padded, cut arrays.

    Padding is zeros, and storage only: losses and optimizers see `unpad`'s shapes. Elementwise
    operations that map zero to zero may run on the stored form, `optax.apply_updates` for one.
    """

    tree: Any
    layout: tuple = dataclasses.field(metadata=dict(static=True))
    mesh: jax.sharding.Mesh = dataclasses.field(metadata=dict(static=True))
    axis: str = dataclasses.field(metadata=dict(static=True))


def shard(tree, mesh, axis="fsdp", min_size=0, stacked=None):
    """`tree` as `Sharded` over mesh axis `axis`; inside jit, its arrays are born that way.

    Each array of `min_size` elements or more is cut along the axis that wastes the least padding,
    of those the first: its parts are contiguous, and a collective need not transpose them (on CPU
    a reduce-scatter along another axis takes several times as long). A device holds total/n, the
    arrays that are not cut (scalars among them), and padding: of an axis of s elements, below n/s
    of the array. `stacked` says which arrays have a leading axis of layers, never cut, to be
    gathered one layer at a time where the loss calls `marks.use`: a predicate on paths, or
    "layers" for NNX parameters whose `logical_axes` leave that axis unnamed.

    Raises:
      ValueError: the mesh has no such axis, or `stacked` is neither.
    """
    check_axis("fsdp.shard", mesh, axis)
    layout = tuple(
        choose(path, jnp.shape(x), is_stacked, mesh.shape[axis], min_size)
        for path, x, is_stacked in leaves_of(tree, stacked)
    )
    return store(tree, layout, mesh, axis)


def unpad(sharded):
    """The tree in its true shapes; to be called inside jit, where these need not divide."""
    return rebuild(sharded, [_cut_to(x, s.shape, s.cut) for x, s in pairs_of(sharded)])


def gather(sharded):
    """The tree in its true shapes, whole on every device."""
    whole = NamedSharding(sharded.mesh, P())
    return jax.jit(unpad, out_shardings=whole)(sharded)


def describe(sharded):
    """How each array is kept, as text: path, shape, cut axis, padding, bytes on each device."""
    n = sharded.mesh.shape[sharded.axis]
    lines, held, whole = [], 0, 0
    for x, s in pairs_of(sharded):
        true, kept = math.prod(s.shape) * x.dtype.itemsize, x.size * x.dtype.itemsize
        mine = kept // (1 if s.cut is None else n)
        where = "whole" if s.cut is None else f"axis {s.cut}, {kept - true:,} bytes of padding"
        lines.append(f"{s.path:32} {s.shape!s:18} {mine:12,} bytes  {where}")
        held, whole = held + mine, whole + true
    note = " (an axis of size 1: every device holds everything)" if n == 1 else ""
    total = f"{held:,} bytes on each of {n} devices along {sharded.axis!r}{note}; {whole:,} in all"
    return "\n".join([*lines, total])


def leaves_of(tree, stacked):
    """(path, array, whether it has a leading axis of layers) for each leaf."""
    if not (stacked is None or stacked == "layers" or callable(stacked)):
        raise ValueError(
            f"fsdp.shard: stacked={stacked!r}; expected a predicate on paths, or 'layers'."
        )
    for keys, x, box in trees.walk(tree):
        path = "/".join(keys)
        axes = box.get_metadata().get("logical_axes") if hasattr(box, "get_metadata") else None
        named = stacked == "layers" and axes is not None and len(axes) < jnp.ndim(x)
        yield path, x, bool(named or (callable(stacked) and stacked(path)))


def choose(path, shape, stacked, n, min_size):
    axes = [i for i in range(1 if stacked else 0, len(shape)) if shape[i] > 1]
    if not axes or math.prod(shape) < max(min_size, 1):
        return Stored(path, shape, stacked, None, None)
    cut = min(axes, key=lambda i: (-(-shape[i] // n) * n / shape[i], i))
    return Stored(path, shape, stacked, cut, -(-shape[cut] // n) * n)


def store(tree, layout, mesh, axis):
    stored = []
    for x, s in zip(jax.tree.leaves(tree), layout, strict=True):
        x = x if s.cut is None else pad_axis(jnp.asarray(x), s.cut, s.padded)
        # Inside jit a device_put is a wish; a constraint is kept.
        lay = jax.lax.with_sharding_constraint if isinstance(x, jax.core.Tracer) else jax.device_put
        stored.append(lay(x, NamedSharding(mesh, s.spec(axis))))
    return Sharded(jax.tree.unflatten(jax.tree.structure(tree), stored), layout, mesh, axis)


def rebuild(sharded, leaves):
    return jax.tree.unflatten(jax.tree.structure(sharded.tree), leaves)


def pairs_of(sharded):
    return zip(jax.tree.leaves(sharded.tree), sharded.layout, strict=True)


def pad_axis(x, axis, size):
    missing = size - x.shape[axis]
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])


def _cut_to(x, shape, axis):
    return x if axis is None else jax.lax.slice_in_dim(x, 0, shape[axis], axis=axis)


def check_axis(who, mesh, axis):
    if axis not in mesh.shape:
        raise ValueError(
            f"{who}: the mesh has no axis {axis!r}; it has {dict(mesh.shape)}. Make it with "
            f"mesh.make({axis}=-1), or name another axis."
        )
