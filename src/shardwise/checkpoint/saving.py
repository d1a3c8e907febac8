"""Saving while training goes on, by the one writer of each directory."""

import atexit
import functools
import math
import os
import sys
import threading
import zlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from shardwise.checkpoint import items
from shardwise.checkpoint.chunks import METADATA
from shardwise.checkpoint.directory import Writer
from shardwise.checkpoint.items import address, digest, is_empty, is_key, is_tree
from shardwise.processes.system import together

# Names of an item, which is a directory beside these of Orbax's, that it cannot have.
_TAKEN = {"", "self", "metrics", "commit_success.txt", "_CHECKPOINT_METADATA"}
_writers = {}  # address: Writer, of what this process has saved


def save(
    directory: str | os.PathLike,
    step: int,
    state: dict[str, Any],
    keep: int | None = 3,
    chunk_bytes: int = 2**20,
) -> None:
    """Start saving `state` as `step`, and return once it is safe to change or donate its arrays.

    `state` is a dict of items: pytrees of arrays (typed PRNG keys included) and Python numbers, or
    plain data without arrays, such as the position of a data iterator. Plain data comes back as it
    is: None, bools, numbers, strings, lists, and dicts whose keys are strings, or bytes alone.
    Devices write their own shards. An item without leaves (the state of plain SGD) is not written.

    A thread writes; `wait` waits for it, and so does the end of the program, whose status is 1 if
    that fails (on Python 3.12.0 and 3.12.1, which start no threads by then, call `wait`). The step
    appears all at once or, after a crash, not at all. A save that is still under way is waited for
    first, in several processes also one to another directory. The `keep` newest steps stay (None:
    all), and what dead programs left unfinished is deleted. Until `wait` returns other programs
    cannot save to this directory (a bucket has no lock); threads of this one take turns.

    Arrays are stored in chunks of at most `chunk_bytes`; `restore` reads those that a process's
    part of an array touches. A device's part is cut along its shortest axes first (if it makes 16
    chunks or more), then along axes that devices cut, then along others.

    All processes call this together. Every save compares their steps, plain data, and the arrays'
    shapes, dtypes and shardings; the first also the values of NumPy arrays and of whole ones.

    Raises:
      ValueError: `step` is not newer than the newest there; an item is of neither kind (a tuple, a
        string beside arrays); a process would save an array that it alone has; processes differ.
      RuntimeError: another program saves there.
      Exception: what went wrong while writing the step before.
    """
    where = address(directory)
    writer = _writers.setdefault(where, Writer(where))
    with together("checkpoint.save") as facts:
        _check(step, keep, state)
        step = int(step)
        facts |= dict(directory=where, step=step, keep=keep, chunk_bytes=chunk_bytes)
        trees, arguments, digests = {}, {}, {}
        for name, item in state.items():
            if is_tree(item):
                trees[name] = items.by_path(name, item)
                arguments[name] = _to_orbax(name, trees[name], chunk_bytes)
                facts[f"item {name!r}"] = [
                    (path, np.shape(x), getattr(x, "dtype", type(x)), getattr(x, "sharding", None))
                    for path, x in trees[name].items()
                ]
            elif not is_empty(item):
                plain = items.to_json(name, item)
                arguments[name] = ocp.args.JsonSave(plain)
                facts[f"item {name!r}"] = digests[name] = digest(plain)
        if jax.process_count() > 1 and not writer.compared:
            facts |= _sums(trees)
    writer.compared = True
    if jax.process_count() > 1:
        for other in _writers_of(None):  # Orbax's barriers are named by steps, not by directories
            other.finish()
    writer.save(step, keep, arguments, {METADATA: {"digests": digests}})


def wait(directory: str | os.PathLike | None = None) -> None:
    """Block until what this process saves (there, or anywhere) is on disk; let others save there.

    Raises:
      Exception: what went wrong while writing; an ExceptionGroup, if more than one save did.
    """
    errors = []
    for each in _writers_of(directory):
        try:
            each.wait()
        except Exception as error:
            errors.append(error)
    if len(errors) > 1:
        raise ExceptionGroup(f"checkpoint.wait: {len(errors)} saves failed", errors)
    if errors:
        raise errors[0]


