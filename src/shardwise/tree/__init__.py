"""Pytrees: the paths of their leaves, and the parameter that an optimizer's array belongs to.

tree.leaves(params)                  # [("blocks/q/kernel", array), ...], for any pytree
tree.owners(tx.init(params), params) # for each array of the state its parameter, or None
"""

from shardwise.tree.owners import Owner, owners
from shardwise.tree.paths import LAYERS, axis_names, leaves, path, walk

__all__ = ["LAYERS", "Owner", "axis_names", "leaves", "owners", "path", "walk"]
