"""What the chapters draw: one palette, still figures as SVG, and interactive ones.

What a function here returns, a notebook shows where it ends a cell: a matplotlib figure as SVG, or,
for explorers, steppers, `slice_graph` and `questions`, HTML that brings with it all it needs. But
`canvas` returns (figure, axes), `style` a context; `choose` and `fill_in` make what `questions`
shows; and `overlap`, `training_step` and `share_lost` return numbers, as they say.
"""

import types

from .balance import balance_explorer
from .budgets import Budget, Load, plan_explorer, split_explorer
from .loads import loads_explorer
from .overlap import lanes_explorer, overlap
from .palette import DEVICES, style
from .pieces import layer_explorer, mesh_explorer
from .pipelines import pipeline_explorer, schedule
from .plots import bars, canvas, collective_picture, counters, curves, mesh_picture, shards
from .products import Block, Product, block_explorer, product_explorer
from .questions import choose, fill_in, questions
from .resharding import resharding_explorer
from .ring import ring_stepper
from .saving import saving_explorer, share_lost
from .slices import slice_graph
from .stepping import fsdp_stepper, training_step

# What is imported here is what the package offers.
__all__ = [n for n, x in globals().items() if n[0] != "_" and not isinstance(x, types.ModuleType)]
