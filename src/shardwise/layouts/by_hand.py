"""Data, fsdp and context by hand: one shard_map around the loss; the tensor axis is left in it."""

from collections.abc import Callable
from typing import Any

from shardwise import fsdp
from shardwise.fsdp import planning
from shardwise.layouts.layout import Layout
from shardwise.layouts.meanings import meanings, order
from shardwise.layouts.placing import compiler_rule, expert_rule, stacked


def place(layout: Layout, tree: Any) -> fsdp.Sharded:
    """Parameters in shares."""
    return fsdp.place(tree, *_placed(layout, tree))


def plan(layout: Layout, shapes: Any) -> tuple[fsdp.Stored, ...]:
    """How `place` would keep these arrays, which may be abstract."""
    return planning.plan(shapes, *_placed(layout, shapes))


def _placed(layout, tree):
    """The arguments of `fsdp.place`, after the tree."""
    rules = compiler_rule(layout), expert_rule(layout)
    return layout.mesh, layout.fsdp, layout.min_size, stacked(layout, tree), *rules


def value_and_grad(layout: Layout, loss: Callable, has_aux: bool, aux: Any, who: str) -> Callable:
    """That of `fsdp`, with the layout's meanings of marks."""
    return fsdp.value_and_grad(
        loss,
        layout.mesh,
        layout.fsdp,
        replicate=[name for name in layout.rows if name not in layout.fsdp],
        columns=layout.context,
        order=order(layout),
        zero=layout.zero,
        microbatches=layout.microbatches,
        dtype=layout.dtype,
        reduce_dtype=layout.reduce_dtype,
        has_aux=has_aux,
        aux=aux,
        meanings=meanings(layout),
        who=who,
    )
