"""How arrays are kept between steps: cut evenly, padded where they do not divide."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise.fsdp.planning import parts_of, plan


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
    axis: str | tuple[str, ...] = dataclasses.field(metadata=dict(static=True))

    @property
    def parts(self) -> int:
        """Into how many an array is cut: the size of the axis."""
        return parts_of(self.mesh, self.axis)

    def to_checkpoint(self, abstract: bool) -> tuple[Any, list[tuple[int, ...]]]:
        """The original tree, of padded arrays or (`abstract`) what they are, and true shapes."""
        leaves = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec))
            if abstract
            else x
            for x, spec in ((x, s.spec(self.axis)) for x, s in pairs_of(self))
        ]
        return rebuild(self, leaves), [s.shape for s in self.layout]

    def from_checkpoint(self, arrays: list[jax.Array]) -> "Sharded":
        """The same, of other padded arrays."""
        return dataclasses.replace(self, tree=rebuild(self, arrays))


def place(
    tree: Any,
    mesh: jax.sharding.Mesh,
    axis: str | tuple[str, ...] = "fsdp",
    min_size: int = 0,
    stacked: Callable[[str], bool] | str | None = None,
    over: Callable[[Any, jax.sharding.Mesh], Any] | None = None,
    apart: Callable[[Any, jax.sharding.Mesh], Any] | None = None,
) -> Sharded:
    """`tree` as `Sharded` over mesh axis `axis`; inside jit, its arrays are born that way.

    `axis` may be a tuple of mesh axes, together one; of none, every array stays whole.

    Each array of `min_size` elements or more is cut along the axis that wastes the least padding,
    of those the first: its parts are contiguous, and a collective need not transpose them (on CPU
    a reduce-scatter along another axis takes several times as long). A device holds total/n, the
    arrays that are not cut (scalars among them), and padding: of an axis of s elements, below n/s
    of the array. `stacked` says which arrays have a leading axis of layers, never cut, to be
    gathered one layer at a time where the loss calls `marks.use`: a predicate on paths, or
    "layers" for parameters that carry names (NNX metadata, Linen's boxes), of which the first is
    "layers", or which leave the first axis unnamed.

    `over`, a rule such as `rules.LogicalRules`, lays arrays out over the mesh's other axes: of
    what it leaves whole, one axis is cut along `axis` (of a bias that it cuts, none is left).
    `apart`, a rule too, cuts arrays over axes by hand along which they are never gathered: each
    device uses its own part (`experts`). What it cuts along `axis` is cut by nothing else.

    Raises:
      ValueError: the mesh has no such axis or is not Auto, `stacked` is neither, or `over` uses
        `axis`.
    """
    return store(tree, plan(tree, mesh, axis, min_size, stacked, over, apart), mesh, axis)


def unpad(sharded: Sharded) -> Any:
    """The tree in its true shapes; to be called inside jit, where these need not divide."""
    return rebuild(sharded, [_cut_to(x, s.shape, s.cut) for x, s in pairs_of(sharded)])


def whole(sharded: Sharded) -> Any:
    """The tree in its true shapes, whole on every device."""
    everywhere = NamedSharding(sharded.mesh, P())
    return jax.jit(unpad, out_shardings=everywhere)(sharded)


def describe(sharded: Sharded) -> str:
    """How each array is kept, as text: path, shape, cut axis, padding, bytes on each device."""
    n = sharded.parts
    lines, held, whole = [], 0, 0
    wide = max((len(s.path) for s in sharded.layout), default=0)
    for x, s in pairs_of(sharded):
        true, kept = math.prod(s.shape) * x.dtype.itemsize, x.size * x.dtype.itemsize
        axes = jax.tree.leaves(tuple(s.spec(sharded.axis)))
        mine = kept // math.prod(sharded.mesh.shape[name] for name in axes)
        where = "whole" if s.cut is None else f"axis {s.cut}, {kept - true:,} bytes of padding"
        where += f", beside it P({', '.join(map(repr, s.beside))})" if any(s.beside) else ""
        lines.append(f"{s.path:{wide}}  {s.shape!s:18} {mine:12,} bytes  {where}")
        held, whole = held + mine, whole + true
    note = " (an axis of size 1: every device holds everything)" if n == 1 else ""
    total = f"{held:,} bytes on each of {n} devices along {sharded.axis!r}{note}; {whole:,} in all"
    return "\n".join([*lines, total])


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


def check_params(params: Any, mesh: jax.sharding.Mesh, axis: str, who: str) -> None:
    """Raise where these are no parameters for `who`, a loss's gradient over this mesh and axis."""
    if not isinstance(params, Sharded):
        raise TypeError(
            f"{who}: the parameters are a {type(params).__name__}; expected what "
            f"{who.split('.')[0]}.place returns."
        )
    for x, s in pairs_of(params):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(
                f"{who}: {s.path} is {x.dtype}, which has no gradient; pass keys and counters in "
                f"the batch or as further arguments."
            )
    around = jax.sharding.get_abstract_mesh()
    if not around.empty and around != mesh.abstract_mesh:
        raise ValueError(
            f"{who}: jax.set_mesh has set another mesh, {dict(around.shape)} of axis types "
            f"{around.axis_types}; set {dict(mesh.shape)} as mesh.make makes it, for which this "
            f"function is, or none."
        )
    if (params.mesh, params.axis) != (mesh, axis):
        raise ValueError(
            f"{who}: the parameters are sharded along {params.axis!r} of "
            f"{dict(params.mesh.shape)}, and this function is for {axis!r} of {dict(mesh.shape)}; "
            f"shard them for the same mesh, devices and axis."
        )
