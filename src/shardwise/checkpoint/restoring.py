"""Restoring onto the shardings that the target has, if it is what the checkpoint has."""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AbstractMesh, SingleDeviceSharding

from shardwise.checkpoint import chunks, items
from shardwise.checkpoint.chunks import METADATA, Chunks
from shardwise.checkpoint.directory import find, reader
from shardwise.checkpoint.items import address, digest, flat, is_empty, is_key, is_tree
from shardwise.checkpoint.saving import wait
from shardwise.processes.system import together

ARRAY = jax.Array | jax.ShapeDtypeStruct
_SHOWN = 10  # of the leaves that differ; whole models may


def latest(directory: str | os.PathLike) -> int | None:
    """The newest complete step in the directory, an int; None if there is none, or no directory."""
    with reader(address(directory)) as manager:
        return manager.latest_step()


def stored(directory: str | os.PathLike, step: int, item: str) -> dict[str, Chunks]:
    """A dict from paths, as in `tree.leaves`, to the `Chunks` of one item's arrays in a local
    directory; a FileNotFoundError where there is no such item of arrays, and on a bucket.
    """
    folder = Path(address(directory), str(step), item)
    metadata = ocp.PyTreeCheckpointHandler().metadata(folder).tree
    return chunks.chunks_of(metadata, chunks.places(folder))


def restore(
    directory: str | os.PathLike,
    target: dict[str, Any],
    step: int | None = None,
    partial: bool = False,
) -> dict[str, Any]:
    """A dict like `target`, its items read from `step` (by default the newest complete one).

    `target` is a dict of any of the saved items, whose leaves say what comes back, and where. For a
    jax.Array or jax.ShapeDtypeStruct with a sharding it is an array so laid out, of which each
    process reads the chunks that its devices need. For one that is uncommitted or has no sharding
    it is an uncommitted array on the default device; for a NumPy array, a NumPy array; for a Python
    number, a number of its type. For plain data, any value without arrays will do, such as None. An
    item without leaves, as plain SGD's state, was not saved, and comes back as the target's.
    With `partial`, leaves that only the checkpoint has are left unread: drop a new head from the
    target, and keep its fresh values. A target of arrays that no device holds yet:

        shapes = jax.eval_shape(create, key)
        to = rules.shardings(rule, shapes, mesh)
        target = {"params": jax.tree.map(lambda x, s: x.update(sharding=s), shapes, to)}

    A save of this process that is under way is waited for. Before any array is restored, all is
    compared with the checkpoint's metadata, and the chunks that devices need with their checksums;
    dtypes are never cast. All processes call this together; the newest step is one that all see.

    Raises:
      FileNotFoundError: no such directory or step, or the step is incomplete.
      ValueError: the step lacks an item or leaf; kinds, shapes or dtypes differ; the checkpoint
        has leaves that the target lacks (unless `partial`); a sharding does not fit; what was read
        is not what was saved; processes differ in what they ask for.
      RuntimeError: another process cannot restore.
    """
    wait(directory)
    where = address(directory)
    step, there = find(where, step)
    label = f"checkpoint.restore: step {step} in {where}"
    with together(label) as facts:
        trees = {n: items.by_path(n, item) for n, item in target.items() if is_tree(item)}
        facts |= {"items": " ".join(sorted(target)), "partial": partial}
        facts |= {f"item {n!r}": " ".join(leaves) for n, leaves in trees.items()}
    with reader(where, {name: name in trees for name in {*there, *trees}}) as manager:
        with together(label):
            folders = {name: f"{manager.directory}/{step}/{name}" for name in trees}
            sums = {name: chunks.read_sums(label, folder) for name, folder in folders.items()}
            saved = manager.metadata(step)
            wanted = _wanted(label, saved.item_handlers, target, trees)
            _check_leaves(label, saved.item_metadata, trees, partial)
            for name, leaves in trees.items():
                stored = chunks.chunks_of(saved.item_metadata[name].tree, sums[name])
                chunks.check_sums(label, folders[name], stored, leaves)
        how = {name: _how(trees.get(name)) for name in wanted}
        found = manager.restore(step, args=ocp.args.Composite(**how)) if how else {}
    with together(label):
        out, ours = dict(target), (saved.custom_metadata or {}).get(METADATA)
        for name in wanted:
            if name in trees:
                arrays = flat(found[name])
                leaves = [_like(path, leaf, arrays[path]) for path, leaf in trees[name].items()]
                out[name] = jax.tree.unflatten(jax.tree.structure(target[name]), leaves)
            elif ours is not None and ours["digests"][name] != digest(found[name]):
                raise chunks.damaged(label, f"item {name!r}")
            else:
                out[name] = items.from_json(found[name])
        return out


def _wanted(label, kinds, target, trees):
    """The items to read, each of which the step has, and as arrays if they are asked for."""
    # An item without leaves was not saved; None asks for plain data.
    wanted = [n for n, item in target.items() if n in kinds or item is None or not is_empty(item)]
    if missing := sorted(set(wanted) - set(kinds)):
        raise ValueError(
            f"{label} has the items {sorted(kinds)}, and not {missing}; ask for those it has."
        )
    for name in wanted:
        plain = str(kinds[name]).endswith("JsonCheckpointHandler")
        if plain == (name in trees):
            told = "plain data; the target has arrays" if plain else "arrays; the target has none"
            raise ValueError(f"{label}: item {name!r} holds {told}.")
    return wanted


