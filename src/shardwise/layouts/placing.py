"""The rules by which a layout cuts parameters."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardwise import fsdp, rules
from shardwise import tree as trees
from shardwise.fsdp import arrays
from shardwise.layouts.layout import Layout
from shardwise.mesh import entry_of
from shardwise.rules.rule import Choice, Rule, specs
from shardwise.tree import Leaf

EXPERTS = "experts"  # the logical axis


def _over(layout):
    """The rule over the axes that fsdp leaves: those of tensor, experts and stages."""
    table = {}
    if layout.expert and (layout.over is None or layout.by_hand):
        table[EXPERTS] = entry_of(layout.expert)
    if layout.tensor and layout.over is None:
        table |= dict.fromkeys(layout.cut, entry_of(layout.tensor))
    named = Named(table) if table else None
    found = [rule for rule in (layout.over, named) if rule is not None]
    found = [Stages(layout, found), *found] if layout.stage else found
    return Together(*found) if len(found) > 1 else next(iter(found), None)


def expert_rule(layout: Layout) -> "Named | None":
    """The rule that cuts experts by hand."""
    return Named({EXPERTS: entry_of(layout.expert)}) if layout.expert else None


class Named(rules.LogicalRules):
    """A rule that cuts the logical axes in its table, and leaves whole all others."""

    who = "LogicalRules"
    advice = "or a mesh axis that divides it (what the layout's cut= leaves out stays whole)"

    def chosen(self, tree: Any, leaves: list[Leaf], mesh: Mesh) -> list[Choice]:
        """One `Choice` for each leaf; a ValueError where none has a name that a mesh axis cuts."""
        names = {name for leaf in leaves for name in leaf.axes or ()} - {None, trees.LAYERS}
        for axes in self.table.values():
            cut = [name for name, other in self.table.items() if other == axes]
            if names.isdisjoint(cut):
                raise ValueError(
                    f"{self.who}: no parameter carries one of the logical axes {sorted(cut)} "
                    f"(found: {sorted(names) or 'none'}), which the layout cuts. Name them in NNX "
                    f"metadata logical_axes, say cut=, or give over=, a rule for the tensor axis."
                )
        return super().chosen(tree, leaves, mesh)

    def entry(self, name: str | None, path: str, axes: tuple) -> Any:
        return self.table.get(name)


class Together(Rule):
    """Rules that cut different axes, of the arrays and of the mesh."""

    def __init__(self, *each: Any):
        self.each = each

    def chosen(self, tree: Any, leaves: list[Leaf], mesh: Mesh) -> list[Choice]:
        """One `Choice` for each leaf: on each of its axes the first rule that cuts it."""
        found = zip(*(specs(rule, tree, mesh) for rule in self.each), strict=True)
        each = ([*itertools.zip_longest(*own)] for own in found)
        return [Choice(P(*(next(filter(None, on), None) for on in axes))) for axes in each]


class Stages(Rule):
    """The rule that cuts each array of two axes or more over stages, along the first that divides.

    That is the one of layers where they are stacked; what is not in layers is gathered for a step.
    Of layers that do not divide, it is one that no rule of `others` cuts.
    """

    def __init__(self, layout: Layout, others: Sequence[Any]):
        self.axes, self.size, self.others = layout.stage, layout.size("stage"), others

    def chosen(self, tree: Any, leaves: list[Leaf], mesh: Mesh) -> list[Choice]:
        """One `Choice` for each leaf."""
        found = [[P()] * len(leaves), *(specs(rule, tree, mesh) for rule in self.others)]
        each = zip(leaves, *found, strict=True)
        return [
            self._choice(leaf, {i for spec in own for i, entry in enumerate(spec) if entry})
            for leaf, *own in each
        ]

    def _choice(self, leaf, cut):
        places = [i for i, n in enumerate(leaf.shape) if n and n % self.size == 0]
        if (leaf.axes or ())[:1] == (trees.LAYERS,) and 0 not in places:
            places = [i for i in places if i not in cut]
        at = places and len(leaf.shape) > 1
        return Choice(P(*[None] * places[0], *self.axes) if at else P())


def parameter_rule(layout: Layout, zero: int = 3) -> rules.FSDPRule:
    """The rule by which parameters are cut, or with `zero` 1 the one that their state follows.

    They differ for ZeRO 1 and 2 by the compiler, where parameters are whole along fsdp.
    """
    whole = zero == 3 and layout.zero < 3 and not layout.by_hand
    return rules.FSDPRule(
        () if whole else entry_of(layout.fsdp) or (),
        min_size=layout.min_size,
        over=_over(layout),
        pick="first" if layout.by_hand else "largest",
        stacked=layout.stacked,
        uneven=layout.uneven,
        beside=layout.stage if layout.by_hand else (),
    )


def state_rule(layout: Layout, params: Any) -> Rule:
    """The rule of an optimizer's state for these parameters, which may be abstract.

    An array lies as its parameter does; one of another shape is cut along fsdp by itself.
    """
    rule = parameter_rule(layout, zero=1)
    return rules.follow(rule, params, other=fsdp.rule(rule.axis))


def shardings(layout: Layout, params: Any, tx: Any, who: str) -> Any:
    """The NamedShardings of parameters; with `tx` (these, those of its state)."""
    try:
        found = rules.shardings(parameter_rule(layout), params, layout.auto)
        if tx is None:
            return found
        shapes = abstract(params)
        state = jax.eval_shape(tx.init, shapes)
        return found, rules.shardings(state_rule(layout, shapes), state, layout.auto)
    except ValueError as error:
        raise ValueError(f"{who}: {error}") from error


def array_layouts(layout: Layout, tree: Any, leave_out: Sequence[str] = ()) -> tuple:
    """The ArrayLayout by hand of each array of `tree`; a stage's `leave_out` the axis of stages."""
    rule, apart = parameter_rule(layout, 1), expert_rule(layout)
    return arrays.array_layouts(tree, rule, layout.auto, apart, leave_out)


def abstract(tree: Any) -> Any:
    """The shapes and dtypes of a tree's arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)
