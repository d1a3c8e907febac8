"""Rules that lay out pytrees beside the model: from arrays to PartitionSpecs.

A rule is a callable `rule(tree, mesh)`. `tree` is a pytree of arrays or abstract arrays, also an
`nnx.State` or an optax state; the result has the tree's structure, with a PartitionSpec in the
place of each array. Wherever a function takes a rule, it takes a PartitionSpec too, for every array
that has axes. `named_leaves` is `shardwise.tree.leaves`.
"""

from shardwise.rules.compiling import jit
from shardwise.rules.kinds import FSDPRule, LogicalRules, PathRules, PolicyRule
from shardwise.rules.placement import constrain_tree, describe, place, shardings, whole
from shardwise.rules.rule import follow
from shardwise.tree import leaves as named_leaves

__all__ = [
    "FSDPRule", "LogicalRules", "PathRules", "PolicyRule", "constrain_tree", "describe", "follow",
    "jit", "named_leaves", "place", "shardings", "whole",
]  # fmt: skip
