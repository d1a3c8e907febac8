"""Optimizer states laid out as their parameters are."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardwise.rules.leaves import read
from shardwise.rules.rule import Choice, Rule, as_rule, fit
from shardwise.tree import owners


def follow(rule: Any, params: Any, other: Any = None) -> Rule:
    """The rule for whatever belongs to `params` (arrays or abstract): optimizer states, averages.

    What belongs to which parameter is told by structure (`shardwise.tree.owners`). An array gets
    its parameter's spec on the axes that it has of it: on all of them where it has the same shape,
    on some where it is a factored moment (Adafactor, Shazeer and Stern 2018), on all but the first
    where it remembers several steps (L-BFGS). An array of any other shape is laid out by `other`,
    a rule, and so is what belongs to no parameter; without `other`, that is by `rule` itself.

    Raises, when called:
      ValueError: without `other`, an array that has none of its parameter's axes, or one that
        belongs to no parameter and of which `rule` knows nothing, such as Muon's coefficients.
    """
    return _Following(as_rule(rule), params, None if other is None else as_rule(other))


class _Following(Rule):
    def __init__(self, rule, params, other):
        self.rule, self.params, self.other = rule, params, other

    def choices(self, tree, mesh):
        specs = self.rule(self.params, mesh)
        specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
        leaves = [leaf._replace(axes=None) for leaf in read(tree, names={})]
        found = zip(leaves, owners(tree, self.params), strict=True)
        return [self._one(leaf, owner, specs, mesh) for leaf, owner in found]

    def _one(self, leaf, owner, specs, mesh):
        if leaf.size == 1:
            return Choice(PartitionSpec(), "one element")
        if self.other is not None and (owner is None or owner.axes is None):
            return self.other.choices({leaf.path: leaf.array}, mesh)[0]
        if owner is None:
            return self._alone(leaf, mesh)
        if owner.axes is None:
            raise ValueError(
                f"rules.follow: {leaf.label} has shape {leaf.shape}, and its parameter "
                f"{owner.path or 'itself'} has {owner.shape}; expected some of its axes. Say how "
                f"to lay it out by other=, such as rules.follow(rule, params, "
                f"other=PartitionSpec())."
            )
        entries = [*specs[owner.index], *[None] * (len(owner.shape) - len(specs[owner.index]))]
        spec = PartitionSpec(*(None if i is None else entries[i] for i in owner.axes))
        why = f"as {owner.path or 'the parameter'}"
        return fit("rules.follow", leaf, Choice(spec, why), mesh, "error")

    def _alone(self, leaf, mesh):
        try:
            return self.rule.choices({leaf.path: leaf.array}, mesh)[0]
        except ValueError as error:
            raise ValueError(
                f"rules.follow: {leaf.label} of shape {leaf.shape} belongs to no parameter, and by "
                f"itself the rule refuses it. Say how to lay out such arrays by other=, such as "
                f"rules.follow(rule, params, other=PartitionSpec()). ({error})"
            ) from error
