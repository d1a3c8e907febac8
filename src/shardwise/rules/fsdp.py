"""FSDP as a rule: each large array cut once, along whichever of its axes divides."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from shardwise.mesh import axes_of, check_axes, parts
from shardwise.rules.rule import ONE, Choice, Rule, specs, used_axes
from shardwise.tree import LAYERS, Leaf, read


@dataclasses.dataclass(frozen=True, eq=False)
class FSDPRule(Rule):
    """A rule that cuts each array of `min_size` elements or more once along mesh axis `axis`.

    `axis` may be a tuple of mesh axes, together one. Of the axes that it divides the rule takes
    the largest, of equally large ones the last; with `pick="first"` the first, whose parts are
    contiguous, so that a collective by hand need not transpose them. Stacked layers are never cut:
    they are the axis named "layers", or the leading one where `stacked(path)` is true. Where
    neither tells, as in a plain tree, the first of three axes or more may be one of layers: it is
    cut only where no other divides, and the error asks. With `over=` another rule, it cuts what
    that one leaves whole: `FSDPRule("fsdp", over=tensor)`.

    Raises, when called:
      ValueError: the mesh lacks the axis, or no axis of a large array divides by it (with
        uneven="replicate" that array stays as it is).
    """

    axis: str | tuple
    min_size: int = 2**14
    over: Any = None
    pick: str = "largest"
    stacked: Callable | None = None
    names: Any = None
    uneven: str = "error"

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
        if not (fits := self._dividing(leaf, free, parts(mesh, self.axis))):
            return Choice(spec, f"no axis divides by {self.axis!r}")
        i = fits[0] if self.pick == "first" else max(fits, key=lambda i: (leaf.shape[i], i))
        entries[i] = self.axis
        return Choice(PartitionSpec(*entries))

    def stacks(self, tree: Any) -> list[bool]:
        """A bool for each array of `tree`: whether axis 0 is known to be one of layers."""
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
        if self.uneven == "replicate":
            return dividing(leaf.shape, free if self._unsaid(leaf) else [], size)
        asked = " Its first axis may be one of layers: say by stacked=, a predicate on paths."
        open_axes = ", ".join(f"{leaf.axis(i)} of {leaf.shape[i]}" for i in inner) or "none"
        raise ValueError(
            f"FSDPRule: {leaf.label} of shape {leaf.shape} has no axis that divides over "
            f"{self.axis!r} ({size}); free are: {open_axes}. Choose other sizes, raise "
            f"min_size={self.min_size}, or pass uneven='replicate' to leave it as it is."
            f"{asked if self._unsaid(leaf) else ''}"
        )


def dividing(shape: Sequence[int], free: Sequence[int], size: int) -> list[int]:
    """The axes of `free` that `size` divides."""
    return [i for i in free if shape[i] % size == 0]
