"""Batches of which each process brings its own rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from shardwise.rules.agreement import together
from shardwise.rules.leaves import named_leaves
from shardwise.rules.placement import place, shardings

_COMPARED = set()  # shapes of batches on which the processes were found to agree


def global_batch(batch: Any, rule: Any, mesh: Mesh) -> Any:
    """The global arrays of a batch, one for each of its leaves, from each process's rows.

    Axis 0 of every array is rows; all processes bring equally many, which follow one another in
    the order of the processes, on whatever devices the rule lays them. Where these are another
    process's, each process receives the whole batch first. Scalars are equal in all processes.
    With one process this is `place`.

    All processes call this. What they bring is compared when its shapes are new.

    Raises:
      ValueError: the global shape does not fit the rule or the mesh; processes bring other shapes
        or dtypes, or other scalars.
    """
    count = jax.process_count()
    if count == 1:
        return place(batch, rule, mesh)
    _compare(batch, mesh)

    def whole(x):
        shape = jnp.shape(x)
        shape = (shape[0] * count, *shape[1:]) if shape else shape
        return jax.ShapeDtypeStruct(shape, jnp.result_type(x))

    shapes = jax.tree.map(whole, batch)
    return jax.tree.map(
        lambda x, to, sharding: _global(np.asarray(x, to.dtype), to.shape, sharding),
        batch,
        shapes,
        shardings(rule, shapes, mesh),
    )


def _compare(batch, mesh):
    """Check, once for each set of shapes, that all processes bring the same, and have a part."""
    leaves = [(path, jnp.result_type(x), jnp.shape(x), x) for path, x in named_leaves(batch)]
    shapes = tuple((path, str(dtype), shape) for path, dtype, shape, _ in leaves)
    if shapes in _COMPARED:
        return
    with together("rules.global_batch") as facts:
        for path, dtype, shape, x in leaves:
            facts[path or "the array"] = f"{dtype}{list(shape)}" if shape else f"{dtype} {x}"
        there = {device.process_index for device in mesh.devices.flat}
        if len(there) < jax.process_count():
            raise ValueError(
                f"rules.global_batch: the mesh has devices of the processes {sorted(there)}, and "
                f"{jax.process_count()} bring rows; make it of all devices."
            )
    _COMPARED.add(shapes)


def _global(rows, shape, sharding):
    """The array of all processes' rows, made of this one's alone if its devices need no others."""
    each = len(rows) if shape else 0

    def is_local(device, index):
        start, stop, _ = index[0].indices(shape[0])
        return each * device.process_index <= start and stop <= each * (device.process_index + 1)

    if not shape or all(is_local(*item) for item in sharding.devices_indices_map(shape).items()):
        first = each * jax.process_index()
    else:
        rows, first = multihost_utils.process_allgather(rows, tiled=True), 0

    def block(index):
        if not shape:
            return rows
        start, stop, _ = index[0].indices(shape[0])
        return rows[(slice(start - first, stop - first), *index[1:])]

    return jax.make_array_from_callback(shape, sharding, block)
