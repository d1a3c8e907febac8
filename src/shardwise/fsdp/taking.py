"""`marks.use` where all is gathered already: gradients are scattered there all the same.

A layer's gradient is then whole for as long as that of one layer is made, and not until the end.
The loss has to be differentiated in shares for that: in their place it gets arrays of these shapes
that hold nothing but the number of each layer, by which `use` finds the layer in what is gathered.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardwise import tree as trees
from shardwise.fsdp.arrays import ArrayLayout
from shardwise.fsdp.gathering import How, take
from shardwise.fsdp.reads import Reads
from shardwise.fsdp.using import Use

LAYERS = 2**8  # whose numbers bfloat16 has, and wider dtypes


class Way(NamedTuple):
    """The way in which a loss gets its arrays: it is differentiated in `inputs`, of which `arrays`
    makes what it receives; what it gives to `marks.use`, `use` makes whole.
    """

    inputs: list[jax.Array]
    use: Any
    arrays: Callable[[list[jax.Array]], list[jax.Array]]


def taken(
    wholes: Sequence[jax.Array],
    shards: Sequence[jax.Array],
    use: Use,
    now: Sequence[How | None],
    layout: Sequence[ArrayLayout],
) -> Way:
    """The `Way` in which a loss gets its arrays from `wholes`.

    What has a `How` in `now` is whole before the loss, and scattered after it.
    """
    groups = zip(shards, layout, use.deferred, strict=True)
    inputs = [_numbered(x, s) if later else x for x, s, later in groups]

    def arrays(xs):
        pairs = zip(xs, wholes, now, strict=True)
        return take(xs, [x if how is None else w for x, w, how in pairs], now)

    return Way(inputs, Taking(use, wholes, layout), arrays)


@dataclasses.dataclass(frozen=True, eq=False)  # of one trace: nothing cached elsewhere fits
class Taking:
    """The meaning of `marks.use` by which layers are taken from `wholes`, the gathered arrays."""

    use: Use
    wholes: Sequence[jax.Array]
    layout: Sequence[ArrayLayout]

    def __call__(self, weights):
        flat, structure = trees.leaves(weights), jax.tree.structure(weights)
        xs, told = [x for _, x in flat], self.use.known(flat)
        pairs = zip(xs, told, strict=True)
        wholes = [x if how is None else self._layers(x, how, i) for x, (how, i) in pairs]
        return jax.tree.unflatten(structure, take(xs, wholes, [how for how, _ in told]))

    def _layers(self, x, how, i):
        """The layer whose number `x` holds, or the layers, from the gathered array."""
        whole = self.wholes[i] if self.layout[i].stacked else self.wholes[i][None]
        x = jax.lax.stop_gradient(x)
        if len(whole) > 2 ** (jnp.finfo(x.dtype).nmant + 1):
            raise ValueError(
                f"fsdp: {self.layout[i].path} is cast to {x.dtype} before marks.use, which ZeRO 1 "
                f"and 2 cannot tell {len(whole)} layers by; cast what marks.use returns, or take "
                f"zero=3."
            )
        numbers = x[(..., *[0] * (whole.ndim - 1))].astype(jnp.int32)
        if numbers.ndim:
            found = whole[numbers]
        else:
            found = jax.lax.dynamic_index_in_dim(whole, numbers, keepdims=False)
        return found.astype(x.dtype) if how.dtype is None else found


def _numbered(share: jax.Array, array: ArrayLayout) -> jax.Array:
    """An array like a share, of the numbers of its layers."""
    if not array.stacked:
        return jnp.zeros_like(share)
    return jax.lax.broadcasted_iota(share.dtype, share.shape, 0)


def late(
    found: Reads, layout: Sequence[ArrayLayout], hows: Sequence[How | None]
) -> list[How | None]:
    """The `How`s of arrays whose gradients can be scattered at `use`, and None for the others:
    those that others read too, and those that it cannot tell apart by their paths.
    """
    owners: dict[str, set] = {}
    for received in found.uses:
        owners.setdefault(received.path, set()).update(received.owners or {None})
    alone = {i for group in owners.values() if len(group) == 1 for i in group}
    alone -= {i for group in owners.values() if len(group) > 1 for i in group}
    alone -= {i for i, s in enumerate(layout) if s.stacked and s.shape[0] > LAYERS}
    alone -= set(found.elsewhere)
    return [how if i in alone else None for i, how in enumerate(hows)]
