"""Items of a state: trees of arrays, each with a path of its own, or plain data as JSON."""

import base64
import functools
import json
import os
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from shardwise import tree


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
    """{path: array} of a tree; a bare array goes by the item's own name."""
    found = [(path or name, array) for path, array in tree.leaves(item)]
    _check_paths(name, [path for path, _ in found])
    return dict(found)


def stored_name(path: str) -> str:
    """Orbax's name on disk of the array at this path."""
    return path.replace("/", ".")


def nested(leaves: dict[str, Any]) -> dict[str, Any]:
    """The nested dict that {"blocks/q/kernel": x} stands for."""
    found = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        place = found
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = leaf
    return found


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


def to_json(name: str, item: Any) -> Any:
    """The item as JSON can hold it: Grain's positions are dicts of numbers, or bytes."""
    if isinstance(item, bytes):
        return {"base64": base64.b64encode(item).decode()}
    if isinstance(item, dict) and item.keys() == {"base64"}:
        raise ValueError(
            f"checkpoint.save: item {name!r} is a dict with the one key 'base64', which stands for "
            f"bytes; give it another key beside that."
        )
    _check_plain(name, item, ())
    return item


def from_json(item: Any) -> Any:
    """The item that `to_json` was given."""
    if isinstance(item, dict) and item.keys() == {"base64"}:
        return base64.b64decode(item["base64"])
    return item


def digest(item: Any) -> int:
    """A checksum of what JSON holds, whatever the order of its keys."""
    return zlib.crc32(json.dumps(item, sort_keys=True).encode())


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


def _check_plain(name, item, where):
    if item is None or type(item) in (bool, int, float, str):
        return
    if type(item) is list:
        parts = enumerate(item)
    elif type(item) is dict and all(type(key) is str for key in item):
        parts = item.items()
    else:
        at = f" at {'/'.join(map(str, where))}" if where else ""
        told = f"a dict with the keys {list(item)[:5]}" if isinstance(item, dict) else f"{item!r}"
        raise ValueError(
            f"checkpoint.save: item {name!r} holds no arrays and is not JSON: {told}{at}, of type "
            f"{type(item).__name__}, would not come back as it is. Expected arrays, or plain "
            f"numbers, strings, lists and dicts whose keys are strings."
        )
    for key, part in parts:
        _check_plain(name, part, (*where, key))


def _leaves(item):
    try:
        return jax.tree.leaves(item)
    except ValueError:
        return [item]  # a dict whose keys cannot be sorted, which is no plain data either
