"""Meanings of marks under FSDP: which arrays `use` gathers and how, and what `constrain` pins."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import tree as trees
from shardwise.fsdp.arrays import ArrayLayout, check_axis
from shardwise.fsdp.gathering import How, gather
from shardwise.fsdp.reads import Reads, Received, reads


class Use(NamedTuple):
    """The meaning of `marks.use`: a `How`, or None, for each array that the loss gives to it.

    With it goes the number of the parameter that it is. `deferred` says of each parameter whether
    the loss receives it in shares.
    """

    hows: frozenset
    deferred: tuple[bool, ...]

    def __call__(self, weights):
        flat, structure = trees.leaves(weights), jax.tree.structure(weights)
        hows = [how for how, _ in self.known(flat)]
        return jax.tree.unflatten(structure, gather([x for _, x in flat], hows))

    def known(self, flat):
        """(the `How`, the number of the parameter) of each (path, array) in `flat`."""
        known = dict(self.hows)
        return [_known(known, path, jnp.shape(x)) for path, x in flat]


def use_of(
    found: Reads, arrays: Sequence[ArrayLayout], mesh: Mesh, hows: Sequence[How | None]
) -> Use:
    """The meaning of `marks.use` for a loss that reads its parameters as `found`.

    Raises:
      ValueError: a stacked array that is read elsewhere, or one of which `use` cannot tell how to
        gather it.
    """
    for i, operation in found.elsewhere.items():
        if arrays[i].stacked and hows[i] is not None:
            raise ValueError(
                f"fsdp: {arrays[i].path} is stacked, and read outside marks.use, by {operation}: "
                f"there a device has only its share of it. Call `weights = marks.use(weights)` "
                f"before, in the layer's body (or on the whole stack, where all of it is read), or "
                f"leave it out of stacked= (a Layout takes an array with fewer names than axes for "
                f"a stack, unless it has stacked=)."
            )
    deferred = tuple(how is not None and i not in found.elsewhere for i, how in enumerate(hows))
    known: dict = {}
    for received in found.uses:
        _add(known, received, arrays, mesh, hows, deferred)
    return Use(frozenset((key, (how, i)) for key, (how, i, _) in known.items()), deferred)


def reads_of(
    loss: Callable,
    arrays: Sequence[ArrayLayout],
    mesh: Mesh,
    hows: Sequence[How | None],
    dtypes: Sequence[Any],
    *rest: Any,
) -> Reads:
    """The `Reads`, by `loss(leaves, *rest)`, of what has a `How`; `dtypes` are the leaves'."""
    pairs = zip(arrays, dtypes, strict=True)
    leaves = [jax.ShapeDtypeStruct(array.inside(mesh), dtype) for array, dtype in pairs]
    pairs = zip(arrays, hows, strict=True)
    return reads(
        loss, leaves, [None if how is None else _inner(a, mesh) for a, how in pairs], *rest
    )


def _add(known, received: Received, arrays, mesh, hows, deferred):
    """Add an array that `use` receives to `known`, {(path, shape in shares): (how, i, whose)}."""
    for i in received.owners or [None]:
        shape, how = received.shape, None
        if i is not None and deferred[i]:
            lead = len(shape) - len(_inner(arrays[i], mesh))
            local = arrays[i].local_shape(mesh)
            shape = (*shape[:lead], *local[len(local) - len(shape) + lead :])
            how = hows[i].shifted(lead - (1 if arrays[i].stacked else 0))
        whose = "what is whole" if how is None else arrays[i].path
        before, _, owner = known.setdefault((received.path, shape), (how, i, whose))
        if before != how and any(mesh.shape[name] > 1 for name in _axes(before, how)):
            raise ValueError(
                f"fsdp: marks.use receives {received.path or 'an array'} of shape {shape}, which "
                f"may be of {owner} or of {whose}; give it the dict or state that holds the array, "
                f"so that its path tells."
            )


def _axes(*hows):
    return {name for how in hows if how is not None for name in how.axis}


def _inner(array: ArrayLayout, mesh: Mesh):
    """The shape of what stays together: of one layer, where there are layers."""
    shape = array.inside(mesh)
    return shape[1:] if array.stacked else shape


def _known(known, path, shape):
    if (path, shape) not in known:
        raise ValueError(
            f"fsdp: marks.use received {path or 'an array'} of shape {shape}, and no such array "
            f"when the loss was traced at true shapes: what the loss does before marks.use, where "
            f"weights are in shares, must not depend on their shapes."
        )
    return known[path, shape]


def pinned(names: Mapping[str, P], mesh: jax.sharding.Mesh, rows: Sequence[str]) -> tuple:
    """(the meaning of `marks.constrain`, the set of names that it meets): activations by these
    specs, without the axes over which rows are cut by hand.
    """
    for name, spec in names.items():
        for axis in jax.tree.leaves(tuple(spec)):
            check_axis(f"fsdp.value_and_grad, names[{name!r}]", mesh, axis)
    shardings = {name: NamedSharding(mesh, _without(spec, rows)) for name, spec in names.items()}
    seen = set()

    def constrain(x, name):
        seen.add(name)
        return _constrained(x, shardings[name]) if name in shardings else x

    return constrain, seen


def _constrained(x, sharding):
    if jax.__version_info__ >= (0, 8):  # where the mesh has to be the one of the shard_map around
        sharding = NamedSharding(jax.sharding.get_abstract_mesh(), sharding.spec)
    return jax.lax.with_sharding_constraint(x, sharding)


def _without(spec, axes):
    kept = []
    for entry in spec:
        names = entry if isinstance(entry, tuple) else (entry,)
        names = tuple(name for name in names if name not in axes)
        kept.append(names if len(names) > 1 else names[0] if names else None)
    return P(*kept)
