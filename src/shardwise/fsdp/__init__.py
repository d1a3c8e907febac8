"""Fully sharded data parallelism by shard_map, for any pytree, loss and optax optimizer.

Between steps every device holds one n-th of each array (Rajbhandari et al., 2020, ZeRO). Within a
step an array is gathered where it is used, and the gradient is reduce-scattered on its way back,
because a reduce-scatter is the transpose of an all-gather:

    params = fsdp.shard(params, mesh, stacked="layers")     # or inside jit, to be born sharded
    loss_and_grad = fsdp.value_and_grad(loss, mesh)         # loss(params, batch), for one device
    opt_state = fsdp.init(tx, params)
    mean, grads = loss_and_grad(params, batch)
    updates, opt_state = fsdp.update(tx, grads, opt_state, params)
    params = optax.apply_updates(params, updates)

Two parts of this must be manual, the gather and the reduction of gradients, since there the
compiler's choice costs memory and bytes. The update is left to the compiler: it sees arrays of
their true shapes, so any optimizer is right, one that looks at the whole tree included.
"""

from shardwise.fsdp.batches import pad
from shardwise.fsdp.gradients import value_and_grad
from shardwise.fsdp.optimizing import init, update
from shardwise.fsdp.storage import Sharded, Stored, describe, gather, shard, unpad

__all__ = [
    "Sharded",
    "Stored",
    "describe",
    "gather",
    "init",
    "pad",
    "shard",
    "unpad",
    "update",
    "value_and_grad",
]
