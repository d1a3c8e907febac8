"""Plots of a run's loss and throughput, drawn from its metrics."""

import importlib.util
import math
from pathlib import Path

from shardwise.run.folder import Folder
from shardwise.run.metrics import read


def plot(folder: Folder) -> Path | None:
    """Draw metrics.png and metrics.svg; None where matplotlib is not installed, or no step done."""
    lines = [x for x in read(folder.metrics) if isinstance(x["loss"], float)]
    if not lines or importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    held_out = [x for x in read(folder.evaluations) if isinstance(x["loss"], float)]
    figure = Figure(figsize=(7, 5), layout="constrained")
    loss, speed = figure.subplots(2, 1, sharex=True)
    steps = [x["step"] for x in lines]
    loss.plot(steps, [x["loss"] for x in lines], label="training")
    if held_out:
        at = [x["step"] for x in held_out]
        loss.plot(at, [x["loss"] for x in held_out], "o--", label="held out")
        if "loss_of_mean" in held_out[0]:
            values = [x["loss_of_mean"] for x in held_out]
            loss.plot(at, values, "s:", label="held out, mean of the parameters")
        loss.legend()
    loss.set_ylabel("loss")
    what = "tokens" if "tokens" in lines[0] else "rows"
    speed.plot(steps, [x.get(f"{what}_per_second", math.nan) for x in lines])
    speed.set(xlabel="step", ylabel=f"{what}/s", ylim=(0, None))
    for kind in ("png", "svg"):
        figure.savefig(folder.path / f"metrics.{kind}", dpi=150)
    return folder.path / "metrics.png"
