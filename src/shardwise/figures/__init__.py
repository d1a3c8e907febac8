"""What the chapters draw: one palette, still figures as SVG, and interactive ones."""

try:
    import matplotlib  # noqa: F401
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "shardwise.figures draws with matplotlib, which is not installed: "
        "run `pip install 'shardwise[figures]'`."
    ) from None

from shardwise.figures.balance import balance_explorer
from shardwise.figures.blocks import Block, block_explorer
from shardwise.figures.collectives import collective_picture
from shardwise.figures.counters import counters
from shardwise.figures.explorer import mesh_explorer
from shardwise.figures.lanes import lanes_explorer
from shardwise.figures.layer import layer_explorer
from shardwise.figures.loads import loads_explorer
from shardwise.figures.memory import live_activations
from shardwise.figures.overlap import overlap
from shardwise.figures.palette import DEVICES, style
from shardwise.figures.pipelines import pipeline_explorer
from shardwise.figures.plans import Budget, plan_explorer
from shardwise.figures.plots import bars, canvas, curves, mesh_picture, shards
from shardwise.figures.products import Product, product_explorer
from shardwise.figures.questions import choose, fill_in, questions
from shardwise.figures.resharding import resharding_explorer
from shardwise.figures.ring import ring_stepper
from shardwise.figures.saving import saving_explorer, share_lost
from shardwise.figures.slices import slice_graph
from shardwise.figures.splits import Load, split_explorer
from shardwise.figures.stepping import fsdp_stepper
from shardwise.figures.timelines import schedule
from shardwise.figures.zero import training_step

__all__ = [
    "DEVICES",
    "Block",
    "Budget",
    "Load",
    "Product",
    "balance_explorer",
    "bars",
    "block_explorer",
    "canvas",
    "choose",
    "collective_picture",
    "counters",
    "curves",
    "fill_in",
    "fsdp_stepper",
    "lanes_explorer",
    "layer_explorer",
    "live_activations",
    "loads_explorer",
    "mesh_explorer",
    "mesh_picture",
    "overlap",
    "pipeline_explorer",
    "plan_explorer",
    "product_explorer",
    "questions",
    "resharding_explorer",
    "ring_stepper",
    "saving_explorer",
    "schedule",
    "shards",
    "share_lost",
    "slice_graph",
    "split_explorer",
    "style",
    "training_step",
]
