"""How each array is to be kept: along which axis it is cut, and beside which other cuts."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shardwise import tree as trees
from shardwise.mesh import check_auto


class Stored(NamedTuple):
    """How one array is kept: cut along `cut` (None: whole on every device), padded to `padded`.

    `beside` are the entries of its PartitionSpec over the mesh's other axes; `apart` those over
    axes by hand along which it is never gathered: each device uses its own part, as of experts.
    """

    path: str
    shape: tuple
    stacked: bool
    cut: int | None
    padded: int | None
    beside: tuple = ()
    apart: tuple = ()

    def spec(self, axis: "str | tuple[str, ...]") -> P:
        """The PartitionSpec of the stored array."""
        return self._over(axis, self.beside, self.apart)

    def manual(self, axis: "str | tuple[str, ...]") -> P:
        """Of these, the entries that are by hand."""
        return self._over(axis, self.apart)

    def _over(self, axis, *others):
        at = {i: entry for entries in others for i, entry in enumerate(entries) if entry}
        at |= {} if self.cut is None else {self.cut: axis}
        return P(*(at.get(i) for i in range(max(at, default=-1) + 1)))

    def apart_axes(self) -> list[str]:
        """The mesh axes along which it is never gathered."""
        return jax.tree.leaves(self.apart)

    def inside(self, mesh: jax.sharding.Mesh) -> tuple:
        """Its shape where it is used: of what is never gathered, one device's part."""
        entries = [*self.apart, *[None] * (len(self.shape) - len(self.apart))]
        return tuple(
            size // math.prod(mesh.shape[name] for name in jax.tree.leaves(entry))
            for size, entry in zip(self.shape, entries, strict=True)
        )

    def local_shape(self, n: int, mesh: jax.sharding.Mesh | None = None) -> tuple:
        """What each of `n` devices along the axis has, together with those beside it."""
        shape = self.shape if mesh is None else self.inside(mesh)
        if self.cut is None:
            return shape
        return (*shape[: self.cut], self.padded // n, *shape[self.cut + 1 :])


def plan(
    tree: Any,
    mesh: jax.sharding.Mesh,
    axis: str | tuple[str, ...] = "fsdp",
    min_size: int = 0,
    stacked: Callable[[str], bool] | str | None = None,
    over: Callable[[Any, jax.sharding.Mesh], Any] | None = None,
    apart: Callable[[Any, jax.sharding.Mesh], Any] | None = None,
) -> tuple[Stored, ...]:
    """How `place` would keep each array of `tree`, which may be abstract."""
    check_axis("fsdp.place", mesh, axis)
    leaves = list(leaves_of(tree, stacked))
    if stacked == "layers" and not any(is_stacked for _, _, is_stacked in leaves):
        raise ValueError(
            "fsdp.place: stacked='layers' finds no array with an axis of layers: none carries "
            "names, in NNX metadata or Linen's boxes, of which one is 'layers' or the first axis "
            "has none. Give stacked= a predicate on paths, such as "
            "lambda path: path.startswith('layers/')."
        )
    return tuple(
        choose(path, jnp.shape(x), is_stacked, parts_of(mesh, axis), min_size, beside, own, axis)
        for (path, x, is_stacked), beside, own in zip(
            leaves,
            _beside(over, tree, mesh, axis, len(leaves)),
            _beside(apart, tree, mesh, (), len(leaves)),
            strict=True,
        )
    )


def _beside(over, tree, mesh, axis, count):
    """The entries of each array's spec over the other axes."""
    if over is None:
        return [()] * count
    specs = jax.tree.leaves(over(tree, mesh), is_leaf=lambda x: isinstance(x, P))
    for spec in specs:
        if not set(axes_of(axis)).isdisjoint(jax.tree.leaves(tuple(spec))):
            raise ValueError(
                f"fsdp.place: over= gives {spec}, which uses the axis {axis!r} that is cut here; "
                f"give a rule for the mesh's other axes alone."
            )
    return [tuple(spec) for spec in specs]


def leaves_of(tree, stacked):
    """(path, array, whether it has a leading axis of layers) for each leaf."""
    if not (stacked is None or stacked == "layers" or callable(stacked)):
        raise ValueError(
            f"fsdp.place: stacked={stacked!r}; expected a predicate on paths, or 'layers'."
        )
    for keys, x, box in trees.walk(tree):
        path, axes = "/".join(keys), trees.axis_names(box)
        named = stacked == "layers" and axes is not None and _has_layers(axes, jnp.ndim(x))
        yield path, x, bool(named or (callable(stacked) and stacked(path)))


def _has_layers(axes, rank):
    return len(axes) < rank or bool(axes and axes[0] == trees.LAYERS)


def choose(path, shape, stacked, n, min_size, beside=(), apart=(), axis=()):
    taken = {i for one in (beside, apart) for i, entry in enumerate(one) if entry is not None}
    if not set(axes_of(axis)).isdisjoint(jax.tree.leaves(apart)):
        return Stored(path, shape, stacked, None, None, beside, apart)
    axes = [i for i in range(1 if stacked else 0, len(shape)) if shape[i] > 1 and i not in taken]
    if n == 0 or not axes or math.prod(shape) < max(min_size, 1):
        return Stored(path, shape, stacked, None, None, beside, apart)
    cut = min(axes, key=lambda i: (-(-shape[i] // n) * n / shape[i], i))
    return Stored(path, shape, stacked, cut, -(-shape[cut] // n) * n, beside, apart)


def axes_of(axis: str | tuple[str, ...]) -> tuple[str, ...]:
    """The mesh axes that are meant, together one."""
    return (axis,) if isinstance(axis, str) else tuple(axis)


def parts_of(mesh: jax.sharding.Mesh, axis: str | tuple[str, ...]) -> int:
    """Into how many parts an array is cut; 0 where no axis is named, so that none is."""
    axes = axes_of(axis)
    return math.prod(mesh.shape[name] for name in axes) if axes else 0


def check_axis(who, mesh, axis):
    for name in axes_of(axis):
        if name not in mesh.shape:
            raise ValueError(
                f"{who}: the mesh has no axis {name!r}; it has {dict(mesh.shape)}. Make it with "
                f"mesh.make({name}=-1), or name another axis."
            )
    check_auto(who, mesh)
