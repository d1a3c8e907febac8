"""Fully sharded data parallelism by shard_map, for any pytree, loss and optax optimizer.

Between steps every device holds one n-th of each array (Rajbhandari et al., 2020, ZeRO). Within a
step an array is gathered where it is used, and the gradient is reduce-scattered on its way back,
because a reduce-scatter is the transpose of an all-gather:

    params = fsdp.place(params, mesh, stacked="layers")     # or inside jit, to be born sharded
    opt_state = fsdp.init(tx, params)
    step = fsdp.step(loss, tx, mesh)                        # loss(params, batch), for one device
    params, opt_state, mean = step(params, opt_state, batch)
    fsdp.whole(params)                                      # as one device has them

A step is `value_and_grad`, `update` and `optax.apply_updates`, which can be called one by one.

Two parts of this must be manual, the gather and the reduction of gradients, since there the
compiler's choice costs memory and bytes. The update is left to the compiler: it sees arrays of
their true shapes, so any optimizer is right, one that looks at the whole tree included.
"""

from shardwise.fsdp.batches import pad
from shardwise.fsdp.gradients import value_and_grad
from shardwise.fsdp.optimizing import init, update
from shardwise.fsdp.planning import Stored
from shardwise.fsdp.storage import Sharded, describe, place, unpad, whole
from shardwise.fsdp.training import step

__all__ = [
    "Sharded",
    "Stored",
    "describe",
    "init",
    "pad",
    "place",
    "step",
    "unpad",
    "update",
    "value_and_grad",
    "whole",
]
