"""Costs of a program: bytes on each device, collectives, FLOPs, and time.

Compiled programs are read, not run: `jax.jit(f).lower(*args).compile()`, or what `topology.compile`
returns for chips that are not here.
"""

from .communication import collectives
from .counts import Collectives, by_axis
from .differences import differences
from .matmuls import flops
from .memory import bytes_on_devices, bytes_per_device, fits
from .overlap import lanes, overlap
from .timing import step_time

__all__ = [
    "Collectives", "by_axis", "bytes_on_devices", "bytes_per_device", "collectives",
    "differences", "fits", "flops", "lanes", "overlap", "step_time",
]  # fmt: skip
