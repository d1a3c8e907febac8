"""Pipeline parallelism: any schedule, run on devices, with one device's loss and gradients.

The loss is ordinary code with k calls of `marks.stage_boundary`; its trace is cut there into k + 1
stages (`shardwise.cut`), and a table from `shardwise.schedules` says which device runs what when:

    grid = mesh.make(stage=4, fsdp=2)
    step = pipeline.step(loss, tx, grid, "1f1b", microbatches=8)
    params = pipeline.place(params, step.loss_and_grad, batch)  # each stage's on its own devices
    opt_state = pipeline.init(tx, params)
    params, opt_state, mean = step(params, opt_state, batch)
    flat = pipeline.whole(params)                               # as one device has them

A step is `value_and_grad`, `update` and `optax.apply_updates`, which can be called one by one.

Where a stage has several devices, a rank, the compiler lays out its programs; by a `Manual`, such
as `layouts` makes, their collectives are written out. Every rank is driven by a thread of its own.
These functions dispatch programs themselves: call them outside of `jax.jit`. In several processes
stages are one program instead, which `layouts` makes (`Layout(program=True)`) from `ticks`.
"""

from shardwise.pipeline.creating import create
from shardwise.pipeline.gradients import programs, value_and_grad
from shardwise.pipeline.lowering import Step, lower
from shardwise.pipeline.manual import Manual
from shardwise.pipeline.one_program import gpipe
from shardwise.pipeline.optimizing import init, update
from shardwise.pipeline.placing import Piece, Pipelined, located, place, whole
from shardwise.pipeline.running import TaskError
from shardwise.pipeline.ticking import Ticks, ticks
from shardwise.pipeline.training import step

__all__ = [
    "Manual",
    "Piece",
    "Pipelined",
    "Step",
    "TaskError",
    "Ticks",
    "create",
    "gpipe",
    "init",
    "located",
    "lower",
    "place",
    "programs",
    "step",
    "ticks",
    "update",
    "value_and_grad",
    "whole",
]
