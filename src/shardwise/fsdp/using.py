"""`marks.use` under FSDP: which arrays it gathers, and how."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardwise.fsdp.gathering import How, gather
from shardwise.fsdp.reads import Received, reads
from shardwise.fsdp.storage import Sharded, Stored, path_of


class Use(NamedTuple):
    """The meaning of `marks.use`: a `How`, or None, for each array that the loss gives to it.

    `deferred` says of each parameter whether the loss receives it in shares.
    """

    hows: frozenset
    deferred: tuple[bool, ...]

    def __call__(self, weights):
        flat, structure = jax.tree_util.tree_flatten_with_path(weights)
        known = dict(self.hows)
        hows = [_known(known, path_of(keys), jnp.shape(x)) for keys, x in flat]
        return jax.tree.unflatten(structure, gather([x for _, x in flat], hows))


def use_of(loss: Callable, params: Sharded, hows: Sequence[How | None], *rest: Any) -> Use:
    """What `marks.use` has to do in `loss(arrays, *rest)`, which is traced at true shapes.

    Raises:
      ValueError: a stacked array that is read elsewhere, or one of which `use` cannot tell how to
        gather it.
    """
    n, layout = params.mesh.shape[params.axis], params.layout
    inner = [None if how is None else _inner(s) for s, how in zip(layout, hows, strict=True)]
    arrays = [
        jax.ShapeDtypeStruct(s.shape, x.dtype if how is None or how.dtype is None else how.dtype)
        for x, s, how in zip(jax.tree.leaves(params.tree), layout, hows, strict=True)
    ]
    found = reads(loss, arrays, inner, *rest)
    for i, operation in found.elsewhere.items():
        if layout[i].stacked:
            raise ValueError(
                f"fsdp: {layout[i].path} is stacked, and read outside marks.use, by {operation}: "
                f"there a device has its share of it alone. Call `weights = marks.use(weights)` "
                f"before, in the layer's body (or on the whole stack, where all of it is read), or "
                f"leave it out of stacked=."
            )
    deferred = tuple(how is not None and i not in found.elsewhere for i, how in enumerate(hows))
    known: dict = {}
    for received in found.uses:
        _add(known, received, layout, hows, deferred, n)
    return Use(frozenset((key, how) for key, (how, _) in known.items()), deferred)


def _add(known, received: Received, layout, hows, deferred, n):
    """What is done with an array that `use` receives: {(path, shape in shares): (how, whose)}."""
    for i in received.owners or [None]:
        shape, how = received.shape, None
        if i is not None and deferred[i]:
            lead = len(shape) - len(_inner(layout[i]))
            local = layout[i].local_shape(n)
            shape = (*shape[:lead], *local[len(local) - len(shape) + lead :])
            how = hows[i].shifted(lead - (1 if layout[i].stacked else 0))
        whose = "what is whole" if how is None else layout[i].path
        before, owner = known.setdefault((received.path, shape), (how, whose))
        if before != how and n > 1:
            raise ValueError(
                f"fsdp: marks.use receives {received.path or 'an array'} of shape {shape}, which "
                f"may be of {owner} or of {whose}; give it the dict or state that holds the array, "
                f"so that its path tells."
            )


def _inner(stored: Stored):
    """The shape of what stays together: of one layer, where there are layers."""
    return stored.shape[1:] if stored.stacked else stored.shape


def _known(known, path, shape):
    if (path, shape) not in known:
        raise ValueError(
            f"fsdp: marks.use received {path or 'an array'} of shape {shape}, and no such array "
            f"when the loss was traced at true shapes: what the loss does before marks.use, where "
            f"weights are in shares, must not depend on their shapes."
        )
    return known[path, shape]
