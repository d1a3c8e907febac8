"""Optimizer states laid out as their parameters are."""

import jax
from jax.sharding import PartitionSpec

from shardwise.rules.leaves import ends_with, read
from shardwise.rules.rule import Choice, Rule, as_rule, fit


def follow(rule, params, other=None):
    """The rule for whatever belongs to `params` (arrays or abstract): optimizer states, averages.

    A leaf whose path ends with a parameter's path and that has its shape gets the parameter's
    spec. A factored moment (Adafactor, Shazeer and Stern 2018) gets it on the axes that it has
    kept. A leaf of any other shape is laid out by `other`, a rule, and what belongs to no
    parameter by `rule` itself.

    Raises, when called:
      ValueError: without `other`, a leaf whose shape is neither its parameter's nor lacks one of
        its axes.
    """
    return _Following(as_rule(rule), params, None if other is None else as_rule(other))


class _Following(Rule):
    def __init__(self, rule, params, other):
        self.rule, self.params, self.other = rule, params, other

    def choices(self, tree, mesh):
        specs = self.rule(self.params, mesh)
        specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
        leaders = {
            leaf.path: (leaf.shape, spec)
            for leaf, spec in zip(read(self.params), specs, strict=True)
        }
        return [self._one(leaf, leaders, mesh) for leaf in _unnamed(tree)]

    def _one(self, leaf, leaders, mesh):
        tails = [path for path in leaders if ends_with(leaf.path, path)]
        if leaf.size == 1:
            return Choice(PartitionSpec(), "one element")
        if not tails:
            return self.rule.choices({leaf.path: leaf.array}, mesh)[0]
        path = max(tails, key=len)
        shape, spec = leaders[path]
        kept = _kept(leaf, shape)
        if kept is None and self.other is not None:
            return self.other.choices({leaf.path: leaf.array}, mesh)[0]
        if kept is None:
            raise ValueError(
                f"rules.follow: {leaf.label} has shape {leaf.shape}, and its parameter {path} has "
                f"{shape}; expected the same, or the same without one axis. Say how to lay "
                f"it out by other=, such as rules.follow(rule, params, other=PartitionSpec())."
            )
        entries = [*spec, *[None] * (len(shape) - len(spec))]
        spec = PartitionSpec(*(entries[i] for i in kept))
        return fit("rules.follow", leaf, Choice(spec, f"as {path}"), mesh, "error")


def _unnamed(tree):
    return [leaf._replace(axes=None) for leaf in read(tree, names={})]


def _kept(leaf, shape):
    """Which axes of a parameter of `shape` the leaf has, or None."""
    if leaf.shape == shape:
        return list(range(len(shape)))
    missing = [i for i in range(len(shape)) if shape[:i] + shape[i + 1 :] == leaf.shape]
    if not missing:
        return None
    # Optax factors the two largest axes, of equal ones the last: v_row lacks the largest,
    # v_col the other. That decides where two axes are equally long.
    by_size = sorted(range(len(shape)), key=lambda i: shape[i])
    lacks = by_size[-2 if "v_col" in leaf.path.split("/") else -1]
    gone = lacks if lacks in missing else missing[0]
    return [i for i in range(len(shape)) if i != gone]
