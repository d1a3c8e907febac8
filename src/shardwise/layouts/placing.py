"""Which rules a layout has for parameters."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardwise import fsdp, rules
from shardwise import tree as trees
from shardwise.fsdp.planning import leaves_of
from shardwise.layouts.layout import Layout
from shardwise.rules.rule import WHOLE

EXPERTS = "experts"  # the logical axis


def compiler_rule(layout: Layout) -> Callable | None:
    """The rule over the axes that a compiler has; None where it has none."""
    by_hand = layout.by_hand and not layout.stage  # a stage keeps its arrays as the compiler does
    if layout.over is not None or not (layout.tensor or (layout.expert and not by_hand)):
        return layout.over
    table = dict.fromkeys(layout.cut, _entry(layout.tensor)) if layout.tensor else {}
    experts = {EXPERTS: _entry(layout.expert)} if layout.expert and not by_hand else {}
    return Named(table | experts)


def expert_rule(layout: Layout) -> Callable | None:
    """The rule that cuts experts by hand."""
    return Named({EXPERTS: _entry(layout.expert)}) if layout.expert else None


@dataclasses.dataclass(frozen=True)
class Named:
    """A rule that cuts the logical axes in `table`, and leaves whole all others."""

    table: Mapping[str, Any]

    def __call__(self, tree: Any, mesh: Mesh) -> Any:
        """The PartitionSpecs; raises ValueError where no parameter carries one of the names."""
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


def _entry(axes):
    return axes[0] if len(axes) == 1 else axes or None


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
    over = compiler_rule(layout)
    if not layout.fsdp or (zero == 3 and layout.zero < 3):
        return P() if over is None else over
    given = layout.stacked if callable(layout.stacked) else None
    options = dict(over=over, stacked=given, uneven=layout.uneven)
    return rules.FSDPRule(_entry(layout.fsdp), layout.min_size, **options)


@contextlib.contextmanager
def naming(who: str) -> Iterator[None]:
    """Errors of the rules and stores within name what was called; also to decorate a rule with."""
    try:
        yield
    except ValueError as error:
        told = str(error).removeprefix("layouts: ").removeprefix("fsdp.place: ")
        raise ValueError(f"{who}: {told}") from error


def stored(layout: Layout, tree: Any, specs: Sequence[P], mesh: Mesh) -> tuple[fsdp.Stored, ...]:
    """How arrays are kept that lie as these specs say: as by hand, but nothing is padded."""
    leaves = list(leaves_of(tree, stacked(layout, tree)))
    own = [P()] * len(leaves)
    if layout.expert:
        own = jax.tree.leaves(expert_rule(layout)(tree, mesh), is_leaf=lambda x: isinstance(x, P))
    found = []
    for (path, x, is_stacked), spec, apart in zip(leaves, specs, own, strict=True):
        entries = [() if e is None else e for e in spec]
        entries = [(e,) if isinstance(e, str) else tuple(e) for e in entries]
        taken = {i for i, entry in enumerate(apart) if entry}
        cut = [i for i, e in enumerate(entries) if e and e == layout.fsdp and i not in taken]
        beside = [tuple(n for n in e if n in layout.tensor) or None for e in entries]
        at = cut[0] if cut else None
        size = x.shape[at] if cut else None
        beside = tuple(beside) if any(beside) else ()
        told = at, size, beside, tuple(apart)
        found.append(fsdp.Stored(path, x.shape, is_stacked, *told))
    return tuple(found)


def cast(layout: Layout, params: Any) -> Any:
    """Weights in the dtype in which the layout uses them."""

    def one(x):
        floating = layout.dtype is not None and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(layout.dtype) if floating else x

    return jax.tree.map(one, params)
