"""Leaves of any pytree: their paths, and the names of their axes, in one form for all kinds."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.sharding import PartitionSpec

LAYERS = "layers"  # the leading axis of a stack
# Our own first; then those of nnx.with_partitioning, by the name of this Flax and of earlier ones.
_METADATA = ("logical_axes", "out_sharding", "sharding_names", "sharding")


def leaves(tree: Any) -> list[tuple[str, Any]]:
    """[(path, leaf)] in the order of `jax.tree.leaves`.

    Paths read `blocks/q/kernel` whether the tree is a dict, a tuple, a dataclass or an `nnx.State`.
    What boxes an array, an NNX variable or Linen's `Partitioned`, adds nothing to its path. A bare
    array has the path "". Keys that hold a "/" may give two leaves one path.
    """
    return [("/".join(keys), leaf) for keys, leaf, _ in walk(tree)]


def walk(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """(components of the path, leaf, its box or None) for each leaf of `tree`."""

    def stops(x):
        return _is_box(x) or (is_leaf is not None and is_leaf(x))

    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=stops)[0]:
        above = tuple(map(_component, keys))
        if not _is_box(leaf):
            yield above, leaf, None
            continue
        for inner, array in jax.tree_util.tree_flatten_with_path(leaf)[0]:
            # The first key is the box's own; more follow where it holds a tree.
            yield (*above, *map(_component, inner[1:])), array, leaf


def path(keys: Iterable[Any]) -> str:
    """The text of a path of JAX's keys, as `jax.tree_util.tree_flatten_with_path` gives them."""
    return "/".join(map(_component, keys))


def _is_box(x: Any) -> bool:
    """Whether `x` holds an array and what is said of it: an NNX variable, or Linen's metadata."""
    # Told by their methods, so that a tree of another library needs no Flax.
    linen = hasattr(x, "unbox") and hasattr(x, "replace_boxed")
    return not isinstance(x, type) and (hasattr(x, "get_metadata") or linen)


def axis_names(box: Any) -> tuple[str | None, ...] | None:
    """The names that an NNX variable's metadata or a box of Linen's gives an array's axes.

    A name for each axis, or for each but the leading one of a stack; None where there are none, or
    where they are no names but mesh axes in tuples.
    """
    if box is None:
        return None
    if hasattr(box, "get_metadata"):
        metadata = box.get_metadata()
        found = next((metadata[key] for key in _METADATA if metadata.get(key) is not None), None)
    else:
        found = getattr(box, "names", None)
    if not isinstance(found, tuple | list | PartitionSpec):
        return None
    names = tuple(found)
    return names if all(name is None or isinstance(name, str) for name in names) else None


def _component(key):
    """One component of a path: a dict's key, a field's name or a position."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
