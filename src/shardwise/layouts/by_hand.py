"""Data, fsdp and context by hand: one shard_map around the loss; the tensor axis is left in it."""

from collections.abc import Callable
from typing import Any

from shardwise import fsdp
from shardwise.layouts.layout import Layout
from shardwise.layouts.meanings import meanings, order
from shardwise.layouts.placing import expert_rule, parameter_rule


def value_and_grad(layout: Layout, loss: Callable, has_aux: bool, aux: Any, who: str) -> Callable:
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
