"""Items of a state: trees of arrays, each with a path of its own, or plain data."""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from shardwise.rules import named_leaves


def is_tree(item: Any) -> bool:
    """Whether the item holds arrays; else it is plain data, such as a position in a data set."""
    arrays = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
    return any(isinstance(leaf, arrays) for leaf in _leaves(item))


def is_empty(item: Any) -> bool:
    """Whether the item has nothing to save, as the state of plain SGD."""
    return not isinstance(item, bytes) and not _leaves(item)


def check_name(name: str) -> None:
    """Raise ValueError if an item cannot go by this name: it names a directory, beside Orbax's."""
    taken = {"", "self", "metrics", "commit_success.txt", "_CHECKPOINT_METADATA"}
    if name in taken or name.startswith(".") or {"/", "\\", "\0"} & set(name):
        raise ValueError(
            f"checkpoint.save: an item cannot be named {name!r}. Its name is that of a directory: "
            f"no slashes, no dot in front, and not one of {sorted(taken)}."
        )


def by_path(name: str, item: Any) -> dict[str, Any]:
    """{path: array} of a tree; a bare array goes by the item's own name.

    Raises:
      ValueError: two leaves have one path, or one name in storage.
    """
    found = [(path or name, array) for path, array in named_leaves(item)]
    _check_paths(name, [path for path, _ in found])
    return dict(found)


def stored_name(path: str) -> str:
    """Orbax's name on disk of the array at this path."""
    return path.replace("/", ".")


def nested(leaves: dict[str, Any]) -> dict[str, Any]:
    """The nested dict that {"blocks/q/kernel": x} stands for."""
    tree = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = leaf
    return tree


def flat(tree: dict[str, Any]) -> dict[str, Any]:
    """{path: leaf} of a nested dict whose leaves may be any objects."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: not isinstance(x, dict))
    return {"/".join(str(key.key) for key in keys): leaf for keys, leaf in paths}


def is_key(x: Any) -> bool:
    """Whether `x` is a typed PRNG key, or an abstract one."""
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct) and jnp.issubdtype(
        x.dtype, jax.dtypes.prng_key
    )


@functools.cache
def is_storable(dtype: np.dtype) -> bool:
    """Whether TensorStore's arrays, as Orbax asks for them, can have this dtype."""
    spec = {"driver": "zarr", "kvstore": {"driver": "memory"}}
    try:
        tensorstore.open(spec, create=True, dtype=tensorstore.dtype(dtype), shape=[1]).result()
    except ValueError:
        return False
    return True


def address(directory: str | os.PathLike) -> str:
    """The directory as Orbax takes it: one on a bucket untouched, else its one true local path.

    Raises:
      ValueError: a path that is also a pattern of others.
    """
    where = os.fspath(directory)
    where = where if "://" in where else os.path.realpath(os.path.expanduser(where))
    if pattern := set(where) & set("*?["):  # Orbax looks for what it wrote by glob
        raise ValueError(
            f"checkpoint: {where} has {' and '.join(sorted(pattern))} in it, by which Orbax would "
            f"look for other folders and not find what it saved there. Name a path without "
            f"*, ? and [."
        )
    return where


def is_bucket(where: str) -> bool:
    """Whether an address is one on a bucket, not in a local file system."""
    return "://" in where


def _check_paths(name, paths):
    stored = {}
    for path in paths:
        if (other := stored.get(stored_name(path))) is not None:
            both = f"two leaves at {path}" if other == path else f"leaves at {other} and {path}"
            why = "" if other == path else ", which have one name on disk"
            raise ValueError(f"checkpoint: item {name!r} has {both}{why}; rename one.")
        stored[stored_name(path)] = path
    parents = {path[:end] for path in paths for end in range(len(path)) if path[end] == "/"}
    if above := [path for path in paths if path in parents]:
        raise ValueError(
            f"checkpoint: item {name!r} has a leaf at {above[0]} and others below it; rename one."
        )


def _leaves(item):
    try:
        return jax.tree.leaves(item)
    except ValueError:
        return [item]  # a dict whose keys cannot be sorted, which is no plain data either
