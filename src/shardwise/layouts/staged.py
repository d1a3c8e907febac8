"""Stages: the layers of each on devices of their own, by a schedule; the other roles within them.

By the compiler only the axis of stages is written out. By hand rows, sequence, shares of parameters
and experts are too, in the same shard_map, as `by_hand` cuts them, and the tensor axis is the
compiler's: a task gathers the parameters that it reads and scatters their gradients; what devices
have copies of is summed once a step.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from shardwise import pipeline, rules
from shardwise.fsdp.arrays import check_params, laid_out
from shardwise.fsdp.batches import Divided
from shardwise.layouts import by_compiler
from shardwise.layouts.layout import Layout
from shardwise.layouts.meanings import meanings, order
from shardwise.layouts.placing import parameter_rule
from shardwise.layouts.shares import array_layouts, shares, without


def value_and_grad(
    layout: Layout, loss: Callable, has_aux: bool, aux: Any, who: str, backward: bool = True
) -> Callable:
    """The `pipeline.value_and_grad` of the loss, jitted."""
    made = functools.partial(_pipelined, layout, has_aux, aux, who, backward)
    if not layout.by_hand:
        return by_compiler.jitted(layout, loss, made, who)

    def run(params, batch, *args, key=None):
        check_params(params, layout.auto, who)
        value, grads = made(loss, params)(params, batch, *args, key=key)
        if layout.tensor and backward:
            grads = rules.constrain_tree(grads, parameter_rule(layout), layout.auto)
        return value, grads

    return laid_out(jax.jit(run), parameter_rule(layout), layout.auto, who)


def program(layout: Layout, loss: Callable, has_aux: bool, params: Any, batch: Any) -> Any:
    """The `pipeline.Program` of a loss for arrays of these shapes."""
    function = _pipelined(layout, has_aux, "sum", "layouts.predict", True, loss, params)
    return function.program(params, batch)


def _pipelined(layout, has_aux, aux, who, backward, loss, params=None):
    given = layout.auto, layout.schedule, layout.microbatches, layout.stage[0]
    within = _by_hand(layout, params, who) if layout.by_hand else pipeline.Within()
    return pipeline.value_and_grad(
        loss,
        *given,
        functools.partial(_specs, layout),
        within,
        has_aux=has_aux,
        aux=aux,
        who=who,
        backward=backward,
    )


def _by_hand(layout, params, who):
    return pipeline.Within(
        rows=layout.rows,
        columns=layout.context,
        by_hand=tuple(name for name in layout.auto.axis_names if name not in layout.tensor),
        divide=Divided(layout.auto, layout.rows, layout.context, order(layout), who),
        meanings=meanings(layout),
        shares=functools.partial(shares, layout, array_layouts(layout, params)),
    )


def _specs(layout, params):
    """The PartitionSpecs of parameters over the axes by hand."""
    choices = parameter_rule(layout).choices(params, layout.auto)
    by_hand = (*layout.stage, *layout.rows, *layout.context) if layout.by_hand else layout.stage
    others = [name for name in layout.auto.axis_names if name not in by_hand]
    return [without(choice.spec, others) for choice in choices]
