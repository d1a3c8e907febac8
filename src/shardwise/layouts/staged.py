"""Stages: the layers of each on devices of their own, by a schedule; the other roles within them.

Within a stage all is the compiler's: its programs are jitted, and their arrays and activations
pinned, as `by_compiler` does.
"""

from collections.abc import Callable
from typing import Any

from jax.sharding import PartitionSpec as P

from shardwise import marks, pipeline
from shardwise.layouts.layout import Layout
from shardwise.layouts.meanings import meanings
from shardwise.layouts.placing import cast, parameter_rule


def value_and_grad(layout: Layout, loss: Callable, has_aux: bool, aux: Any) -> Callable:
    """That of `pipeline`, with rows and sequences cut within the stages."""

    def marked(params, *args, **options):
        with marks.bind(**meanings(layout)):
            return loss(cast(layout, params), *args, **options)

    return pipeline.value_and_grad(
        marked,
        layout.mesh,
        layout.schedule,
        layout.microbatches,
        axis=layout.stage[0],
        rows=P(layout.rows or None, layout.context or None),
        has_aux=has_aux,
        aux=aux,
        gather="task" if layout.zero == 3 else "step",
    )


def place(
    layout: Layout, tree: Any, loss: Callable, batch: Any, has_aux: bool
) -> pipeline.Pipelined:
    """Parameters on the stages that read them."""
    like = value_and_grad(layout, loss, has_aux, "sum")
    return pipeline.place(tree, like, batch, rule=parameter_rule(layout))


def create(
    layout: Layout, function: Callable, key: Any, loss: Callable, batch: Any, has_aux: bool
) -> pipeline.Pipelined:
    """`place(layout, function(key), ...)`, each array born on its stages."""
    like = value_and_grad(layout, loss, has_aux, "sum")
    return pipeline.create(function, key, like, batch, rule=parameter_rule(layout))
