"""Logical axes: names in the model, a table beside it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from shardwise.rules.leaves import Leaf
from shardwise.rules.rule import Choice, Rule, check_axes, check_not_factored, mesh_axes


@dataclasses.dataclass(frozen=True, eq=False)
class LogicalRules(Rule):
    """A table from logical axis names to mesh axes: a name, a tuple of names, or None for whole.

    Parameters carry the names: metadata `logical_axes` of an NNX variable, what
    `nnx.with_partitioning` leaves there, or Linen's boxes. For plain pytrees `names` gives them, as
    a tree of tuples. An unnamed leading axis is "layers", whole unless the
    table says otherwise. `table | {"embed": "fsdp"}` is a variant with that entry replaced.

    Raises, when called:
      ValueError: a name without an entry, a mesh axis that the mesh lacks, two names of one array
        on one mesh axis, an array without names, an axis that does not divide (see `Rule`).
    """

    table: Mapping[str, Any]
    names: Any = None
    uneven: str = "error"

    def __post_init__(self):
        self.check_uneven()

    def __or__(self, changes):
        """These rules with single entries replaced.

        Raises:
          ValueError: an entry that is not there to replace.
        """
        if not isinstance(changes, Mapping):
            raise TypeError(f"LogicalRules | {type(changes).__name__}: expected a dict of entries.")
        known = {"layers", *self.table}
        if unknown := set(changes) - known:
            raise ValueError(
                f"LogicalRules: no entry {min(unknown)!r} to replace; there are {sorted(known)}. "
                f"To add a name, make new LogicalRules."
            )
        return dataclasses.replace(self, table={**self.table, **changes})

    def spec(self, *axes: str | None) -> PartitionSpec:
        """The PartitionSpec of an activation with these logical axes; None for an unnamed one.

        Raises:
          ValueError: a name without an entry, or two names on one mesh axis.
        """
        entries = [self._entry(name, "an activation", axes) for name in axes]
        self._check_collision("an activation", axes, entries)
        return PartitionSpec(*entries)

    def choices(self, tree: Any, mesh: Mesh) -> list[Choice]:
        named = [axis for entry in self.table.values() for axis in mesh_axes(entry)]
        check_axes("LogicalRules", named, mesh)
        return super().choices(tree, mesh)

    def choose(self, leaf: Leaf, mesh: Mesh) -> Choice:
        check_not_factored("LogicalRules", leaf)
        if leaf.axes is None:
            raise ValueError(
                f"LogicalRules: {leaf.label} of shape {leaf.shape} has no logical axes. Create the "
                f"parameter with metadata logical_axes=(...), or pass names=, a tree of tuples; "
                f"an activation takes a spec, as rules.spec('batch', None, 'embed') makes it."
            )
        entries = [self._entry(name, leaf.label, leaf.axes) for name in leaf.axes]
        self._check_collision(leaf.label, leaf.axes, entries)
        names = ", ".join(str(name) for name in leaf.axes)
        return Choice(PartitionSpec(*entries), f"no mesh axis for {names}")

    def _entry(self, name, path, axes):
        if name is None or (name == "layers" and name not in self.table):
            return None
        if name not in self.table:
            raise ValueError(
                f"LogicalRules: {path} has the logical axes {tuple(axes)}, and there is no rule "
                f"for {name!r}; add {name!r}: None to leave it whole, or a mesh axis. There are "
                f"rules for {sorted(self.table)}."
            )
        entry = self.table[name]
        return tuple(entry) if isinstance(entry, list) else entry

    def _check_collision(self, label, axes, entries):
        owner = {}
        for name, entry in zip(axes, entries, strict=True):
            for axis in mesh_axes(entry):
                if axis in owner:
                    raise ValueError(
                        f"LogicalRules: in {label} the logical axes {owner[axis]!r} and "
                        f"{name!r} are both on mesh axis {axis!r}, which can cut an array once. "
                        f"Give one of them None or another mesh axis."
                    )
                owner[axis] = name
