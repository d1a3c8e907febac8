"""Arrays as they are handed to Orbax, and what processes must agree on before that."""

import math
import zlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from shardwise.checkpoint.handlers import METADATA
from shardwise.checkpoint.items import is_key, is_storable, nested
from shardwise.processes.system import of_all


def to_orbax(name: str, leaves: dict[str, Any], chunk_bytes: int) -> ocp.args.StandardSave:
    """The arguments with which Orbax saves an item.

    Raises:
      ValueError: an array cannot be stored, or is one that this process alone has.
    """
    found = {path: _array(name, path, leaf) for path, leaf in leaves.items()}
    chunks = {path: chunks_of(x, chunk_bytes) for path, x in found.items()}
    ours = {"keys": {path: str(x.dtype) for path, x in found.items() if is_key(x)}}
    return ocp.args.StandardSave(nested(found), nested(chunks), custom_metadata={METADATA: ours})


def _array(name, path, leaf):
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    if not is_key(array) and not is_storable(array.dtype):
        raise ValueError(
            f"checkpoint.save: {name}: {path} is {repr(leaf)[:60]}, of type {type(leaf).__name__} "
            f"and dtype {array.dtype}, which no array on disk can have. Save the arrays alone, "
            f"and plain data as an item of its own."
        )
    if array.size == 0:
        raise ValueError(
            f"checkpoint.save: {name}: {path} has the shape {array.shape} and no elements; leave "
            f"it out of the state."
        )
    if isinstance(leaf, jax.Array) and jax.process_count() > 1 and leaf.is_fully_addressable:
        raise ValueError(
            f"checkpoint.save: {name}: {path} lies on devices of process {jax.process_index()} "
            f"alone, and {jax.process_count()} processes save. Place it on the mesh of all, with "
            f"rules.place(tree, PartitionSpec(), mesh)."
        )
    return array


def chunks_of(array: Any, chunk_bytes: int) -> ocp.SaveArgs:
    """The SaveArgs by which Orbax cuts what one device writes: later cuts on any axis find an edge.

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


def describe(leaves: dict[str, Any], chunk_bytes: int) -> str:
    """A text of what processes must agree on for a tree: chunks, shapes, dtypes and shardings."""
    each = [
        f"{path} {np.shape(leaf)} {getattr(leaf, 'dtype', type(leaf).__name__)} "
        f"{getattr(leaf, 'sharding', None)}"
        for path, leaf in leaves.items()
    ]
    return "\n".join([f"chunks of {chunk_bytes}", *each])


def check_replicas(trees: dict[str, dict[str, Any]]) -> None:
    """Raise ValueError, in each process, if processes differ in an array that each has whole."""
    labels, sums = [], []
    for name, leaves in trees.items():
        for path, array in leaves.items():
            if isinstance(array, jax.Array) and not array.is_fully_replicated:
                continue
            bits = jax.random.key_data(array) if is_key(array) else array
            local = bits.addressable_data(0) if isinstance(bits, jax.Array) else bits
            labels.append(f"{name}: {path}")
            sums.append(zlib.crc32(np.asarray(local).tobytes()))
    found = of_all(np.array(sums, np.uint32))
    if differ := np.flatnonzero((found != found[0]).any(0)).tolist():
        raise ValueError(
            f"checkpoint.save: the processes have other values in {labels[differ[0]]}"
            + (f" and in {len(differ) - 1} more" if differ[1:] else "")
            + ", which each of them has whole. Were they initialised with other seeds?"
        )
