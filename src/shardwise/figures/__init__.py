"""What the chapters draw: one palette, still figures as SVG, and interactive ones."""

from shardwise.figures.explorer import mesh_explorer
from shardwise.figures.palette import DEVICES, style
from shardwise.figures.plots import bars, canvas, curves, mesh_picture, shards
from shardwise.figures.resharding import resharding_explorer
from shardwise.figures.ring import ring_stepper

__all__ = [
    "DEVICES",
    "bars",
    "canvas",
    "curves",
    "mesh_explorer",
    "mesh_picture",
    "resharding_explorer",
    "ring_stepper",
    "shards",
    "style",
]
