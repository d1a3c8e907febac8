"""Restoring onto the shardings that the target has."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from shardwise.checkpoint.chunks import METADATA, check_sums, read_sums
from shardwise.checkpoint.items import (
    address,
    by_path,
    digest,
    flat,
    from_json,
    is_empty,
    is_key,
    is_tree,
    nested,
)
from shardwise.checkpoint.matching import check_held, check_items, check_leaves
from shardwise.checkpoint.saving import wait
from shardwise.checkpoint.steps import find, reader
from shardwise.processes.system import together


def latest(directory: str | os.PathLike) -> int | None:
    """The newest complete step in the directory, or None."""
    with reader(address(directory)) as manager:
        return manager.latest_step()


def restore(
    directory: str | os.PathLike,
    target: dict[str, Any],
    step: int | None = None,
    partial: bool = False,
) -> dict[str, Any]:
    """The items of `target`, read from `step` (by default the newest complete one).

    `target` is a dict of any of the saved items. Its leaves say what comes back, and where. A
    jax.Array, or a jax.ShapeDtypeStruct with a sharding, brings an array with that sharding, for
    which each process reads the chunks that its devices need. An uncommitted jax.Array, or a
    jax.ShapeDtypeStruct without a sharding, brings an uncommitted array on the default device; a
    NumPy array or a Python number, one of these.

    No model is needed: `jax.eval_shape` and `rules.shardings` make such targets. For plain data,
    any value without arrays will do, such as None. With `partial`, leaves that only the checkpoint
    has are left unread: drop a new head from the target, and keep its fresh values.

    A save of this process that is still under way is waited for. Everything is compared with the
    checkpoint's metadata before any array is read; dtypes are never cast. The chunks that devices
    need are read once more, before that, and checked by their checksums. Several processes restore
    together, and one step: the newest that all of them see.

    Raises:
      FileNotFoundError: no such directory or step, or the step is incomplete.
      ValueError: the step lacks an item or leaf; kinds, shapes or dtypes differ; the checkpoint
        has leaves that the target lacks (unless `partial`); a sharding does not fit; what was read
        is not what was saved; processes differ in what they ask for.
      RuntimeError: another process cannot restore.
    """
    wait(directory)
    where = address(directory)
    with reader(where) as manager:
        step, items = find(manager, step)
    label = f"checkpoint.restore: step {step} in {where}"
    with together(label) as facts:
        trees = {n: by_path(n, item) for n, item in target.items() if is_tree(item)}
        facts |= {"items": " ".join(sorted(target)), "partial": str(partial)}
        facts |= {f"item {n!r}": " ".join(leaves) for n, leaves in trees.items()}
    with reader(where, {name: name in trees for name in {*items, *trees}}) as manager:
        with together(label):
            folders = {name: f"{manager.directory}/{step}/{name}" for name in trees}
            written = {name: read_sums(label, folder) for name, folder in folders.items()}
            saved = manager.metadata(step)
            wanted = _check(label, saved, target, trees, partial)
            _check_digests(label, folders, written, saved, trees)
        how = {name: _how(trees.get(name)) for name in wanted}
        found = manager.restore(step, args=ocp.args.Composite(**how)) if how else {}
    with together(label):
        return target | {
            name: _fill(trees[name], target[name], found[name])
            if name in trees
            else _plain(label, name, found[name], saved)
            for name in wanted
        }


def _check(label, saved, target, trees, partial):
    """The items to read; nothing has been read when this raises."""
    # An item without leaves was not saved; None asks for plain data.
    wanted = [
        name
        for name, item in target.items()
        if name in saved.item_handlers or item is None or not is_empty(item)
    ]
    check_items(label, wanted, trees, saved.item_handlers)
    check_leaves(label, trees, {name: saved.item_metadata[name] for name in trees}, partial)
    check_held(label, trees)
    return wanted


def _check_digests(label, folders, written, saved, trees):
    for name, leaves in trees.items():
        if written[name] is not None:
            metadata = flat(saved.item_metadata[name].tree)
            check_sums(label, folders[name], written[name], leaves, metadata)


def _plain(label, name, found, saved):
    ours = (saved.custom_metadata or {}).get(METADATA)
    if ours is not None and ours["digests"][name] != digest(found):
        raise ValueError(
            f"{label} is damaged: item {name!r} is not what was saved, by its checksum. Restore "
            f"another step."
        )
    return from_json(found)


def _how(leaves):
    if leaves is None:
        return ocp.args.JsonRestore()
    tree = nested({path: _abstract(leaf) for path, leaf in leaves.items()})
    each = ocp.checkpoint_utils.construct_restore_args(tree)
    return ocp.args.PyTreeRestore(tree, restore_args=each, partial_restore=True)


def _abstract(leaf):
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return np.asarray(leaf)
    sharding = leaf.sharding
    if _is_uncommitted(leaf):
        sharding = SingleDeviceSharding(next(iter(jnp.zeros(()).devices())))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _is_uncommitted(leaf):
    return leaf.sharding is None or not getattr(leaf, "committed", True)


def _fill(leaves, item, found):
    found = flat(found)
    arrays = [_like(path, leaf, found[path]) for path, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(item), arrays)


def _like(path, leaf, array):
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return array if isinstance(leaf, np.ndarray) else type(leaf)(array)
    if str(array.dtype) != str(leaf.dtype):
        # Told before by our own metadata, but not by that of plain Orbax.
        raise ValueError(
            f"checkpoint.restore: {path} is {array.dtype} in the checkpoint and {leaf.dtype} in "
            f"the target."
        )
    if not _is_uncommitted(leaf):
        return array
    if is_key(array):
        bits = jnp.asarray(np.asarray(jax.random.key_data(array)))
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(array))
    return jnp.asarray(np.asarray(array))
