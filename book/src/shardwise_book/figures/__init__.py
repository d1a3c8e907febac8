"""What the chapters draw: one palette, still figures as SVG, and interactive ones."""

import types

from shardwise_book.figures.balance import balance_explorer
from shardwise_book.figures.blocks import Block, block_explorer
from shardwise_book.figures.budgets import Budget, Load, plan_explorer, split_explorer
from shardwise_book.figures.collectives import collective_picture
from shardwise_book.figures.layer import layer_explorer
from shardwise_book.figures.loads import loads_explorer
from shardwise_book.figures.mesh import mesh_explorer
from shardwise_book.figures.overlap import lanes_explorer, overlap
from shardwise_book.figures.palette import DEVICES, style
from shardwise_book.figures.pipelines import live_activations, pipeline_explorer, schedule
from shardwise_book.figures.plots import bars, canvas, counters, curves, mesh_picture, shards
from shardwise_book.figures.products import Product, product_explorer
from shardwise_book.figures.questions import choose, fill_in, questions
from shardwise_book.figures.resharding import resharding_explorer
from shardwise_book.figures.ring import ring_stepper
from shardwise_book.figures.saving import saving_explorer, share_lost
from shardwise_book.figures.slices import slice_graph
from shardwise_book.figures.stepping import fsdp_stepper, training_step

# What is imported here is what the package offers.
__all__ = [n for n, x in globals().items() if n[0] != "_" and not isinstance(x, types.ModuleType)]
