"""Checks that a checkpoint is what the target asks for, by its metadata alone."""

from typing import Any

import jax
import numpy as np

from shardwise.checkpoint.chunks import METADATA
from shardwise.checkpoint.items import flat, is_key

_SHOWN = 10  # of the leaves that differ; whole models may


def check_items(label: str, wanted: list[str], trees: dict, saved: dict) -> None:
    """Raise ValueError if an item is not in the step, or is arrays where plain data is wanted.

    `saved` maps the step's items to the names of the Orbax handlers that wrote them.
    """
    if missing := sorted(set(wanted) - set(saved)):
        raise ValueError(
            f"{label} has the items {sorted(saved)}, and not {missing}; ask for those it has."
        )
    for name in wanted:
        plain = str(saved[name]).endswith("JsonCheckpointHandler")
        if plain == (name in trees):
            told = ("arrays", "none") if name not in trees else ("plain data", "arrays")
            raise ValueError(f"{label}: item {name!r} holds {told[0]}; the target has {told[1]}.")


def check_leaves(
    label: str, trees: dict[str, dict[str, Any]], metadata: dict[str, Any], partial: bool
) -> None:
    """Raise ValueError if paths, shapes or dtypes differ, or FileNotFoundError without metadata.

    `trees` maps items to {path: array}, `metadata` to what Orbax wrote about them.
    """
    told = []
    for name, leaves in trees.items():
        if metadata[name] is None:
            raise FileNotFoundError(
                f"{label} is incomplete: item {name!r} has no metadata. Restore another step."
            )
        ours = (metadata[name].custom_metadata or {}).get(METADATA)
        keys = None if ours is None else ours["keys"]
        saved = {p: _saved(leaf, keys, p) for p, leaf in flat(metadata[name].tree).items()}
        asked = {path: _asked(leaf, keys) for path, leaf in leaves.items()}
        for path in sorted(saved.keys() | asked.keys()):
            told += [f"{name}: {line}" for line in _difference(path, saved, asked, partial)]
    if told:
        more = f"\n  and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
        raise ValueError(
            f"{label} is not what the target asks for:\n  "
            + "\n  ".join(told[:_SHOWN])
            + f"{more}\nMake the target from the model that was saved. Dtypes are not cast here: "
            f"restore, then cast. To leave saved arrays unread, pass partial=True."
        )


def check_held(label: str, trees: dict[str, dict[str, Any]]) -> None:
    """Raise ValueError if JAX cannot hold an array of the target here, as its sharding says."""
    for name, leaves in trees.items():
        for path, leaf in leaves.items():
            if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
                continue
            if not is_key(leaf) and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
                raise ValueError(
                    f"{label}: {name}: {path} is {leaf.dtype} and JAX holds 32 bits at most here. "
                    f"Set jax_enable_x64, or give a NumPy array as the target."
                )
            if leaf.sharding is not None:
                spec = getattr(leaf.sharding, "spec", leaf.sharding)
                where = f"{label}: the target's sharding of {name}: {path}, {spec},"
                _check_sharding(where, leaf.sharding, leaf.shape)


def _check_sharding(where, sharding, shape):
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise ValueError(
            f"{where} does not fit its shape {shape}: {error}. Change the rule or the mesh."
        ) from error
    try:
        devices = set(sharding.device_set)
    except ValueError:
        devices = set()  # an abstract mesh has none
    platforms = {device.platform for device in devices}
    there = {device for platform in platforms for device in jax.devices(platform)}
    if not devices or devices - there:
        raise ValueError(
            f"{where} is on {sorted(map(str, devices - there)) or 'no devices'}, and JAX has "
            f"{jax.devices()} here. Make the mesh in this process, with mesh.make."
        )


def _difference(path, saved, asked, partial):
    if path not in asked:
        return [] if partial else [f"{path} {saved[path]} is only in the checkpoint"]
    if path not in saved:
        return [f"{path} {asked[path]} is only in the target"]
    if saved[path] == asked[path]:
        return []
    return [f"{path} is {saved[path]} in the checkpoint and {asked[path]} in the target"]


def _saved(leaf, keys, path):
    if keys is not None and path in keys:
        return f"{keys[path]}{list(leaf.shape[:-1])}"
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"


def _asked(array, keys):
    """An array in words; typed keys as bits if the checkpoint does not tell them apart."""
    shape = np.shape(array)
    if is_key(array) and keys is not None:
        return f"{array.dtype}{list(shape)}"
    if is_key(array):
        array = jax.eval_shape(jax.random.key_data, array)
        shape = array.shape
    dtype = array.dtype if hasattr(array, "dtype") else np.asarray(array).dtype
    return f"{np.dtype(dtype).name}{list(shape)}"
