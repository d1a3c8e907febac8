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
import orbax.checkpoint as ocp

from shardwise import tree


def address(directory: str | os.PathLike) -> str:
    """The directory as Orbax takes it: one on a bucket untouched, else its one true local path;
    a ValueError for a path that is also a pattern of others.
    """
    where = os.fspath(directory)
    where = where if is_bucket(where) else os.path.realpath(os.path.expanduser(where))
    if pattern := set(where) & set("*?["):  # Orbax looks for what it wrote by glob
        told = f"{' and '.join(sorted(pattern))} in it, by which Orbax would look for other folders"
        raise ValueError(f"checkpoint: {where} has {told}. Name a path without *, ? and [.")
    return where


def is_bucket(where: str) -> bool:
    """Whether an address is one on a bucket, not in a local file system."""
    return "://" in where


def is_tree(item: Any) -> bool:
    """Whether the item holds arrays; else it is plain data, such as a position in a data set."""
    arrays = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
    return any(isinstance(leaf, arrays) for leaf in _leaves(item))


def is_empty(item: Any) -> bool:
    """Whether the item has nothing to save, as the state of plain SGD."""
    return not _leaves(item)


def _leaves(item):
    try:
        return jax.tree.leaves(item)
    except ValueError:
        return [item]  # a dict whose keys cannot be sorted, which is no plain data either


def by_path(name: str, item: Any) -> dict[str, Any]:
    """{path: array} of a tree; a bare array goes by the item's own name. A ValueError where two
    leaves would have one name on disk, or one lies below another.
    """
    found, stored, parents = {}, {}, set()
    for path, array in tree.leaves(item):
        path = path or name
        if (other := stored.get(stored_name(path))) is not None:
            raise ValueError(
                f"checkpoint: item {name!r} has leaves at {other} and {path}, which have one name "
                f"on disk; rename one."
            )
        found[path], stored[stored_name(path)] = array, path
        parents |= {path[:end] for end in range(len(path)) if path[end] == "/"}
    if above := [path for path in found if path in parents]:
        raise ValueError(
            f"checkpoint: item {name!r} has a leaf at {above[0]} and others below it; rename one."
        )
    return found


def stored_name(path: str) -> str:
    """Orbax's name on disk of the array at this path."""
    return path.replace("/", ".")


# {"blocks/q/kernel": x} to the nested dict that it stands for.
nested = functools.partial(ocp.tree.from_flat_dict, sep="/")


def flat(nested: dict[str, Any]) -> dict[str, Any]:
    """{path: leaf} of a nested dict whose leaves may be any objects."""
    return ocp.tree.to_flat_dict(nested, sep="/", is_leaf=lambda x: not isinstance(x, dict))


def is_key(x: Any) -> bool:
    """Whether `x` is a typed PRNG key, or an abstract one."""
    return jnp.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key)


def to_json(name: str, item: Any) -> Any:
    """The item as JSON can hold it: Grain's positions are dicts of numbers, or bytes. A ValueError
    where it would not come back as it is.
    """
    if isinstance(item, bytes):
        return {"base64": base64.b64encode(item).decode()}
    if isinstance(item, dict) and item.keys() == {"base64"}:
        raise ValueError(
            f"checkpoint.save: item {name!r} is a dict with the one key 'base64', which stands for "
            f"bytes; give it another key beside that."
        )
    for keys, part in jax.tree_util.tree_flatten_with_path(item, is_leaf=_is_part)[0]:
        if part is None or type(part) in (bool, int, float, str):
            continue
        at = f" at {tree.path(keys)}" if keys else ""
        told = f"a dict with the keys {list(part)[:5]}" if isinstance(part, dict) else f"{part!r}"
        raise ValueError(
            f"checkpoint.save: item {name!r} holds no arrays and is not JSON: {told}{at}, of type "
            f"{type(part).__name__}, would not come back as it is. Expected arrays, or plain "
            f"numbers, strings, lists and dicts whose keys are strings."
        )
    return item


def _is_part(x):
    """Whether `x` is none of JSON's containers."""
    return type(x) is not list and (type(x) is not dict or any(type(key) is not str for key in x))


def from_json(item: Any) -> Any:
    """The item that `to_json` was given."""
    if isinstance(item, dict) and item.keys() == {"base64"}:
        return base64.b64decode(item["base64"])
    return item


def digest(item: Any) -> int:
    """A checksum of what JSON holds, whatever the order of its keys."""
    return zlib.crc32(json.dumps(item, sort_keys=True).encode())
