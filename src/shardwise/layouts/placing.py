"""The rules by which a layout cuts parameters."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardwise import fsdp, rules
from shardwise import tree as trees
from shardwise.layouts.layout import Layout
from shardwise.rules.rule import WHOLE

EXPERTS = "experts"  # the logical axis


def _over(layout):
    """The rule over the axes that fsdp leaves: those of tensor, experts and stages."""
    found = _over_products(layout)
    if not layout.stage:
        return found
    layers = Layers(layout.stage[0])
    return layers if found is None else Both(layers, found)


def _over_products(layout):
    tensor = layout.over
    if tensor is None and layout.tensor:
        tensor = Named(dict.fromkeys(layout.cut, _entry(layout.tensor)))
    experts = expert_rule(layout)
    if tensor is None or experts is None or (layout.over is not None and not layout.by_hand):
        return experts if tensor is None else tensor
    return Both(tensor, experts)


def expert_rule(layout: Layout) -> Callable | None:
    """The rule that cuts experts by hand."""
    return Named({EXPERTS: _entry(layout.expert)}) if layout.expert else None


@dataclasses.dataclass(frozen=True)
class Named:
    """A rule that cuts the logical axes in `table`, and leaves whole all others."""

    table: Mapping[str, Any]

    def __call__(self, tree: Any, mesh: Mesh) -> Any:
        """The PartitionSpec of each array; raises ValueError where none has one of the names."""
        names = {name for _, _, box in trees.walk(tree) for name in trees.axis_names(box) or ()}
        if not names.intersection(self.table):
            raise ValueError(
                f"layouts: no parameter carries one of the logical axes {sorted(self.table)} "
                f"(found: {sorted(names - {None}) or 'none'}), which the layout cuts. Name the "
                f"axes in NNX metadata logical_axes, say cut=, or give over=, a rule for the "
                f"tensor axis."
            )
        table = {name: self.table.get(name) for name in names - {None}}
        try:
            return rules.LogicalRules(table)(tree, mesh)
        except ValueError as error:  # it advises on a rule that is not the caller's
            advice = (
                "or a mesh axis that divides it (what the layout's cut= leaves out stays whole)"
            )
            raise ValueError(str(error).replace(WHOLE, advice)) from error


@dataclasses.dataclass(frozen=True)
class Both:
    """Two rules that cut different axes, of the arrays and of the mesh."""

    first: Callable
    second: Callable

    def __call__(self, tree: Any, mesh: Mesh) -> Any:
        """The PartitionSpec of each array, of the entries of both rules."""
        is_spec = lambda x: isinstance(x, P)  # noqa: E731
        one, other = (
            jax.tree.leaves(r(tree, mesh), is_leaf=is_spec) for r in (self.first, self.second)
        )
        specs = [
            P(*(a if a is not None else b for a, b in itertools.zip_longest(x, y)))
            for x, y in zip(one, other, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(tree), specs)


@dataclasses.dataclass(frozen=True)
class Layers:
    """A rule that cuts each array of two axes or more over stages, along the first that divides.

    That is the one of layers where they are stacked; what is not in layers is gathered for a step.
    """

    axis: str

    def __call__(self, tree: Any, mesh: Mesh) -> Any:
        """The PartitionSpec of each array."""
        return jax.tree.map(lambda x: self._spec(jnp.shape(x), mesh.shape[self.axis]), tree)

    def _spec(self, shape, parts):
        places = [i for i, size in enumerate(shape) if size and size % parts == 0]
        return P(*[None] * places[0], self.axis) if places and len(shape) > 1 else P()


def _entry(axes):
    return axes[0] if len(axes) == 1 else axes or None


def parameter_rule(layout: Layout, zero: int = 3) -> rules.FSDPRule:
    """The rule by which parameters are cut, or with `zero` 1 the one that their state follows.

    They differ for ZeRO 1 and 2 by the compiler, where parameters are whole along fsdp.
    """
    whole = zero == 3 and layout.zero < 3 and not layout.by_hand
    return rules.FSDPRule(
        () if whole else _entry(layout.fsdp) or (),
        min_size=layout.min_size,
        over=_over(layout),
        pick="first" if layout.by_hand else "largest",
        stacked=layout.stacked,
        uneven=layout.uneven,
    )


@contextlib.contextmanager
def naming(who: str) -> Iterator[None]:
    """A context in which ValueErrors name `who`, that was called; also to decorate a rule with."""
    try:
        yield
    except ValueError as error:
        told = str(error).removeprefix("layouts: ").removeprefix("fsdp: ")
        raise ValueError(f"{who}: {told}") from error


def state_rule(layout: Layout, params: Any) -> rules.Rule:
    """The rule of an optimizer's state for these parameters, which may be abstract.

    An array lies as its parameter does; one of another shape is cut along fsdp by itself.
    """
    rule = parameter_rule(layout, zero=1)
    return rules.follow(rule, params, other=fsdp.rule(rule.axis))


def shardings(layout: Layout, params: Any, tx: Any, who: str) -> Any:
    """The NamedShardings of parameters; with `tx` (these, those of its state)."""
    with naming(who):
        found = rules.shardings(parameter_rule(layout), params, layout.auto)
    if tx is None:
        return found
    shapes = abstract(params)
    state = jax.eval_shape(tx.init, shapes)
    return found, rules.shardings(state_rule(layout, shapes), state, layout.auto)


def array_layouts(layout: Layout, tree: Any) -> tuple[fsdp.ArrayLayout, ...]:
    """The ArrayLayout by hand of each array of `tree`, which may be abstract."""
    return fsdp.array_layouts(tree, parameter_rule(layout, 1), layout.auto, expert_rule(layout))


def abstract(tree: Any) -> Any:
    """The shapes and dtypes of a tree's arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def cast(layout: Layout, params: Any) -> Any:
    """Weights in the dtype in which the layout uses them."""

    def one(x):
        floating = layout.dtype is not None and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(layout.dtype) if floating else x

    return jax.tree.map(one, params)
