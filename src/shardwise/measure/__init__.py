"""Costs of a program: bytes on each device, collectives, FLOPs, and time.

Compiled programs are read, not run: `jax.jit(f).lower(*args).compile()` is what to pass, or what
`topology.compile` returns for chips that are not here.
"""

from .axes import by_axis
from .communication import collectives
from .counts import Collectives, Count
from .differences import Difference, Differences, differences
from .fitting import Fit, fits
from .forms import Form, Forms, by_form
from .lanes import Span, lanes
from .matmuls import flops
from .memory import DeviceBytes, bytes_on_devices, bytes_per_device
from .overlap import Beside, Overlap, overlap
from .timing import StepTime, step_time

__all__ = [
    "Beside",
    "Collectives",
    "Count",
    "DeviceBytes",
    "Difference",
    "Differences",
    "Fit",
    "Form",
    "Forms",
    "Overlap",
    "Span",
    "StepTime",
    "by_axis",
    "by_form",
    "bytes_on_devices",
    "bytes_per_device",
    "collectives",
    "differences",
    "fits",
    "flops",
    "lanes",
    "overlap",
    "step_time",
]
