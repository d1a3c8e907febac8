"""Chips to compile for without having them, and the peaks, memory and links of each.

`chips("v5p:4x4x8").mesh(fsdp=32, model=4)` lays axes along a torus. Trace with its `.abstract`
mesh, `lower` for TPUs, `compile`: the result is what Google's compiler says of real hardware, its
program, its memory and its largest arrays, for `shardwise.measure` to read.
"""

from .child import folder as cache_folder
from .chip import CHIPS, Chip, of_device
from .compiling import Buffer, Compiled, DoesNotFit, Sizes, compile
from .lowering import lower
from .slices import ChipMesh, Chips, chips

__all__ = [
    "CHIPS",
    "Buffer",
    "Chip",
    "ChipMesh",
    "Chips",
    "Compiled",
    "DoesNotFit",
    "Sizes",
    "cache_folder",
    "chips",
    "compile",
    "lower",
    "of_device",
]
