"""Checkers of the book's puzzles: give one your answer, and it says what is right or missing.

Each takes the answer, a function or a value, and returns a `Verdict`, which a notebook shows:

    from shardwise_book import puzzles
    puzzles.bands(P("data", "model"))   # true only if solved

`halo`, `layer` and `squares` are no checkers: puzzles use them. No other module imports this one. A
checker judges what an answer does: its values against one device's on seeded random inputs of
several shapes, its bytes in the compiled program, a schedule by its timeline. It never reads
source. Checkers need eight devices: `mesh.simulate(8)`.
"""

import types

from .collectives import clip, gather, halo, layer, one_order, scatter, settings, transpose
from .judging import Verdict
from .layouts import bands, born, product, table, target
from .plans import division, gather_seconds, smallest, split
from .steps import accumulated, boundaries, order, segments, squares

# What is imported here is what the package offers.
__all__ = [n for n, x in globals().items() if n[0] != "_" and not isinstance(x, types.ModuleType)]
