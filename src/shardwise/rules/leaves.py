"""The leaves of any pytree with their paths and the names of their logical axes."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec


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
        """What messages call the leaf, which is its path unless the tree is this one array."""
        return self.path or "the array"

    def axis(self, i):
        """What messages call axis i, by number, and by name where it has one."""
        return f"axis {i}" + (f" ({self.axes[i]!r})" if self.axes and self.axes[i] else "")


def named_leaves(tree):
    """[(path, array)] for each array of `tree`, in the order of `jax.tree.leaves`.

    Paths read `blocks/q/kernel` whether the tree is a dict, a tuple, a dataclass or an `nnx.State`.
    """
    return [(path, array) for path, array, _ in _walk(tree)]


def read(tree, names=None):
    """The tree's `Leaf`s; a leaf's axes come from `names`, or from what an NNX variable carries.

    `names` is a tree of tuples, as the parameters are; a leaf whose path ends with the path of one
    of them, such as an optimizer's moment, has the same names.

    Raises:
      ValueError: a leaf has neither as many axes as names, nor one more.
    """
    given = None if names is None else dict(_tuples(names))
    leaves = []
    for path, array, variable in _walk(tree):
        if given is not None:
            axes = _by_suffix(path, given)
        else:
            axes = None if variable is None else variable.get_metadata().get("logical_axes")
        shape = jnp.shape(array)
        leaves.append(Leaf(path, shape, _complete(path, shape, axes), array))
    return leaves


def is_factored(path):
    """Whether the path is that of a factored second moment in an optax state."""
    return not {"v_row", "v_col"}.isdisjoint(path.split("/"))


def ends_with(path, tail):
    """Whether the components of `tail` are the last ones of `path`."""
    return path == tail or path.endswith("/" + tail)


def fill(tree, values):
    """`tree` with `values`, one for each array in order, in the place of its arrays."""
    return jax.tree.unflatten(jax.tree.structure(tree), values)


def key_name(key):
    """One component of a path: a dict's key, a field's name or a position."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _walk(tree):
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_variable)
    for keys, leaf in flat:
        path = "/".join(map(key_name, keys))
        if not _is_variable(leaf):
            yield path, leaf, None
            continue
        for inner, array in jax.tree_util.tree_flatten_with_path(leaf)[0]:
            # The first key is the variable's own; more follow where it holds a tree.
            yield "/".join([path, *map(key_name, inner[1:])]), array, leaf


def _is_variable(x):
    return isinstance(x, nnx.Variable)


def _tuples(names):
    def is_names(x):
        return isinstance(x, tuple) and all(isinstance(a, str | None) for a in x)

    flat, _ = jax.tree_util.tree_flatten_with_path(names, is_leaf=is_names)
    for keys, axes in flat:
        path = "/".join(map(key_name, keys))
        if not is_names(axes) or isinstance(axes, PartitionSpec):
            raise ValueError(
                f"names: {path} is {axes!r}; expected a tuple of axis names, such as "
                f"('embed', 'mlp')."
            )
        yield path, axes


def _by_suffix(path, given):
    found = [tail for tail in given if ends_with(path, tail)]
    return given[max(found, key=len)] if found else None


def _complete(path, shape, axes):
    if axes is None or math.prod(shape) == 1 or is_factored(path):
        return None  # nothing to name, or not the parameter's own axes
    if len(axes) == len(shape):
        return tuple(axes)
    if len(axes) + 1 == len(shape):
        return ("layers", *axes)
    raise ValueError(
        f"{path} has shape {shape} and the logical axes {tuple(axes)}; expected a name for each "
        f"axis, or for each but the leading one of a stack. For an optimizer's state whose arrays "
        f"have other shapes than the parameters, use rules.follow(rule, params)."
    )
