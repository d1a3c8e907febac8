"""Chips to compile for without having them, and the peaks, memory and links of each.

`chips("v5p:4x4x8").mesh(fsdp=32, model=4)` lays axes along a torus. Trace with its `.abstract`
mesh, `lower` for TPUs, `compile`: the result is what Google's compiler says of real hardware, its
program, its memory and its largest arrays, for `shardwise.measure` to read.
"""

from .buffers import Buffer
from .cache import folder as cache_folder
from .chip import CHIPS, Chip, of_device
from .compiling import Compiled, DoesNotFit, Sizes, compile
from .lowering import lower
from .slices import ChipMesh, Chips, chips
from .stages import Rank, Stages, compile_stages

__all__ = [
    "CHIPS",
    "Buffer",
    "Chip",
    "ChipMesh",
    "Chips",
    "Compiled",
    "DoesNotFit",
    "Rank",
    "Sizes",
    "Stages",
    "cache_folder",
    "chips",
    "compile",
    "compile_stages",
    "lower",
    "of_device",
]
