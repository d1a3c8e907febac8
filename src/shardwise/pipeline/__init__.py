"""Pipeline parallelism: any schedule, run on devices, with one device's loss and gradients.

The loss is ordinary code with k calls of `marks.stage_boundary`; its trace is cut there into k + 1
stages (`shardwise.cut`), and a table from `shardwise.schedules` says which device runs what when:

    grid = mesh.make(stage=4, fsdp=2)
    loss_and_grad = pipeline.value_and_grad(loss, grid, "1f1b", microbatches=8)
    params = pipeline.split(params, loss_and_grad, batch)     # each stage's on its own devices
    opt_state = pipeline.init(tx, params)
    mean, grads = loss_and_grad(params, batch)
    updates, opt_state = pipeline.update(tx, grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    flat = pipeline.merge(params)                             # as one device has them

Every device (every rank, where a stage has several devices) is driven by a thread of its own.
These functions dispatch programs themselves: call them outside of `jax.jit`.
"""

from shardwise.pipeline.gradients import programs, value_and_grad
from shardwise.pipeline.one_program import gpipe
from shardwise.pipeline.optimizing import init, update
from shardwise.pipeline.placing import Piece, Pipelined, merge, split
from shardwise.pipeline.running import TaskError

__all__ = [
    "Piece",
    "Pipelined",
    "TaskError",
    "gpipe",
    "init",
    "merge",
    "programs",
    "split",
    "update",
    "value_and_grad",
]
