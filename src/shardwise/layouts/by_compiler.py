"""A layout's roles by the compiler: one jitted program, its arrays and activations pinned."""

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


def value_and_grad(layout: Layout, loss: Callable, has_aux: bool, aux: Any, who: str) -> Callable:
    """The loss and gradient of whole arrays, jitted; batch and activations are pinned."""
    made = lambda loss: objective.value_and_grad(loss, layout.microbatches, has_aux, aux)  # noqa: E731
    return jitted(layout, loss, made, who)


def jitted(layout: Layout, loss: Callable, made: Callable, who: str) -> Callable:
    """The function that `made(loss)` returns, jitted, of the loss with the layout's meanings."""

    def marked(params, *args, **options):
        with marks.bind(**meanings(layout)):
            return loss(cast(layout, params), *args, **options)

    mean_and_grad = made(marked)

    def run(params, batch, *args, key=None):
        check(layout, batch, who)
        value, grads = mean_and_grad(params, _laid(layout, batch), *args, key=key)
        return value, rules.constrain_tree(grads, parameter_rule(layout), layout.auto)

    return jax.jit(run)


def _laid(layout, batch):
    """The batch, cut in rows and, where it has two axes or more, along the sequence."""

    def laid(x):
        entries = [layout.rows or None, layout.context or None][: jnp.ndim(x)]
        return jax.lax.with_sharding_constraint(x, NamedSharding(layout.auto, P(*entries)))

    return jax.tree.map(laid, batch)


def check(layout: Layout, batch: Any, who: str) -> None:
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
