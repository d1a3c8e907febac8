"""The same roles by the compiler: one jitted program, its arrays and activations pinned."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import marks, objective, rules
from shardwise import tree as trees
from shardwise.layouts.layout import Layout
from shardwise.layouts.meanings import meanings
from shardwise.layouts.placing import cast, parameter_rule


def place(layout: Layout, tree: Any) -> Any:
    """Parameters, laid out by rules; inside jit they are born so."""
    rule = parameter_rule(layout)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree)):
        return rules.constrain_tree(tree, rule, layout.mesh)
    return rules.place(tree, rule, layout.mesh)


def init(layout: Layout, tx: Any, params: Any) -> Any:
    """The optimizer's state, each array cut as its parameter; by ZeRO 1 and 2, more than it."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    return rules.jit(tx.init, layout.mesh, out_rules=state_rule(layout, shapes))(params)


def update(
    layout: Layout, tx: Any, grads: Any, opt_state: Any, params: Any, **extra: Any
) -> tuple[Any, Any]:
    """`tx.update`, what comes out laid out as what went in; inside jit."""
    updates, state = tx.update(grads, opt_state, params, **extra)
    state = rules.constrain_tree(state, state_rule(layout, params), layout.mesh)
    return rules.constrain_tree(updates, parameter_rule(layout), layout.mesh), state


def state_rule(layout: Layout, params: Any) -> rules.Rule:
    """The rule of an optimizer's state for these parameters, which may be abstract."""
    return rules.follow(parameter_rule(layout, zero=1), params, other=P())


def value_and_grad(layout: Layout, loss: Callable, has_aux: bool, aux: Any, who: str) -> Callable:
    """That of `objective` on whole arrays, batch, activations and gradients pinned."""

    def marked(params, *args, **options):
        with marks.bind(**meanings(layout)):
            return loss(cast(layout, params), *args, **options)

    mean_and_grad = objective.value_and_grad(marked, layout.microbatches, has_aux, aux)

    def run(params, batch, *args, key=None):
        check(layout, batch, who)
        value, grads = mean_and_grad(params, _laid(layout, batch), *args, key=key)
        return value, rules.constrain_tree(grads, parameter_rule(layout), layout.mesh)

    return jax.jit(run)


def _laid(layout, batch):
    """The batch, cut in rows and, where it has two axes or more, along the sequence."""

    def laid(x):
        entries = [layout.rows or None, layout.context or None][: jnp.ndim(x)]
        return jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, P(*entries)))

    return jax.tree.map(laid, batch)


def check(layout: Layout, batch: Any, who: str) -> None:
    """Raise where rows or sequences of the batch do not divide."""
    parts = math.prod(layout.mesh.shape[name] for name in layout.rows) * layout.microbatches
    columns = layout.size("context")
    for path, x in trees.leaves(batch):
        shape = jnp.shape(x)
        for axis, by, what in ((0, parts, "rows"), (1, columns, "sequence")):
            if len(shape) > axis and shape[axis] % by:
                raise ValueError(
                    f"{who}: {path or 'the batch'} of shape {shape} does not split into {by} parts "
                    f"along its {what}; pad it to {-(-shape[axis] // by) * by}, with a mask of 0."
                )


def whole(tree: Any) -> Any:
    """Each array whole on every device."""
    return rules.whole(tree)
