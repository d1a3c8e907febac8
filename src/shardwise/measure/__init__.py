"""What a program costs: bytes on each device, collectives, FLOPs, and time.

Compiled programs are read, not run: `jax.jit(f).lower(*args).compile()` is what to pass.
"""

from .axes import by_axis
from .communication import collectives
from .counts import Collectives, Count
from .matmuls import flops
from .memory import DeviceBytes, bytes_on_devices, bytes_per_device
from .timing import StepTime, step_time

__all__ = [
    "Collectives",
    "Count",
    "DeviceBytes",
    "StepTime",
    "by_axis",
    "bytes_on_devices",
    "bytes_per_device",
    "collectives",
    "flops",
    "step_time",
]
