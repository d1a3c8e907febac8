"""Fully sharded data parallelism by shard_map, for any pytree and loss: the mechanism by hand.

Between steps every device holds one n-th of each array (Rajbhandari et al., 2020, ZeRO). Within a
step an array is gathered where it is used, and the gradient is reduce-scattered on its way back,
because a reduce-scatter is the transpose of an all-gather:

    layout = layouts.Layout(mesh, fsdp="fsdp")
    params, opt_state = layouts.init(layout, create, tx, key)
    mean, grads = fsdp.value_and_grad(loss, mesh)(params, batch)   # one device's loss
    updates, opt_state = tx.update(grads, opt_state, params)

Parameters and gradients are plain arrays of their true shapes, laid out by a `rules.FSDPRule`. Two
parts of a step must be manual, the gather and the reduction of gradients, since there the
compiler's choice costs memory and bytes. The update is left to the compiler: any optimizer is
right, one that looks at the whole tree included.
"""

from shardwise.fsdp.arrays import pad, rule
from shardwise.fsdp.gradients import value_and_grad

__all__ = ["pad", "rule", "value_and_grad"]
