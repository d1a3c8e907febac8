"""Pipeline parallelism: any schedule as one program, with one device's loss and gradients.

The loss is ordinary code with k calls of `marks.stage_boundary`; its trace is cut there into k + 1
stages, and a table from `shardwise.schedules` says which device runs what when:

    run = jax.jit(pipeline.value_and_grad(loss, mesh.make(stage=4), "1f1b", microbatches=8))
    mean, grads = run(params, batch)                # plain arrays of true shape

`layouts.Layout(stage=...)` makes whole training steps of it, with other roles beside stages. All
devices run one program: a scan over ticks, in each the device's own task, and what goes from stage
to stage goes around a ring between ticks (`ticks` is its table).
"""

from shardwise.pipeline.gpipe import gpipe
from shardwise.pipeline.gradients import value_and_grad
from shardwise.pipeline.ticking import ticks

__all__ = ["gpipe", "ticks", "value_and_grad"]
