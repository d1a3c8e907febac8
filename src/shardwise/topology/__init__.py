"""Chips to compile for without having them, and the peaks, memory and links of each.

`mesh = chips("v5p:4x4x8").mesh(fsdp=32, model=4)` lays axes along a torus, `chips("h100:16x8")`
along nodes of GPUs. `compile(mesh.lower(jitted, *shapes), mesh)`, with shardings of
`mesh.abstract`, is the program, with the memory that it needs and its largest arrays, by Google's
compiler for TPUs or XLA's for GPUs; `shardwise.measure` reads it. `CHIPS` is {"v5e": `Chip`, ...}.
"""

from .chip import CHIPS, of_device
from .compiling import DoesNotFit, compile
from .slices import ChipMesh, Chips, chips

__all__ = ["CHIPS", "ChipMesh", "Chips", "DoesNotFit", "chips", "compile", "of_device"]
