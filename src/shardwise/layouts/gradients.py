"""The mean and gradient of a loss under a layout: by hand, by the compiler, in stages."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import fsdp, marks, objective, pipeline, rules
from shardwise import tree as trees
from shardwise.fsdp.arrays import laid_out, without
from shardwise.layouts import exact
from shardwise.layouts.layout import Layout
from shardwise.layouts.meanings import meanings, order
from shardwise.layouts.placing import array_layouts, cast, expert_rule, parameter_rule
from shardwise.layouts.shares import shares
from shardwise.objective.division import Division
from shardwise.objective.parts import check_cut
from shardwise.rules.rule import specs


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
    given = _marked(layout, loss), layout.microbatches, has_aux, aux
    return _jitted(layout, lambda params: objective.value_and_grad(*given), who)


def in_stages(
    layout: Layout, loss: Callable, has_aux: bool, aux: Any, who: str, backward: bool = True
) -> Callable:
    """The `pipeline.value_and_grad` of the loss, jitted.

    By the compiler only the axis of stages is written out. By hand rows, sequence, shares of
    parameters and experts are too, in the same shard_map, and the tensor axis is the compiler's: a
    task gathers the parameters that it reads and scatters their gradients; what devices have copies
    of is summed once a step. Without `backward` the gradient is None.
    """
    loss = loss if layout.by_hand else _marked(layout, loss)
    made = functools.partial(_pipelined, layout, loss, has_aux, aux, who, backward)
    return _jitted(layout, made, who)


def _marked(layout, loss):
    """The loss with the layout's meanings of marks, of weights in the dtype of use."""

    def marked(params, *args, **options):
        with marks.bind(**meanings(layout)):
            return loss(cast(layout, params), *args, **options)

    return marked


def _jitted(layout, made, who):
    """The function that `made(params)` returns, jitted, on arrays laid out as the layout says."""
    rule, mesh = parameter_rule(layout), layout.auto

    def run(params, batch, *args, key=None):
        batch = batch if layout.by_hand else _laid(layout, batch, who)
        value, grads = made(params)(params, batch, *args, key=key)
        if grads is not None and (layout.tensor or not layout.by_hand):
            grads = rules.constrain_tree(grads, rule, mesh)
        return value, grads

    return laid_out(jax.jit(run), rule, mesh, who) if layout.by_hand else jax.jit(run)


def _laid(layout, batch, who):
    """The batch, cut in rows and, where it has two axes or more, along the sequence."""
    cuts = (layout.rows, layout.microbatches, "rows"), (layout.context, 1, "sequence")
    found = []
    for path, x in trees.leaves(batch):
        shape = jnp.shape(x)
        for size, (axes, times, what) in zip(shape, cuts, strict=False):
            told, parts = f"{path or 'the batch'} of shape {shape}", layout.parts(axes) * times
            check_cut(who, told, size, parts, f"along its {what}")
        spec = P(*(axes or None for axes, *_ in cuts[: len(shape)]))
        found.append(jax.lax.with_sharding_constraint(x, NamedSharding(layout.auto, spec)))
    return jax.tree.unflatten(jax.tree.structure(batch), found)


def program(layout: Layout, loss: Callable, has_aux: bool, params: Any, batch: Any) -> Any:
    """The `pipeline.Program` of a loss for arrays of these shapes."""
    function = _pipelined(layout, loss, has_aux, "sum", "layouts.predict", True, params)
    return function.program(params, batch)


def _pipelined(layout, loss, has_aux, aux, who, backward, params):
    mesh, within = layout.auto, {}
    if layout.by_hand:
        within = dict(
            division=Division(layout.rows, layout.context, mesh=mesh, order=order(layout)),
            by_hand=[name for name in mesh.axis_names if name not in layout.tensor],
            meanings=meanings(layout),
            shares=functools.partial(shares, layout, array_layouts(layout, params, layout.stage)),
        )
    manual = (*layout.stage, *(layout.divided if layout.by_hand else ()))
    others = [name for name in mesh.axis_names if name not in manual]
    return pipeline.value_and_grad(
        loss,
        mesh,
        layout.schedule,
        layout.microbatches,
        layout.stage[0],
        lambda params: [without(s, others) for s in specs(parameter_rule(layout), params, mesh)],
        **within,
        has_aux=has_aux,
        aux=aux,
        who=who,
        backward=backward,
    )
