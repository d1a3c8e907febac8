"""Bytes on each device: what a compiled program needs, and what arrays occupy."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from .program import is_compiled


class DeviceBytes(NamedTuple):
    """Bytes on one device while a compiled program runs."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int

    @property
    def total(self) -> int:
        """Arguments, outputs and temporaries; what is aliased (donated) is held only once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


def bytes_per_device(compiled: Any) -> DeviceBytes:
    """The `DeviceBytes` of a `jax.stages.Compiled`, or of what `topology.compile` returns.

    The temporaries are the size of one buffer that serves all intermediate values, at their peak.

    Raises:
      TypeError: `compiled` is something else.
      ValueError: the backend does not say.
    """
    if not is_compiled(compiled):
        raise TypeError(
            f"measure.bytes_per_device takes a compiled program, and got "
            f"{type(compiled).__name__}; pass jax.jit(f).lower(*args).compile()."
        )
    # Not `peak_memory_in_bytes`: on CPU it is below the temporaries alone.
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError(
            "measure.bytes_per_device: this backend reports no memory for compiled programs; "
            "measure the arrays instead, with measure.bytes_on_devices."
        )
    return DeviceBytes(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
    )


def bytes_on_devices(tree: Any) -> dict[jax.Device, int]:
    """{device: bytes that the tree's arrays hold on it} of the devices that this process sees.

    An array that stands in the tree twice counts once, a donated or deleted one not at all, and
    NumPy arrays and Python numbers, which are on no device, not either.

    Raises:
      TypeError: a leaf is none of these.
    """
    sizes, seen = {}, set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, np.ndarray | np.generic | int | float | complex | str):
            continue
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            raise TypeError(
                f"measure.bytes_on_devices: the leaf at {jax.tree_util.keystr(path) or 'the top'} "
                f"is a {type(leaf).__name__}; expected arrays. Of an NNX module, pass nnx.state(m)."
            )
        if id(leaf) in seen or leaf.is_deleted():
            continue
        seen.add(id(leaf))
        # Not by addressable_shards: what they hold lives, on some releases, until the next gc.
        held = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for device in leaf.sharding.addressable_devices:
            sizes[device] = sizes.get(device, 0) + held
    return dict(sorted(sizes.items(), key=lambda item: item[0].id))
