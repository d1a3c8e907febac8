"""Bytes on each device: what a compiled program needs, whether it fits, and what arrays occupy."""

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from .hlo import checked

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_REFUSALS = (
    r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm",
    r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)",
    r"Allocation \(size=([\d.]+)()\) would exceed memory \(size=([\d.]+)()\)",
)


class DeviceBytes(NamedTuple):
    """Bytes on one device while a program runs. Arguments that are `aliased`, as donated ones are,
    lie where outputs will; `temporaries` are one buffer for all intermediate values at their peak.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int

    @property
    def total(self) -> int:
        """Arguments, outputs and temporaries, what is aliased only once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


def bytes_per_device(compiled: Any) -> DeviceBytes:
    """The `DeviceBytes` of a `jax.stages.Compiled`, or of what `topology.compile` returns.

    Something else than these is a TypeError, and a backend that tells no memory a ValueError.
    """
    # Not `peak_memory_in_bytes`: on CPU it is below the temporaries alone.
    stats = checked("bytes_per_device", compiled).memory_analysis()
    if stats is None:
        raise ValueError(
            "measure.bytes_per_device: this backend tells no memory of a compiled program; measure "
            "the arrays instead, with measure.bytes_on_devices."
        )
    kinds = ("argument", "output", "alias", "temp")
    return DeviceBytes(*(getattr(stats, f"{kind}_size_in_bytes") for kind in kinds))


def bytes_on_devices(tree: Any) -> dict[jax.Device, int]:
    """A dict from each device of this process to the bytes that the tree's arrays hold on it.

    An array that is in the tree twice counts once. Deleted or donated ones, NumPy arrays and Python
    numbers count nothing; any other leaf is a TypeError.
    """
    arrays, sizes = {}, Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, np.ndarray | np.generic | int | float | complex | str):
            continue
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            raise TypeError(
                f"measure.bytes_on_devices: the leaf at {jax.tree_util.keystr(path) or 'the top'} "
                f"is a {type(leaf).__name__}; expected arrays. Of an NNX module, pass nnx.state(m)."
            )
        arrays[id(leaf)] = leaf
    for x in (x for x in arrays.values() if not x.is_deleted()):
        # Not by addressable_shards: what they hold lives, on some releases, until the next gc.
        held = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        sizes.update(dict.fromkeys(x.sharding.addressable_devices, held))
    return dict(sorted(sizes.items(), key=lambda item: item[0].id))


@dataclass(frozen=True)
class Fit:
    """Whether a program fits into a device's memory, by its truth: `if measure.fits(program):`.

    Fields:
      needed, allowed: the bytes that the program needs on one device, and those that it may have.
      memory: the `DeviceBytes` of the program, or None if the compiler refused it.
      buffers: a tuple of the largest arrays, each a `Buffer`, empty where they are not known.
    """

    needed: int
    allowed: int
    memory: DeviceBytes | None = None
    buffers: tuple[Any, ...] = ()

    def __bool__(self) -> bool:
        return self.needed <= self.allowed

    def __repr__(self) -> str:
        says, g = "fits" if self else "does not fit", 2**30
        lines = [f"{says}: {self.needed / g:.2f} of {self.allowed / g:.2f} GiB"]
        if self.memory:
            lines += [", ".join(f"{k} {n / g:.2f}" for k, n in self.memory._asdict().items())]
        return "\n  ".join([*lines, *map(str, self.buffers[:5])])


def fits(program: Any, allowed: int | None = None) -> Fit:
    """The `Fit` of a compiled program into a device's memory, or of a compiler's refusal, an error.

    A program needs its arguments and outputs, less what is aliased, and its temporaries: so much
    at most, for the TPU compiler's own count is lower. `needed` is that count, where there is one.
    What the device allows is known for what `topology.compile` returns or raises, and for TPU's
    errors; for another `jax.stages.Compiled` give `allowed`, in bytes. libtpu 0.0.23 does not
    refuse what arguments and outputs make too large; its `Fit` is false.

    Raises:
      TypeError: `program` is neither a compiled program nor an error.
      ValueError: `allowed` is not known, or the error tells no numbers.
    """
    buffers = getattr(program, "buffers", ())
    if isinstance(program, Exception):
        if told := refused(program):
            return Fit(told[0], allowed or told[1], None, buffers)
        raise ValueError(
            f"measure.fits: this {type(program).__name__} tells no numbers of memory: "
            f"{str(program)[:200]!r}; expected a refusal such as 'Used 18.75G of 15.75G hbm'."
        )
    memory = bytes_per_device(program)
    if not (allowed := allowed or getattr(program, "usable_hbm", None)):
        raise ValueError(
            "measure.fits: how much the device allows is not known for a program compiled here; "
            "say measure.fits(compiled, allowed=16 * 2**30), or compile by topology.compile."
        )
    return Fit(getattr(program, "hbm_bytes", None) or memory.total, allowed, memory, buffers)


def refused(error: Exception | str) -> tuple[int, int] | None:
    """(needed, allowed) bytes in a TPU compiler's refusal; None if it tells no numbers."""
    if hasattr(error, "needed"):  # as `topology.compile` raises it
        return error.needed, error.allowed
    for pattern in _REFUSALS:
        if found := re.search(pattern, str(error)):
            needed, unit, allowed, its_unit = found.groups()
            return int(float(needed) * _UNITS[unit]), int(float(allowed) * _UNITS[its_unit])
    return None
