"""What the chapters draw: one palette, still figures as SVG, and interactive ones."""

from shardwise.figures.explorer import mesh_explorer
from shardwise.figures.palette import DEVICES, style
from shardwise.figures.pipelines import pipeline_explorer
from shardwise.figures.plots import bars, canvas, curves, mesh_picture, shards
from shardwise.figures.resharding import resharding_explorer
from shardwise.figures.ring import ring_stepper
from shardwise.figures.timelines import schedule

__all__ = [
    "DEVICES",
    "bars",
    "canvas",
    "curves",
    "mesh_explorer",
    "mesh_picture",
    "pipeline_explorer",
    "resharding_explorer",
    "ring_stepper",
    "schedule",
    "shards",
    "style",
]