def _check_leaves(label, saved, trees, partial):
    """Raise if paths, shapes or dtypes differ, or JAX cannot hold an array as is asked."""
    told = []
    for name, leaves in trees.items():
        if (metadata := saved[name]) is None:
            raise FileNotFoundError(
                f"{label} is incomplete: item {name!r} has no metadata. Restore another step."
            )
        # Orbax's metadata do not tell typed keys from their bits; ours do, {path: dtype}.
        keys = (metadata.custom_metadata or {}).get(METADATA, {}).get("keys")
        asked = {path: _words(leaf, bits=keys is None) for path, leaf in leaves.items()}
        there = {path: _words(leaf) for path, leaf in flat(metadata.tree).items()}
        for path, dtype in (keys or {}).items():
            there[path] = f"{dtype}{list(flat(metadata.tree)[path].shape[:-1])}"
        for path in sorted(there.keys() | asked.keys()):
            has, asks = there.get(path), asked.get(path)
            if has is None:
                told.append(f"{name}: {path} {asks} is only in the target")
            elif asks is None and not partial:
                told.append(f"{name}: {path} {has} is only in the checkpoint")
            elif asks not in (None, has):
                told.append(f"{name}: {path} is {has} in the checkpoint and {asks} in the target")
    if told:
        more = f"\n  and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
        raise ValueError(
            "\n  ".join([f"{label} is not what the target asks for:", *told[:_SHOWN]])
            + f"{more}\nMake the target from the model that was saved. Dtypes are not cast here: "
            f"restore, then cast. To leave saved arrays unread, pass partial=True."
        )
    for name, leaves in trees.items():
        for path, leaf in leaves.items():
            if isinstance(leaf, ARRAY):
                _check_held(f"{label}: {name}: {path}", leaf)


def _words(x, bits=False):
    """An array in words; as `bits`, a typed key is the numbers that it consists of."""
    if bits and is_key(x):
        x = jax.eval_shape(jax.random.key_data, x)
    x = x if hasattr(x, "dtype") else np.asarray(x)
    return f"{x.dtype.name}{list(x.shape)}"


def _check_held(what, leaf):
    """Raise ValueError if JAX cannot hold an array here, as its sharding says."""
    if not is_key(leaf) and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        raise ValueError(
            f"{what} is {leaf.dtype} and JAX holds 32 bits at most here. Set jax_enable_x64, or "
            f"give a NumPy array as the target."
        )
    if (sharding := leaf.sharding) is None:
        return
    what = f"{what}, {getattr(sharding, 'spec', sharding)} in the target,"
    try:
        sharding.shard_shape(leaf.shape)
    except ValueError as error:
        raise ValueError(
            f"{what} does not fit its shape {leaf.shape}: {error}. Change the rule or the mesh."
        ) from error
    is_abstract = isinstance(getattr(sharding, "mesh", None), AbstractMesh)
    devices = set() if is_abstract else sharding.device_set
    there = {d for platform in {d.platform for d in devices} for d in jax.devices(platform)}
    if not devices or devices - there:
        raise ValueError(
            f"{what} is on {sorted(map(str, devices - there)) or 'no devices'}, and JAX has "
            f"{jax.devices()} here. Make the mesh in this process, with mesh.make."
        )


def _how(leaves):
    """The arguments with which Orbax restores an item: these leaves, or plain data."""
    if leaves is None:
        return ocp.args.JsonRestore()
    tree = items.nested({path: _abstract(leaf) for path, leaf in leaves.items()})
    each = ocp.checkpoint_utils.construct_restore_args(tree)
    return ocp.args.PyTreeRestore(tree, restore_args=each, partial_restore=True)


def _abstract(leaf):
    if not isinstance(leaf, ARRAY):
        return np.asarray(leaf)
    sharding = leaf.sharding
    if _is_uncommitted(leaf):  # on one device, also where `jax.set_mesh` has set a mesh
        sharding = SingleDeviceSharding(next(iter(jnp.zeros(()).devices())))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _is_uncommitted(leaf):
    return leaf.sharding is None or not getattr(leaf, "committed", True)


def _like(path, leaf, array):
    if not isinstance(leaf, ARRAY):
        return array if isinstance(leaf, np.ndarray) else type(leaf)(array)
    if array.dtype != leaf.dtype:
        # Told before by our own metadata, but not by that of plain Orbax.
        both = f"{array.dtype} in the checkpoint and {leaf.dtype} in the target"
        raise ValueError(f"checkpoint.restore: {path} is {both}.")
    if not _is_uncommitted(leaf):
        return array
    if is_key(array):
        bits = jnp.asarray(np.asarray(jax.random.key_data(array)))
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(array))
    return jnp.asarray(np.asarray(array))