def _check(step, keep, state):
    if isinstance(step, bool) or not isinstance(step, int | np.integer) or step < 0:
        raise ValueError(f"checkpoint.save: step is {step!r}; expected a whole number, 0 or more.")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        told = "how many of the newest steps stay, 1 or more, or None for all"
        raise ValueError(f"checkpoint.save: keep is {keep!r}; expected {told}.")
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise ValueError(
            f"checkpoint.save: the state is a {type(state).__name__}; expected a dict of named "
            f"items, such as {{'params': params, 'opt_state': opt_state}}."
        )
    for name in state:
        if name in _TAKEN or name.startswith(".") or {"/", "\\", "\0"} & set(name):
            raise ValueError(
                f"checkpoint.save: an item cannot be named {name!r}. Its name is that of a "
                f"directory: no slashes, no dot in front, and not one of {sorted(_TAKEN)}."
            )
    if all(map(is_empty, state.values())):
        raise ValueError(f"checkpoint.save: nothing to save in the items {sorted(state)}.")


def _to_orbax(name, leaves, chunk_bytes):
    """The arguments with which Orbax saves an item."""
    found = {path: _array(name, path, leaf) for path, leaf in leaves.items()}
    chunks = {path: save_args(x, chunk_bytes) for path, x in found.items()}
    ours = {"keys": {path: str(x.dtype) for path, x in found.items() if is_key(x)}}
    trees = items.nested(found), items.nested(chunks)
    return ocp.args.StandardSave(*trees, custom_metadata={METADATA: ours})


def _array(name, path, leaf):
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    if not is_key(array) and not _is_storable(array.dtype):
        told = (
            f"is {repr(leaf)[:60]}, of type {type(leaf).__name__} and dtype {array.dtype}, which "
            f"no array on disk can have. Save the arrays alone, and plain data as another item."
        )
    elif array.size == 0:
        told = f"has the shape {array.shape} and no elements; leave it out of the state."
    elif isinstance(leaf, jax.Array) and jax.process_count() > 1 and leaf.is_fully_addressable:
        told = (
            f"lies on devices of process {jax.process_index()} alone, and {jax.process_count()} "
            f"save. Place it on the mesh of all, with rules.place(tree, PartitionSpec(), mesh)."
        )
    else:
        return array
    raise ValueError(f"checkpoint.save: {name}: {path} {told}")


@functools.cache
def _is_storable(dtype):
    """Whether TensorStore's arrays, as Orbax asks for them, can have this dtype."""
    spec = {"driver": "zarr", "kvstore": {"driver": "memory"}}
    try:
        tensorstore.open(spec, create=True, dtype=tensorstore.dtype(dtype), shape=[1]).result()
    except ValueError:
        return False
    return True


def save_args(array: Any, chunk_bytes: int) -> ocp.SaveArgs:
    """The SaveArgs by which Orbax cuts what one device writes: later cuts on any axis find an edge.

    Orbax halves the largest axes first, and a short one (layers, heads) might never be cut: so
    chunks have thickness 1 along the shortest axes, as long as the others fill 16 chunks.
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


def _sums(trees):
    """{what: checksum} of the arrays that each process has whole."""
    sums = {}
    for name, leaves in trees.items():
        for path, array in leaves.items():
            if isinstance(array, jax.Array) and not array.is_fully_replicated:
                continue
            bits = jax.random.key_data(array) if is_key(array) else array
            local = bits.addressable_data(0) if isinstance(bits, jax.Array) else bits
            what = f"{name}: {path} (initialised with the same seed?)"
            sums[what] = zlib.crc32(np.asarray(local).tobytes())
    return sums


def _writers_of(directory):
    where = None if directory is None else address(directory)
    every = list(_writers.items())  # at once: another thread may add to it
    return [writer for place, writer in every if where in (None, place)]


def _finish():
    try:
        wait()
    except Exception:
        sys.excepthook(*sys.exc_info())
        # The status of a program is settled by now, but for this way out, which runs nothing more.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


# Orbax writes through thread pools, which Python closes before it runs what atexit registered:
# a save still under way would be lost, so the wait has to come first.
getattr(threading, "_register_atexit", atexit.register)(_finish)
