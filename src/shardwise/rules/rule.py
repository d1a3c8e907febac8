"""The base of all rules, from one choice for each leaf to checked specs; and what follows rules."""

import reprlib
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec

from shardwise.mesh import axes_of, check_axes, parts
from shardwise.tree import Leaf, owners, read


class Choice(NamedTuple):
    """A leaf's spec, and the reason if it leaves the array whole."""

    spec: PartitionSpec
    why: str = "the rule says so"


ONE = Choice(PartitionSpec(), "one element")


class Rule:
    """The base class of rules; a subclass defines `choose(leaf, mesh) -> Choice` for one leaf.

    `names` gives logical axes to the leaves of plain pytrees. `uneven` says what becomes of an axis
    that its mesh axes do not divide: "error", which gives `advice`, or "replicate" to leave it
    whole. Errors begin with `who`. A single element is always replicated.

    Raises, when called:
      ValueError: a spec that does not fit its array or the mesh; the message names the path.
    """

    who: str
    names = None
    uneven = "error"
    advice = "change the rule, or pass uneven='replicate' to leave that axis whole"

    def __init_subclass__(cls):
        if "who" not in vars(cls):
            cls.who = cls.__name__

    def __call__(self, tree: Any, mesh: Mesh) -> Any:
        """The PartitionSpecs of the tree's arrays, as a tree."""
        return jax.tree.unflatten(jax.tree.structure(tree), specs(self, tree, mesh))

    def _known_names(self):
        return self.names

    def choices(self, tree: Any, mesh: Mesh) -> list[Choice]:
        """One `Choice` for each leaf, in order, which fits the array and the mesh."""
        leaves = read(tree, self._known_names())
        chosen = self.chosen(tree, leaves, mesh)
        return [self._fit(*pair, mesh) for pair in zip(leaves, chosen, strict=True)]

    def chosen(self, tree: Any, leaves: list[Leaf], mesh: Mesh) -> list[Choice]:
        """One `Choice` for each leaf of `tree`, not yet checked."""
        return [ONE if leaf.size == 1 else self.choose(leaf, mesh) for leaf in leaves]

    def __post_init__(self):
        """Check `uneven`; a subclass that is no dataclass calls this itself."""
        if self.uneven not in ("error", "replicate"):
            raise ValueError(
                f"{self.who}: uneven={self.uneven!r}; expected 'error' or 'replicate'."
            )

    def check_not_factored(self, leaf: Leaf) -> None:
        """Raise for a factored moment, whose axes only its parameter knows."""
        if leaf.is_factored:
            raise ValueError(
                f"{self.who}: {leaf.label} of shape {leaf.shape} is a factored moment, and which "
                f"axes it has kept only its parameter can tell: use rules.follow(rule, params)."
            )

    def _fit(self, leaf, choice, mesh):
        """`choice`, checked against the leaf's shape and the mesh."""
        spec, dropped = list(choice.spec), []
        if len(spec) > len(leaf.shape):
            raise ValueError(
                f"{self.who}: {leaf.label} has shape {leaf.shape}, and its spec "
                f"{short(choice.spec)} is for {len(spec)} axes; expected at most "
                f"{len(leaf.shape)} entries."
            )
        used = used_axes(spec)
        check_axes(f"{self.who}, {leaf.label}", mesh, used)
        if twice := {axis for axis in used if used.count(axis) > 1}:
            raise ValueError(
                f"{self.who}: {leaf.label} would be cut along mesh axis {min(twice)!r} twice, by "
                f"the spec {short(choice.spec)}; one array can use a mesh axis once."
            )
        for i, entry in enumerate(spec):
            count = parts(mesh, entry)
            if leaf.shape[i] % count == 0:
                continue
            over = " × ".join(map(repr, axes_of(entry)))
            what = f"{leaf.axis(i)} of {leaf.shape[i]} does not divide over {over} ({count})"
            if self.uneven == "error":
                raise ValueError(
                    f"{self.who}: {leaf.label} has shape {leaf.shape}, and {what}. Choose a size "
                    f"that is a multiple of {count}, {self.advice}."
                )
            dropped.append(what)
            spec[i] = None
        while spec and spec[-1] is None:
            spec.pop()
        whole = parts(mesh, used_axes(spec)) == 1
        why = "; ".join(dropped) if dropped else choice.why if not used else "mesh axes of size 1"
        return Choice(PartitionSpec(*spec), why if whole else "")


