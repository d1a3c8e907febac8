"""Saving while training goes on."""

import atexit
import math
import sys
import threading

import jax
import numpy as np
import orbax.checkpoint as ocp

from shardwise.checkpoint.items import address, by_path, is_empty, is_tree, nested, to_json

_managers = {}  # (address, keep): the managers that have saved in this process


def save(directory, step, state, keep=3, chunk_bytes=2**20):
    """Start saving `state` as `step`, and return once it is safe to change or donate its arrays.

    `state` is a dict of items: pytrees of arrays (typed PRNG keys included), or plain data without
    arrays, such as the position of a data iterator, the same in every process. An item without
    leaves (the state of plain SGD) is not written. A thread writes; `wait` waits for it, and so
    does the end of the program (not on Python 3.12.0 and 3.12.1, which start no threads any more by
    then: call `wait`). The step appears all at once or, after a crash, not at all. A save
    that is still under way is waited for first. The `keep` newest steps stay (None: all).

    Each array is cut into chunks of at most `chunk_bytes`, the unit of reading: a process that
    restores a part of an array reads the chunks that it touches. An array that lies cut along some
    axes is cut further along those only, while they last: who wants it cut along others reads more.

    Raises:
      ValueError: `step` is not newer than the newest one there, the state cannot be saved, or one
        of several processes would save an array that it alone has.
      Exception: what went wrong while writing the step before.
    """
    where = address(directory)
    items = {name: item for name, item in _checked(state).items() if not is_empty(item)}
    arguments = {name: _arguments(name, item, chunk_bytes) for name, item in items.items()}
    wait(where)
    manager = _manager(where, keep)
    manager.reload()  # another process may have written there, or deleted
    newest = manager.latest_step()
    if newest is not None and step <= newest:
        told = "is saved already" if step in manager.all_steps() else f"is behind step {newest}"
        raise ValueError(
            f"checkpoint.save: step {step} {told} in {where}. Steps only grow: save {newest + 1} "
            f"or later, or use another directory."
        )
    # Orbax's own schedule would skip some steps in silence.
    manager.save(step, args=ocp.args.Composite(**arguments), force=True)


def wait(directory=None):
    """Block until what this process saves (there, or anywhere) is complete on disk.

    Raises:
      Exception: what went wrong while writing.
    """
    where = None if directory is None else address(directory)
    for (place, _), manager in list(_managers.items()):
        if where in (None, place):
            manager.wait_until_finished()


def _checked(state):
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise ValueError(
            f"checkpoint.save: the state is a {type(state).__name__}; expected a dict of named "
            f"items, such as {{'params': params, 'opt_state': opt_state}}."
        )
    if all(map(is_empty, state.values())):
        raise ValueError(f"checkpoint.save: nothing to save in the items {sorted(state)}.")
    return state


def _arguments(name, item, chunk_bytes):
    if not is_tree(item):
        return ocp.args.JsonSave(to_json(name, item))
    tree = nested({path: _array(name, path, x) for path, x in by_path(name, item).items()})
    chunks = jax.tree.map(lambda x: _chunks(x, chunk_bytes), tree)
    return ocp.args.StandardSave(tree, save_args=chunks)


def _chunks(array, chunk_bytes):
    """How Orbax cuts what one device writes, so that a later cut along any axis finds an edge.

    Orbax halves the largest axes first, and a short one (layers, heads) might never be cut. We
    ask for chunks of thickness 1 along the shortest axes, as long as the others fill 16 chunks and
    so are cut too.
    """
    sharding = getattr(array, "sharding", None)
    shape = sharding.shard_shape(array.shape) if sharding else array.shape
    left, thin = math.prod(shape) * array.dtype.itemsize, []
    for axis in sorted(range(len(shape)), key=lambda axis: shape[axis]):
        left //= max(shape[axis], 1)
        if left < 16 * chunk_bytes:
            break
        thin.append(axis)
    return ocp.SaveArgs(chunk_byte_size=chunk_bytes, shard_axes=tuple(thin))


def _array(name, path, leaf):
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    if jax.process_count() > 1 and leaf.is_fully_addressable:
        raise ValueError(
            f"checkpoint.save: {name}: {path} lies on devices of process {jax.process_index()} "
            f"alone, and {jax.process_count()} processes save. Place it on the mesh of all, with "
            f"rules.place(tree, PartitionSpec(), mesh)."
        )
    return leaf


def _manager(where, keep):
    for place, kept in list(_managers):
        if place == where and kept != keep:
            _managers.pop((place, kept)).close()
    if (where, keep) not in _managers:
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        _managers[where, keep] = ocp.CheckpointManager(where, options=options)
    return _managers[where, keep]


def _finish():
    try:
        wait()
    except Exception:
        sys.excepthook(*sys.exc_info())


# Orbax writes through thread pools, which Python closes before it runs what atexit registered:
# a save still under way would be lost, so the wait has to come first.
getattr(threading, "_register_atexit", atexit.register)(_finish)
