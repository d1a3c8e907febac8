"""The kinds of rules: by logical axes, by paths, by a function of one's own; FSDP, by sizes."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from shardwise.mesh import axes_of, check_axes, parts
from shardwise.rules.rule import ONE, Choice, Rule, specs, used_axes
from shardwise.tree import LAYERS, Leaf, read


@dataclasses.dataclass(frozen=True, eq=False)
class LogicalRules(Rule):
    """A rule by a table from logical axis names to mesh axes: a name, a tuple of names, or None.

    Parameters carry the names: metadata `logical_axes` of an NNX variable, what
    `nnx.with_partitioning` leaves there, or Linen's boxes; to plain pytrees `names`, a tree of
    tuples, gives them. `shardwise.model` lists its decoder's. An unnamed leading axis is "layers",
    whole unless the table says otherwise. `rules | {"embed": "fsdp"}` is a variant with that entry
    replaced. With `uneven="replicate"` an axis that its mesh axes do not divide stays whole.

    Raises, when called:
      ValueError: a name without an entry, a mesh axis that the mesh lacks, two names of one array
        on one mesh axis, an array without names, an axis that its mesh axes do not divide.
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
        known = {LAYERS, *self.table}
        if unknown := set(changes) - known:
            raise ValueError(
                f"LogicalRules: no entry {min(unknown)!r} to replace; there are {sorted(known)}. "
                f"To add a name, make new LogicalRules."
            )
        return dataclasses.replace(self, table={**self.table, **changes})

    def spec(self, *axes: str | None, of: str = "an activation") -> PartitionSpec:
        """The PartitionSpec of an activation with these logical axes, of which None names none.

        Raises:
          ValueError: a name without an entry, or two on one mesh axis; it calls the array `of`.
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
        """The table's entry for the logical axis `name`: a mesh axis, a tuple of them, or None.

        Errors name `axes`, those of the array at `path`; a name without an entry is a ValueError.
        """
        table = {LAYERS: None, **self.table, None: None}
        if name not in table:
            raise ValueError(
                f"LogicalRules: {path} has the logical axes {tuple(axes)}, and there is no rule "
                f"for {name!r}; add {name!r}: None to leave it whole, or a mesh axis. There are "
                f"rules for {sorted(self.table)}."
            )
        return tuple(table[name]) if isinstance(table[name], list) else table[name]


class PathRules(Rule):
    """A rule by pairs of a regular expression and a PartitionSpec, the first found in a path.

    With `strict` every leaf of more than one element must match and every pattern be used;
    otherwise unmatched leaves are replicated. `uneven` is as in `LogicalRules`.

    Raises:
      ValueError: a pair that is not a pattern and a spec; when called, unmatched paths or unused
        patterns, a spec that does not fit its array or the mesh, an axis that does not divide.
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
    """A rule by `fn(path, leaf) -> PartitionSpec`, for each array of more than one element; paths
    are strings, as `shardwise.tree.leaves` makes them.

    Raises, when called:
      TypeError: `fn` returned something else.
      ValueError: a spec that does not fit its array or the mesh; see `uneven` in `LogicalRules`.
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


@dataclasses.dataclass(frozen=True, eq=False)
class FSDPRule(Rule):
    """A rule that cuts each array of `min_size` elements or more along one of its axes, over mesh
    axis `axis`, which may be a tuple of mesh axes, together one.

    It cuts the largest of the array's axes that this divides, of equally large ones the last. With
    `pick="first"` it cuts the first that this divides, whatever its size: its parts are contiguous,
    so that a collective by hand need not transpose them. An axis of stacked layers is never cut:
    one named "layers" (`names` are as in `LogicalRules`), or axis 0 of arrays for which
    `stacked(path)` is true. An array without names, if `stacked` is None, may have layers along
    axis 0 where it has three axes or more: then axis 0 is cut only if no other axis divides, and
    only with `uneven="replicate"`. Axes that `over`, another rule, has cut are left alone, as in
    `FSDPRule("fsdp", over=tensor)`; but for one that `over` has cut over the mesh axes `beside`,
    where no other divides: each part along `axis` is then cut over these. An axis of layers, or the
    first of an array without names, is never shared so.

    Raises:
      ValueError: another `pick` or `uneven`; when called, the mesh lacks the axis, or a large array
        has no axis that can be cut. With `uneven="replicate"` that one stays as `over` has it.
    """

    axis: str | tuple
    min_size: int = 2**14
    over: Any = None
    pick: str = "largest"
    stacked: Callable | None = None
    names: Any = None
    uneven: str = "error"
    beside: tuple = ()

    def __post_init__(self):
        if self.stacked is not None and not callable(self.stacked):
            raise ValueError(
                f"FSDPRule: stacked={self.stacked!r}; expected a predicate on paths, or None where "
                f"names that the tree carries tell."
            )
        super().__post_init__()
        if self.pick not in ("largest", "first"):
            raise ValueError(f"FSDPRule: pick={self.pick!r}; expected 'largest' or 'first'.")

    def _known_names(self):
        return getattr(self.over, "names", None) if self.names is None else self.names

    def chosen(self, tree: Any, leaves: list[Leaf], mesh: Mesh) -> list[Choice]:
        check_axes(self.who, mesh, axes_of(self.axis))
        whole = [PartitionSpec()] * len(leaves)
        below = whole if self.over is None else specs(self.over, tree, mesh)
        return [self._cut(leaf, spec, mesh) for leaf, spec in zip(leaves, below, strict=True)]

    def _cut(self, leaf, spec, mesh):
        if leaf.size < 2:
            return ONE if leaf.size else Choice(PartitionSpec(), "no element")
        if not axes_of(self.axis):
            return Choice(spec, "no mesh axis is named")
        if leaf.size < self.min_size:
            return Choice(spec, f"{leaf.size} elements, fewer than min_size={self.min_size}")
        if not set(axes_of(self.axis)).isdisjoint(used_axes(spec)):
            return Choice(spec)
        self.check_not_factored(leaf)
        entries = [*spec, *[None] * (len(leaf.shape) - len(spec))]
        free = [i for i, entry in enumerate(entries) if entry is None]
        if both := self._shared(leaf, entries, free, mesh):
            entries[both[0]] = (*axes_of(self.axis), *axes_of(self.beside))
            return Choice(PartitionSpec(*entries))
        if not (fits := self._dividing(leaf, free, parts(mesh, self.axis))):
            return Choice(spec, f"no axis divides by {self.axis!r}")
        i = fits[0] if self.pick == "first" else max(fits, key=lambda i: (leaf.shape[i], i))
        entries[i] = self.axis
        return Choice(PartitionSpec(*entries))

    def _shared(self, leaf, entries, free, mesh):
        """The axes that are cut over `beside`, and divide once more, if none that is free does."""
        inner = [i for i in range(len(leaf.shape)) if not self._layers(leaf, i)]
        if dividing(leaf.shape, [i for i in inner if i in free], parts(mesh, self.axis)):
            return []
        # Of an array without names, axis 0 may have rows that are read in different stages.
        inner = [i for i in inner if i or leaf.axes is not None]
        cut = [i for i in inner if entries[i] and axes_of(entries[i]) == axes_of(self.beside)]
        return dividing(leaf.shape, cut, parts(mesh, (*axes_of(self.axis), *axes_of(self.beside))))

    def stacks(self, tree: Any) -> list[bool]:
        """A list with a bool for each array of `tree`, whether axis 0 is known to be of layers."""
        leaves = read(tree, self._known_names())
        return [bool(x.shape) and not self._unsaid(x) and self._layers(x, 0) for x in leaves]

    def _layers(self, leaf, i):
        if self.stacked is not None:
            return i == 0 and self.stacked(leaf.path)
        if leaf.axes is not None:
            return leaf.axes[i] == LAYERS
        return i == 0 and self._unsaid(leaf)

    def _unsaid(self, leaf):
        """Whether the leaf's first axis may be one of layers, and nobody has said."""
        return self.stacked is None and leaf.axes is None and len(leaf.shape) > 2

    def _dividing(self, leaf, free, size):
        """Those of the free axes that may be cut, and that `size` divides."""
        inner = [i for i in free if not self._layers(leaf, i)]
        if fits := dividing(leaf.shape, inner, size):
            return fits
        first = dividing(leaf.shape, free if self._unsaid(leaf) else [], size)
        if self.uneven == "replicate":
            return first
        asked = " Its first axis may be one of layers: say by stacked=, a predicate on paths."
        open_axes = ", ".join(f"{leaf.axis(i)} of {leaf.shape[i]}" for i in inner) or "none"
        raise ValueError(
            f"FSDPRule: {leaf.label} of shape {leaf.shape} has no axis that divides over "
            f"{self.axis!r} ({size}); free are: {open_axes}. Choose other sizes, raise "
            f"min_size={self.min_size}, or pass uneven='replicate' to "
            f"{'cut its first axis' if first else 'leave it as it is'}."
            f"{asked if self._unsaid(leaf) else ''}"
        )


def dividing(shape: Sequence[int], free: Sequence[int], size: int) -> list[int]:
    """The axes of `free` that `size` divides."""
    return [i for i in free if shape[i] % size == 0]
