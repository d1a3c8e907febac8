"""Costs of a program: bytes on each device, collectives, FLOPs, and time.

Compiled programs are read, not run: `jax.jit(f).lower(*args).compile()` is what to pass, or what
`topology.compile` returns for chips that are not here.
"""

from .communication import collectives
from .counts import Collectives, Count, Form, Forms, by_axis, by_form
from .differences import Difference, Differences, differences
from .matmuls import flops
from .memory import DeviceBytes, Fit, bytes_on_devices, bytes_per_device, fits
from .overlap import Beside, Overlap, Span, lanes, overlap
from .timing import StepTime, step_time

__all__ = [
    "Beside", "Collectives", "Count", "DeviceBytes", "Difference", "Differences", "Fit", "Form",
    "Forms", "Overlap", "Span", "StepTime", "by_axis", "by_form", "bytes_on_devices",
    "bytes_per_device", "collectives", "differences", "fits", "flops", "lanes", "overlap",
    "step_time",
]  # fmt: skip
