"""Which rules a layout has for parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardwise import rules
from shardwise import tree as trees
from shardwise.layouts.layout import Layout


def tensor_rule(layout: Layout) -> Callable | None:
    """The rule over the tensor axis: by logical axes, or the layout's own; None without one."""
    if not layout.tensor:
        return None
    if layout.over is not None:
        return layout.over
    axes = layout.tensor[0] if len(layout.tensor) == 1 else layout.tensor

    def by_names(tree: Any, mesh: Mesh) -> Any:
        names = {name for _, _, box in trees.walk(tree) for name in trees.axis_names(box) or ()}
        table = {name: axes if name in layout.cut else None for name in names - {None}}
        if not set(table).intersection(layout.cut):
            raise ValueError(
                f"layouts: tensor={layout.tensor} cuts the logical axes {layout.cut}, and no "
                f"parameter carries one of these names (found: {sorted(table) or 'none'}). Name "
                f"the axes in NNX metadata logical_axes, say cut=, or give over=, a rule for the "
                f"tensor axis."
            )
        return rules.LogicalRules(table)(tree, mesh)

    return by_names


def stacked(layout: Layout, tree: Any) -> Any:
    """What says which arrays have a leading axis of layers."""
    if layout.stacked is not None:
        return layout.stacked
    for _, x, box in trees.walk(tree):
        axes = trees.axis_names(box)
        if axes is not None and (len(axes) < jnp.ndim(x) or axes[:1] == (trees.LAYERS,)):
            return trees.LAYERS
    return None


def parameter_rule(layout: Layout, zero: int = 3) -> Any:
    """For a layout by the compiler: parameters, and with `zero` 1 what their state is cut like."""
    over = tensor_rule(layout)
    if not layout.fsdp or (zero == 3 and layout.zero < 3):
        return P() if over is None else over
    axis = layout.fsdp[0] if len(layout.fsdp) == 1 else layout.fsdp
    given = layout.stacked if callable(layout.stacked) else None
    return rules.FSDPRule(axis, layout.min_size, over=over, stacked=given)


def cast(layout: Layout, params: Any) -> Any:
    """Weights in the dtype in which the layout uses them."""

    def one(x):
        floating = layout.dtype is not None and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(layout.dtype) if floating else x

    return jax.tree.map(one, params)
