"""The meaning of `marks.use` under FSDP: what it makes whole, and how.

Where all is gathered before the loss (ZeRO 1 and 2), gradients are scattered at `use` all the same,
so that one layer's at a time is whole. The loss has to be differentiated in shares for that: in
their place it gets arrays of these shapes that hold nothing but the number of each layer, by which
`use` finds the layer in what is gathered.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from shardwise import tree as trees
from shardwise.fsdp.arrays import ArrayLayout
from shardwise.fsdp.gathering import How, gather
from shardwise.fsdp.reads import Reads

LAYERS = 2**8  # whose numbers bfloat16 has, and wider dtypes


@dataclasses.dataclass(frozen=True, eq=False)  # of one trace: nothing cached elsewhere fits
class Use:
    """The meaning of `marks.use`, by which a loss's arrays are gathered, or taken from `wholes`.

    `known` has the `How`, or None, of each array that the loss gives to it, and the number of the
    parameter that it is, by its path and shape. `deferred` says of each parameter whether the loss
    receives it in shares.
    """

    known: Mapping[tuple, tuple]
    deferred: tuple[bool, ...]
    arrays: Sequence[ArrayLayout]
    wholes: Sequence[jax.Array] | None = None

    def __call__(self, weights):
        flat, structure = trees.leaves(weights), jax.tree.structure(weights)
        xs, told = [x for _, x in flat], [self._told(path, jnp.shape(x)) for path, x in flat]
        hows, wholes = [how for how, _ in told], None
        if self.wholes is not None:
            pairs = zip(xs, told, strict=True)
            wholes = [x if how is None else self._layers(x, how, i) for x, (how, i) in pairs]
        return jax.tree.unflatten(structure, gather(xs, hows, wholes))

    def _told(self, path, shape):
        if (path, shape) not in self.known:
            raise ValueError(
                f"fsdp: marks.use received {path or 'an array'} of shape {shape}, and no such "
                f"array when the loss was traced at true shapes: what the loss does before "
                f"marks.use, where weights are in shares, must not depend on their shapes."
            )
        return self.known[path, shape]

    def _layers(self, x, how, i):
        """The layer whose number `x` holds, or the layers, from the gathered array."""
        whole = self.wholes[i] if self.arrays[i].stacked else self.wholes[i][None]
        x = jax.lax.stop_gradient(x)
        if len(whole) > 2 ** (jnp.finfo(x.dtype).nmant + 1):
            raise ValueError(
                f"fsdp: {self.arrays[i].path} is cast to {x.dtype} before marks.use, which ZeRO 1 "
                f"and 2 cannot tell {len(whole)} layers by; cast what marks.use returns, or take "
                f"zero=3."
            )
        numbers = x[(..., *[0] * (whole.ndim - 1))].astype(jnp.int32)
        if numbers.ndim:
            found = whole[numbers]
        else:
            found = jax.lax.dynamic_index_in_dim(whole, numbers, keepdims=False)
        return found.astype(x.dtype) if how.dtype is None else found


def numbered(share: jax.Array, array: ArrayLayout) -> jax.Array:
    """An array like a share, of the numbers of its layers."""
    if not array.stacked:
        return jnp.zeros_like(share)
    return jax.lax.broadcasted_iota(share.dtype, share.shape, 0)


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
                f"leave it out of stacked= (without stacked=, a Layout takes for a stack of layers "
                f"each array with one dimension more than its logical axes name)."
            )
    deferred = tuple(how is not None and i not in found.elsewhere for i, how in enumerate(hows))
    known: dict = {}
    for path, whole, owners in found.uses:
        for i in owners or [None]:
            later = i is not None and deferred[i]
            shape, how = _in_shares(whole, arrays[i], hows[i], mesh) if later else (whole, None)
            before, other = known.setdefault((path, shape), (how, i))
            axes = {name for each in (before, how) if each is not None for name in each.axis}
            if before != how and any(mesh.shape[name] > 1 for name in axes):
                whose = (
                    "what is whole" if how is None else arrays[i].path
                    for how, i in ((before, other), (how, i))
                )
                raise ValueError(
                    f"fsdp: marks.use receives {path or 'an array'} of shape {shape}, which may be "
                    f"of {' or of '.join(whose)}; give it the dict or state that holds the array, "
                    f"so that its path tells."
                )
    return Use(known, deferred, arrays)


def _in_shares(shape, array, how, mesh):
    """The shape in which `use` receives what is of this one when whole, and its `How`."""
    lead, local = len(shape) - len(array.inner(mesh)), array.local_shape(mesh)
    shares = (*shape[:lead], *local[len(local) - len(shape) + lead :])
    return shares, how.shifted(lead - array.stacked)


def late(
    found: Reads, arrays: Sequence[ArrayLayout], hows: Sequence[How | None]
) -> list[How | None]:
    """The `How`s of arrays whose gradients can be scattered at `use`, and None for the others:
    those that others read too, and those that it cannot tell apart by their paths.
    """
    owners: dict[str, set] = {}
    for path, _, some in found.uses:
        owners.setdefault(path, set()).update(some or {None})
    alone = {i for group in owners.values() if len(group) == 1 for i in group}
    alone -= {i for group in owners.values() if len(group) > 1 for i in group}
    alone -= {i for i, s in enumerate(arrays) if s.stacked and s.shape[0] > LAYERS}
    alone -= set(found.elsewhere)
    return [how if i in alone else None for i, how in enumerate(hows)]
