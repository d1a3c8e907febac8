"""What the chapters draw: one palette, still figures as SVG, and interactive ones."""

try:
    import matplotlib  # noqa: F401
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "shardwise.figures draws with matplotlib, which is not installed: "
        "run `pip install 'shardwise[figures]'`."
    ) from None

from shardwise.figures.explorer import mesh_explorer
from shardwise.figures.layer import layer_explorer
from shardwise.figures.palette import DEVICES, style
from shardwise.figures.pipelines import pipeline_explorer
from shardwise.figures.plots import bars, canvas, curves, mesh_picture, shards
from shardwise.figures.resharding import resharding_explorer
from shardwise.figures.ring import ring_stepper
from shardwise.figures.stepping import fsdp_stepper
from shardwise.figures.timelines import schedule
from shardwise.figures.zero import training_step

__all__ = [
    "DEVICES",
    "bars",
    "canvas",
    "curves",
    "fsdp_stepper",
    "layer_explorer",
    "mesh_explorer",
    "mesh_picture",
    "pipeline_explorer",
    "resharding_explorer",
    "ring_stepper",
    "schedule",
    "shards",
    "style",
    "training_step",
]