class Same(Rule):
    """A rule of one PartitionSpec for every array that has axes."""

    def __init__(self, spec):
        self.spec, self.who = spec, short(spec)

    def choose(self, leaf, mesh):
        return Choice(self.spec)


class Function(Rule):
    """A rule by any function of (tree, mesh), checked like the choices of our own rules."""

    names = {}  # noqa: RUF012

    def __init__(self, function):
        self.function = function
        self.who = getattr(function, "__name__", type(function).__name__)

    def chosen(self, tree, leaves, mesh):
        found = jax.tree.leaves(self.function(tree, mesh), is_leaf=_is_spec)
        if len(found) != len(leaves) or not all(map(_is_spec, found)):
            raise ValueError(
                f"{self.who}: expected a PartitionSpec for each of {len(leaves)} arrays, P() for "
                f"a replicated one; got {reprlib.repr(found)}."
            )
        return list(map(Choice, found))


class Following(Rule):
    """The rule that `follow` returns."""

    names = {}  # noqa: RUF012
    who = "rules.follow"

    def __init__(self, rule, params, other):
        self.rule, self.params, self.other = rule, params, other

    def chosen(self, tree, leaves, mesh):
        found = specs(self.rule, self.params, mesh)
        pairs = zip(leaves, owners(tree, self.params), strict=True)
        return [self._one(leaf, owner, found, mesh) for leaf, owner in pairs]

    def _one(self, leaf, owner, found, mesh):
        if leaf.size == 1:
            return ONE
        if owner is not None and owner.axes is not None:
            entries = dict(enumerate(found[owner.index]))
            spec = PartitionSpec(*map(entries.get, owner.axes))
            return Choice(spec, f"as {owner.path or 'the parameter'}")
        alone = {leaf.path: leaf.array}
        if self.other is not None:
            return self.other.choices(alone, mesh)[0]
        other = "Say how to lay out such arrays by other=, such as other=PartitionSpec()."
        if owner is not None:
            raise ValueError(
                f"{self.who}: {leaf.label} has shape {leaf.shape}, and its parameter "
                f"{owner.path or 'itself'} has {owner.shape}; expected some of its axes. {other}"
            )
        try:
            return self.rule.choices(alone, mesh)[0]
        except ValueError as error:
            raise ValueError(
                f"{self.who}: {leaf.label} of shape {leaf.shape} belongs to no parameter, and by "
                f"itself the rule refuses it. {other} ({error})"
            ) from error


def _is_spec(x):
    return isinstance(x, PartitionSpec)


def as_rule(rule):
    """A `Rule` for `rule`: itself, a PartitionSpec, or any function of (tree, mesh)."""
    if isinstance(rule, Rule):
        return rule
    if _is_spec(rule):
        return Same(rule)
    if callable(rule):
        return Function(rule)
    raise TypeError(
        f"{reprlib.repr(rule)} is no rule: expected a callable rule(tree, mesh), such as "
        f"rules.FSDPRule('fsdp'), or a PartitionSpec."
    )


def specs(rule, tree, mesh):
    """The PartitionSpecs that `rule` gives the arrays of `tree`, in order."""
    return [choice.spec for choice in as_rule(rule).choices(tree, mesh)]


def follow(rule: Any, params: Any, other: Any = None) -> Rule:
    """The rule for what belongs to `params` (arrays, or abstract ones): optimizer states, averages.

    `shardwise.tree.owners` tells by structure which parameter an array belongs to. The array is cut
    like its parameter along the axes that both have: a factored moment (Adafactor) has only some,
    and the memory of several steps (L-BFGS) has one more in front, which stays whole. `other`, a
    rule, lays out arrays that have none of their parameter's axes or belong to no parameter;
    without it, `rule` itself lays out the latter.

    Raises, when called:
      ValueError: without `other`, an array that has none of its parameter's axes, or one that
        belongs to no parameter and of which `rule` knows nothing, such as Muon's coefficients.
    """
    return Following(as_rule(rule), params, None if other is None else as_rule(other))


def used_axes(spec):
    """All mesh axes in a spec, in order."""
    return [axis for entry in spec for axis in axes_of(entry)]


def short(spec):
    """A spec as tables and messages write it, on every JAX: P(None, 'model')."""
    return f"P({', '.join(map(repr, spec))})"
