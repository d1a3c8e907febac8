"""A traced loss, cut at its marks into one function for each stage, and each into its tasks.

`marks.stage_boundary` leaves a name in the traced program (a jaxpr), and from then on everything is
a question of which equation needs which value:

    parts = cut.stages(loss, params, batch).stages  # abstract values are enough
    parts[1].rows                                   # the parameters of stage 1, and which rows
    halves = cut.backward(parts[1])                 # forward; backward, whole or in two halves

An equation behind k marks belongs to stage k. One that depends on parameters alone, or on the
batch alone, is repeated in each stage that needs it; one with effects (`jax.debug.print`) runs in
one stage, once. A value that a later stage needs travels through the stages between, and so does
its cotangent. Names (`jax.named_scope`) and source lines stay those of the loss.
"""

from shardwise.pipeline.cut.halves import Halves, backward
from shardwise.pipeline.cut.stages import Stage, stages

__all__ = ["Halves", "Stage", "backward", "stages"]
