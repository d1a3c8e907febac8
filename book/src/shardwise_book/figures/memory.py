"""What is live on each device of a pipeline, over time."""

from collections.abc import Mapping

import numpy as np

from shardwise import schedules
from shardwise_book.figures import palette
from shardwise_book.figures.plots import Drawing, canvas
from shardwise_book.figures.timelines import COLOURS, number

GAP = 0.25  # between rows, in heights of a row


def live_activations(runs: Mapping[str, schedules.Timeline], width: float = 3.9) -> Drawing:
    """A panel for each timeline, two in a line: a row for each device, filled as high as it holds.

    Heights and numbers, each row's highest, count microbatches through all layers of a device, on
    one scale for all panels; so does time, on one axis.
    """
    lines = -(-len(runs) // 2)
    rows = max(run.schedule.devices for run in runs.values())
    drawing, _ = canvas(width, lines * (0.21 * rows + 0.3) + 0.35)
    drawing.clear()
    span = max(run.makespan for run in runs.values())
    most = max(_share(run) * max(run.peak_live) for run in runs.values())
    with palette.style():
        panels = drawing.subplots(lines, 2, sharex=True, squeeze=False).ravel()
    for axes, (title, run) in zip(panels, runs.items(), strict=False):
        _panel(axes, title, run, span, most)
    for axes in panels[len(runs) :]:
        axes.set_visible(False)
    for axes in panels[max(0, len(runs) - 2) : len(runs)]:
        axes.tick_params(axis="x", labelbottom=True)
        axes.set_xlabel("time, in ticks")
    return drawing


def _share(run):
    """How much of a device's layers one stage has."""
    return run.schedule.devices / run.schedule.stages


def _panel(axes, title, run, span, most):
    middles = []
    for device, changes in enumerate(run.live):
        times, counts = np.array([*changes, (span, changes[-1][1])]).T
        foot = (1 + GAP) * (device + 1)
        heights = foot - counts * _share(run) / most
        fill = {"step": "post", "facecolor": COLOURS["F"], "linewidth": 0}
        axes.fill_between(times, foot, heights, **fill)
        axes.plot([0, span], [foot, foot], color=palette.GREY, linewidth=0.6, linestyle="-")
        peak = number(_share(run) * run.peak_live[device])
        middles.append(foot - 0.5)
        axes.text(span * 1.03, foot - 0.5, peak, va="center", fontsize=9, color=palette.GREY)
    axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold", pad=2)
    axes.set_yticks(middles, range(len(middles)), fontsize=8.5)
    axes.tick_params(length=0, labelsize=8.5)
    axes.set_ylim((1 + GAP) * len(middles) + 0.05, GAP / 2)
    axes.set_xlim(0, span * 1.12)
    axes.spines[:].set_visible(False)
