"""Layouts: what each axis of a mesh does, for any model, loss and optimizer.

A `Layout` gives the axes of a mesh their roles, and roles combine:

    grid = mesh.make(fsdp=2, context=2, model=2)
    layout = layouts.Layout(grid, fsdp="fsdp", context="context", tensor="model")
    params, opt_state = layouts.init(layout, create, tx, key)   # create(key): one device's
    step = layouts.step(layout, loss, tx)                       # loss(params, batch): one device's
    params, opt_state, mean = step(params, opt_state, batch)
    layouts.whole(layout, params)                               # as one device has them

The loss knows of no layout. Every combination has one device's loss and gradients; they differ in
what a device holds, and in what it sends. `LAYOUTS` is a dict of many, from a name (`list(LAYOUTS)`
has them all) to a function of a number of devices: `LAYOUTS["fsdp, tensor"](8)` is a `Layout` over
the first 8.
"""

from shardwise.layouts.catalogue import LAYOUTS
from shardwise.layouts.layout import Layout
from shardwise.layouts.meanings import offload
from shardwise.layouts.predicting import describe, predict
from shardwise.layouts.training import init, place, shardings, step, value, value_and_grad, whole

__all__ = [
    "LAYOUTS", "Layout", "describe", "init", "offload", "place", "predict", "shardings", "step",
    "value", "value_and_grad", "whole",
]  # fmt: skip
