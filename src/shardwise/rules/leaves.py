"""The leaves of any pytree with their paths and the names of their logical axes."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardwise.tree import LAYERS, axis_names, owners, walk


class Leaf(NamedTuple):
    """One array of a tree, as rules see it.

    `axes` names each of its axes, or is None where nothing is known; the unnamed leading axis of
    a stack is "layers".
    """

    path: str
    shape: tuple
    axes: tuple | None
    array: Any

    @property
    def size(self):
        return math.prod(self.shape)

    @property
    def label(self):
        """The name of the leaf in messages, which is its path unless the tree is this one array."""
        return self.path or "the array"

    def axis(self, i: int) -> str:
        """The name of axis i in messages: its number, and its name where it has one."""
        return f"axis {i}" + (f" ({self.axes[i]!r})" if self.axes and self.axes[i] else "")


def read(tree, names=None):
    """The tree's `Leaf`s; a leaf's axes come from `names`, or from what it carries.

    `names` is a tree of tuples, as the parameters are; what belongs to a parameter, such as an
    optimizer's moment (`shardwise.tree.owners`), has the same names.
    """
    given = None if names is None else _by_owner(tree, names)
    found = []
    for i, (keys, array, box) in enumerate(walk(tree)):
        axes = axis_names(box) if given is None else given[i]
        path, shape = "/".join(keys), jnp.shape(array)
        found.append(Leaf(path, shape, _complete(path, shape, axes), array))
    return found


def is_factored(path):
    """Whether the path is that of a factored second moment in an optax state."""
    return not {"v_row", "v_col"}.isdisjoint(path.split("/"))


def _by_owner(tree, names):
    """The names of the parameter that each leaf of `tree` belongs to, or None."""
    named = [(keys, axes) for keys, axes, _ in walk(names, _is_names)]
    for keys, axes in named:
        if not _is_names(axes):
            raise ValueError(
                f"names: {'/'.join(keys)} is {axes!r}; expected a tuple of axis names, such as "
                f"('embed', 'mlp')."
            )
    return [owner and named[owner.index][1] for owner in owners(tree, names, _is_names)]


def _is_names(x):
    # A PartitionSpec was a tuple before JAX 0.10.
    is_tuple = isinstance(x, tuple) and not isinstance(x, PartitionSpec)
    return is_tuple and all(isinstance(a, str | None) for a in x)


def _complete(path, shape, axes):
    if axes is None or math.prod(shape) == 1 or is_factored(path):
        return None  # nothing to name, or not the parameter's own axes
    if len(axes) == len(shape):
        return tuple(axes)
    if len(axes) + 1 == len(shape):
        return (LAYERS, *axes)
    raise ValueError(
        f"{path} has shape {shape} and the logical axes {tuple(axes)}; expected a name for each "
        f"axis, or for each but the leading one of a stack. For an optimizer's state whose arrays "
        f"have other shapes than the parameters, use rules.follow(rule, params)."
    )
