"""Restoring onto the shardings that the target has."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from shardwise.checkpoint.items import address, by_path, flat, from_json, is_empty, is_tree, nested
from shardwise.checkpoint.matching import check_items, check_leaves, check_shardings
from shardwise.checkpoint.saving import wait
from shardwise.rules import named_leaves


def latest(directory):
    """The newest complete step in the directory, or None."""
    with _reader(address(directory)) as manager:
        return manager.latest_step()


def restore(directory, target, step=None, partial=False):
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
    checkpoint's metadata before any array is read; dtypes are never cast.

    Raises:
      FileNotFoundError: no such directory or step, or the step is incomplete.
      ValueError: the step lacks an item or leaf; kinds, shapes or dtypes differ; the checkpoint
        has leaves that the target lacks (unless `partial`); a sharding does not fit.
    """
    wait(directory)
    where = address(directory)
    with _reader(where) as manager:
        step, items = _find(manager, step)
    label = f"checkpoint.restore: step {step} in {where}"
    trees = {name: by_path(name, item) for name, item in target.items() if is_tree(item)}
    with _reader(where, {name: name in trees for name in {*items, *trees}}) as manager:
        saved = manager.metadata(step)
        # An item without leaves was not saved; None asks for plain data.
        wanted = [
            name
            for name, item in target.items()
            if name in saved.item_handlers or item is None or not is_empty(item)
        ]
        check_items(label, wanted, trees, saved.item_handlers)
        check_leaves(label, trees, {name: saved.item_metadata[name] for name in trees}, partial)
        check_shardings(label, trees)
        how = {name: _how(trees.get(name)) for name in wanted}
        found = manager.restore(step, args=ocp.args.Composite(**how)) if how else {}
    return target | {name: _fill(name, target[name], found[name]) for name in wanted}


def _reader(where, items=None):
    """Orbax's manager; `items` says of each item whether its metadata is to be read."""
    kinds = {True: ocp.PyTreeCheckpointHandler, False: ocp.JsonCheckpointHandler}
    handlers = items and {name: kinds[is_tree]() for name, is_tree in items.items()}
    options = ocp.CheckpointManagerOptions(create=False, save_interval_steps=0)
    return ocp.CheckpointManager(where, options=options, item_handlers=handlers or None)


def _find(manager, step):
    """The step to read, and the names of its items."""
    if not manager.directory.exists():
        raise FileNotFoundError(
            f"checkpoint.restore: no directory {manager.directory}; give the one that "
            f"checkpoint.save wrote to."
        )
    steps = sorted(manager.all_steps())
    newest = steps[-1] if steps and step is None else step
    if newest in steps:
        return newest, [p.name for p in (manager.directory / str(newest)).iterdir() if p.is_dir()]
    cut_off = [p.name for p in manager.directory.iterdir() if ocp.utils.is_tmp_checkpoint(p)]
    raise FileNotFoundError(
        f"checkpoint.restore: no {'step' if step is None else f'step {step}'} is complete in "
        f"{manager.directory}. Complete steps: {steps or 'none'}; incomplete, cut off while "
        f"saving: {sorted(cut_off) or 'none'}."
    )


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


def _fill(name, item, found):
    if not is_tree(item):
        return from_json(found)
    found = flat(found)
    leaves = [_like(leaf, found[path or name]) for path, leaf in named_leaves(item)]
    return jax.tree.unflatten(jax.tree.structure(item), leaves)


def _like(leaf, array):
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return array if isinstance(leaf, np.ndarray) else type(leaf)(array)
    if not _is_uncommitted(leaf):
        return array
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        bits = jnp.asarray(np.asarray(jax.random.key_data(array)))
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(array))
    return jnp.asarray(np.asarray(array))
