"""Items of a state, as Orbax stores them: nested dicts of arrays, or JSON."""

import base64
import json
import os

import jax
import numpy as np

from shardwise.rules import named_leaves


def is_tree(item):
    """Whether the item holds arrays; else it is plain data, such as a position in a data set."""
    arrays = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
    return any(isinstance(leaf, arrays) for leaf in jax.tree.leaves(item))


def is_empty(item):
    """Whether there is nothing to save, as in the state of plain SGD."""
    return not isinstance(item, bytes) and not jax.tree.leaves(item)


def by_path(name, item):
    """{path: leaf} of a tree; a bare array goes by the item's own name.

    Raises:
      ValueError: two leaves have one path, as keys of a dict that contain "/" may.
    """
    leaves = [(path or name, leaf) for path, leaf in named_leaves(item)]
    paths = [path for path, _ in leaves]
    if twice := sorted({path for path in paths if paths.count(path) > 1}):
        raise ValueError(f"checkpoint: item {name!r} has two leaves at {twice[0]}; rename one.")
    if above := [path for path in paths if any(p.startswith(path + "/") for p in paths)]:
        raise ValueError(
            f"checkpoint: item {name!r} has a leaf at {above[0]} and others below it; rename one."
        )
    return dict(leaves)


def nested(leaves):
    """The nested dict that {"blocks/q/kernel": x} stands for."""
    tree = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = leaf
    return tree


def flat(tree):
    """{path: leaf} of a nested dict whose leaves may be any objects."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: not isinstance(x, dict))
    return {"/".join(str(key.key) for key in keys): leaf for keys, leaf in paths}


def to_json(name, item):
    """The item as JSON can hold it: Grain's positions are dicts of numbers, or bytes.

    Raises:
      ValueError: it can not.
    """
    if isinstance(item, bytes):
        return {"base64": base64.b64encode(item).decode()}
    try:
        return json.loads(json.dumps(item))
    except TypeError as error:
        raise ValueError(
            f"checkpoint.save: item {name!r} holds no arrays and is not JSON: {error}. Expected "
            f"arrays, or plain numbers, strings, lists and dicts."
        ) from error


def from_json(item):
    """What `to_json` was given, with lists in the place of tuples."""
    if isinstance(item, dict) and item.keys() == {"base64"}:
        return base64.b64decode(item["base64"])
    return item


def address(directory):
    """The directory as Orbax takes it: a local path made absolute, one on a bucket untouched."""
    directory = os.fspath(directory)
    return directory if "://" in directory else os.path.abspath(directory)
