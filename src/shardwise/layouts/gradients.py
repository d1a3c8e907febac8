"""The mean and gradient of a loss under a layout: by hand, by the compiler, in stages."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import fsdp, marks, objective, pipeline, rules
from shardwise import tree as trees
from shardwise.fsdp.arrays import check_params, laid_out, without
from shardwise.fsdp.batches import Divided
from shardwise.layouts import exact
from shardwise.layouts.layout import Layout
from shardwise.layouts.meanings import meanings, order
from shardwise.layouts.placing import cast, expert_rule, parameter_rule
from shardwise.layouts.shares import array_layouts, shares


def mean_and_grad(
    layout: Layout, loss: Callable, has_aux: bool, aux: Any, who: str, backward: bool = True
) -> Callable:
    """The mean and gradient under a layout: a function of `(params, batch, *args, key=None)`.

    It is jitted, but for exact layouts. Without `backward` the gradient may be None.
    """
    given = layout, loss, has_aux, aux, who
    if layout.exact or layout.stage:  # no compiler sees there that a half is not read
        return (exact.mean_and_grad if layout.exact else in_stages)(*given, backward)
    return (by_hand if layout.by_hand else by_compiler)(*given)


def by_hand(layout: Layout, loss: Callable, has_aux: bool, aux: Any, who: str) -> Callable:
    """The `fsdp.value_and_grad` of the loss, with the layout's meanings of marks."""
    return fsdp.value_and_grad(
        loss,
        layout.auto,
        parameter_rule(layout),
        replicate=[name for name in layout.rows if name not in layout.fsdp],
        columns=layout.context,
        order=order(layout),
        zero=layout.zero,
        microbatches=layout.microbatches,
        dtype=layout.dtype,
        reduce_dtype=layout.reduce_dtype,
        has_aux=has_aux,
        aux=aux,
        apart=expert_rule(layout),
        meanings=meanings(layout),
        who=who,
    )


def by_compiler(layout: Layout, loss: Callable, has_aux: bool, aux: Any, who: str) -> Callable:
    """The loss and gradient of whole arrays, jitted; batch and activations are pinned."""
    made = lambda loss: objective.value_and_grad(loss, layout.microbatches, has_aux, aux)  # noqa: E731
    return _jitted(layout, loss, made, who)


def _jitted(layout, loss, made, who):
    """The function that `made(loss)` returns, jitted, of the loss with the layout's meanings."""

    def marked(params, *args, **options):
        with marks.bind(**meanings(layout)):
            return loss(cast(layout, params), *args, **options)

    mean_and_grad = made(marked)

    def run(params, batch, *args, key=None):
        _check(layout, batch, who)
        value, grads = mean_and_grad(params, _laid(layout, batch), *args, key=key)
        return value, _pinned(layout, grads)

    return jax.jit(run)


def _laid(layout, batch):
    """The batch, cut in rows and, where it has two axes or more, along the sequence."""

    def laid(x):
        entries = [layout.rows or None, layout.context or None][: jnp.ndim(x)]
        return jax.lax.with_sharding_constraint(x, NamedSharding(layout.auto, P(*entries)))

    return jax.tree.map(laid, batch)


def _check(layout, batch, who):
    """Raise where rows or sequences of the batch do not divide."""
    parts = math.prod(layout.auto.shape[name] for name in layout.rows) * layout.microbatches
    columns = layout.size("context")
    for path, x in trees.leaves(batch):
        shape = jnp.shape(x)
        for axis, by, what in ((0, parts, "rows"), (1, columns, "sequence")):
            if len(shape) > axis and shape[axis] % by:
                raise ValueError(
                    f"{who}: {path or 'the batch'} of shape {shape} does not split into {by} parts "
                    f"along its {what}; pad it to {-(-shape[axis] // by) * by}, with a mask of 0."
                )


def _pinned(layout, grads):
    """Gradients laid out as parameters; None where there are none."""
    if grads is None:
        return None
    return rules.constrain_tree(grads, parameter_rule(layout), layout.auto)


def in_stages(
    layout: Layout, loss: Callable, has_aux: bool, aux: Any, who: str, backward: bool = True
) -> Callable:
    """The `pipeline.value_and_grad` of the loss, jitted.

    By the compiler only the axis of stages is written out. By hand rows, sequence, shares of
    parameters and experts are too, in the same shard_map, and the tensor axis is the compiler's: a
    task gathers the parameters that it reads and scatters their gradients; what devices have copies
    of is summed once a step. Without `backward` the gradient is None.
    """
    made = functools.partial(_pipelined, layout, has_aux, aux, who, backward)
    if not layout.by_hand:
        return _jitted(layout, loss, made, who)

    def run(params, batch, *args, key=None):
        check_params(params, layout.auto, who)
        value, grads = made(loss, params)(params, batch, *args, key=key)
        return value, _pinned(layout, grads) if layout.tensor else grads

    return laid_out(jax.jit(run), parameter_rule(layout), layout.auto, who)


def program(layout: Layout, loss: Callable, has_aux: bool, params: Any, batch: Any) -> Any:
    """The `pipeline.Program` of a loss for arrays of these shapes."""
    function = _pipelined(layout, has_aux, "sum", "layouts.predict", True, loss, params)
    return function.program(params, batch)


def _pipelined(layout, has_aux, aux, who, backward, loss, params=None):
    given = layout.auto, layout.schedule, layout.microbatches, layout.stage[0]
    within = _within(layout, params, who) if layout.by_hand else pipeline.Within()
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


def _within(layout, params, who):
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
