"""Rules by names: of logical axes, by a table; of paths, by patterns or a function."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from shardwise.mesh import axes_of
from shardwise.rules.rule import Choice, Rule
from shardwise.tree import Leaf


@dataclasses.dataclass(frozen=True, eq=False)
class LogicalRules(Rule):
    """A table from logical axis names to mesh axes: a name, a tuple of names, or None for whole.

    Parameters carry the names: metadata `logical_axes` of an NNX variable, what
    `nnx.with_partitioning` leaves there, or Linen's boxes; to plain pytrees `names`, a tree of
    tuples, gives them. An unnamed leading axis is "layers", whole unless the table says otherwise.
    `rules | {"embed": "fsdp"}` is a variant with that entry replaced.

    Raises, when called:
      ValueError: a name without an entry, a mesh axis that the mesh lacks, two names of one array
        on one mesh axis, an array without names, an axis that does not divide (see `Rule`).
    """

    table: Mapping[str, Any]
    names: Any = None
    uneven: str = "error"

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

    def spec(self, *axes: str | None, of: str = "an activation") -> PartitionSpec:
        """The PartitionSpec of an activation with these logical axes; None for an unnamed one.

        Raises:
          ValueError: a name without an entry, or two names on one mesh axis, `of` what is told.
        """
        owner, entries = {}, [self.entry(name, of, axes) for name in axes]
        for name, entry in zip(axes, entries, strict=True):
            for axis in axes_of(entry):
                if axis in owner:
                    raise ValueError(
                        f"LogicalRules: in {of} the logical axes {owner[axis]!r} and {name!r} are "
                        f"both on mesh axis {axis!r}, which can cut an array once. Give one of "
                        f"them None or another mesh axis."
                    )
                owner[axis] = name
        return PartitionSpec(*entries)

    def choose(self, leaf: Leaf, mesh: Mesh) -> Choice:
        self.check_not_factored(leaf)
        if leaf.axes is None:
            raise ValueError(
                f"LogicalRules: {leaf.label} of shape {leaf.shape} has no logical axes. Create the "
                f"parameter with metadata logical_axes=(...), or pass names=, a tree of tuples; "
                f"an activation takes a spec, as rules.spec('batch', None, 'embed') makes it."
            )
        names = ", ".join(map(str, leaf.axes))
        return Choice(self.spec(*leaf.axes, of=leaf.label), f"no mesh axis for {names}")

    def entry(self, name: str | None, path: str, axes: Sequence[str | None]) -> Any:
        """The mesh axes of the logical axis `name`, one of the `axes` of an array."""
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


class PathRules(Rule):
    """Pairs of a regular expression and a PartitionSpec: the first that is found in a path counts.

    With `strict` every leaf of more than one element must match and every pattern be used;
    otherwise unmatched leaves are replicated.

    Raises:
      ValueError: a pair that is not a pattern and a spec; when called, all unmatched paths or
        unused patterns, and what `Rule` lists.
    """

    def __init__(
        self, *pairs: tuple[str, PartitionSpec], strict: bool = True, uneven: str = "error"
    ):
        for pair in pairs:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)) or (
                not isinstance(pair[1], PartitionSpec)
            ):
                raise ValueError(
                    f"PathRules: {pair!r}; expected pairs of a regular expression and a "
                    f"PartitionSpec, such as ('mlp/.*kernel', P('fsdp'))."
                )
        self.pairs = [(re.compile(pattern), spec) for pattern, spec in pairs]
        self.strict, self.uneven = strict, uneven
        self.__post_init__()

    def chosen(self, tree: Any, leaves: list[Leaf], mesh: Mesh) -> list[Choice]:
        if self.strict:
            self._check_complete([leaf.path for leaf in leaves if leaf.size != 1])
        return super().chosen(tree, leaves, mesh)

    def choose(self, leaf: Leaf, mesh: Mesh) -> Choice:
        pattern, spec = self._first(leaf.path)
        return Choice(spec, f"{pattern.pattern!r} says so" if pattern else "no pattern matches")

    def _first(self, path):
        found = (pair for pair in self.pairs if pair[0].search(path))
        return next(found, (None, PartitionSpec()))

    def _check_complete(self, paths):
        used = {path: self._first(path)[0] for path in paths}
        if unmatched := [path for path, pattern in used.items() if pattern is None]:
            raise ValueError(
                f"PathRules: no pattern matches {', '.join(unmatched)}. Add one, such as "
                f"('.*', P()) at the end, or pass strict=False to replicate them."
            )
        if unused := [p.pattern for p, _ in self.pairs if p not in used.values()]:
            raise ValueError(
                f"PathRules: no leaf takes the pattern {unused[0]!r}: none matches, or earlier "
                f"patterns took them all. Correct or remove it, or pass strict=False. Paths are "
                f"{', '.join(paths)}."
            )


@dataclasses.dataclass(frozen=True)
class PolicyRule(Rule):
    """A rule by `fn(path, leaf) -> PartitionSpec`, for each array of more than one element.

    Raises, when called:
      TypeError: `fn` returned something else.
    """

    fn: Callable
    uneven: str = "error"

    def choose(self, leaf: Leaf, mesh: Mesh) -> Choice:
        spec = self.fn(leaf.path, leaf.array)
        if not isinstance(spec, PartitionSpec):
            raise TypeError(
                f"PolicyRule: for {leaf.label} the function returned {spec!r}; expected a "
                f"PartitionSpec, P() for a replicated array."
            )
        return Choice(spec)
