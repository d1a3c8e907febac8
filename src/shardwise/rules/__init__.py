"""Layouts decided beside the model: rules that turn a pytree into PartitionSpecs.

A rule is a callable `rule(tree, mesh)`. `tree` holds arrays or abstract arrays in any pytree, an
`nnx.State` or an optax state included; the result has the tree's structure, with a PartitionSpec
in the place of each array. Wherever a rule is taken, a PartitionSpec will do: it stands for every
array that has axes.
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
