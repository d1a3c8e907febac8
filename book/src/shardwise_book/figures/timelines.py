"""Pipelines over time: what each device does when, and what is live on it."""

from collections.abc import Mapping

import numpy as np
from matplotlib.patches import Rectangle

from shardwise import schedules
from shardwise_book.figures import palette, svg
from shardwise_book.figures.plots import Drawing, canvas, legend, tile, words

GAP = 0.25  # between rows of what is live, in heights of a row
WAITS = {"color": palette.GREY, "alpha": 0.18, "linewidth": 0}

# Forwards darkest, backwards to the weights lightest, so that they differ in grey too.
COLOURS = {
    "F": palette.DEVICES[1],
    "B": palette.DEVICES[4],
    "I": palette.DEVICES[5],
    "W": palette.DEVICES[7],
}


def schedule(runs: Mapping[str, schedules.Timeline], width: float = 5.2) -> Drawing:
    """Timelines under their titles, on one axis of time.

    A box is a task; its colour is the kind, its number the microbatch. A bar at the foot marks a
    device's second stage, two bars its third. Where it is shaded, the device waits.
    """
    rows = sum(run.schedule.devices + 1.4 for run in runs.values())
    drawing, axes = canvas(width, 0.24 * rows + 0.6)
    span, top, ticks = max(run.makespan for run in runs.values()), 0, {}
    for title, run in runs.items():
        bold = {"fontweight": "bold", "fontsize": 9.5, "ha": "left", "va": "baseline"}
        words(axes, 0, top + 0.62, title, **bold)
        for device, order in enumerate(run.schedule.tasks):
            row = top + device + 1
            ticks[row + 0.5] = str(device)
            axes.add_patch(Rectangle((0, row + 0.06), run.makespan, 0.88, **WAITS))
            for task in order:
                _task(axes, row, run, task, span / (11 * width))
        top += run.schedule.devices + 1.4
    axes.set_yticks(list(ticks), ticks.values(), fontsize=9)
    axes.set(xlim=(0, span * 1.001), ylim=(top - 0.3, 0), xlabel="time, in ticks", ylabel="device")
    axes.spines[:].set_visible(False)
    axes.tick_params(axis="y", length=0)
    kinds, names = {task.kind for run in runs.values() for task in run.start}, schedules.table.KINDS
    shown = [
        Rectangle((0, 0), 1, 1, facecolor=COLOURS[kind], label=f"{kind} {name}")
        for kind, name in names.items()
        if kind in kinds
    ]
    spaces = {"handletextpad": 0.4, "columnspacing": 1.2, "borderaxespad": 0.1, "fontsize": 9}
    legend(axes, len(shown), handles=shown, handlelength=1, handleheight=1, **spaces)
    return drawing


def _task(axes, row, run, task, narrow):
    """One box; its number is left out where it would not fit, under `narrow` a digit."""
    start, length = run.start[task], run.end[task] - run.start[task]
    colour = COLOURS[task.kind]
    gap = min(narrow / 6, length / 6)  # what tells neighbours of one kind apart
    tile(axes, start, row + 0.06, length - gap, 0.88, colour)
    ink = palette.ink(colour)
    if length > narrow * len(str(task.microbatch)):
        number = {"va": "center_baseline", "fontsize": 8, "color": ink}
        words(axes, start + length / 2, row + 0.53, task.microbatch, **number)
    for bar in range(chunk(run.schedule, task)):
        tile(axes, start + 0.15 * length, row + 0.84 - 0.16 * bar, 0.7 * length, 0.06, ink)


def chunk(table: schedules.Schedule, task: schedules.Task) -> int:
    """Which of its device's stages a task belongs to, counted from 0 in the order of stages."""
    home = table.device_of[task.stage]
    return sum(device == home for device in table.device_of[: task.stage])


def live_activations(runs: Mapping[str, schedules.Timeline], width: float = 3.9) -> Drawing:
    """A panel for each timeline, two in a line: a row for each device, filled as high as it holds.

    Heights and numbers, each row's highest, count microbatches through all layers of a device, on
    one scale for all panels; so does time, on one axis.
    """
    lines = -(-len(runs) // 2)
    rows = max(run.schedule.devices for run in runs.values())
    high, grid = lines * (0.21 * rows + 0.3) + 0.35, {"sharex": True, "squeeze": False}
    drawing, panels = canvas(width, high, 2, lines, **grid)
    panels = panels.ravel()
    span = max(run.makespan for run in runs.values())
    most = max(_share(run) * max(run.peak_live) for run in runs.values())
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
        peak = svg.short(_share(run) * run.peak_live[device], 3)
        middles.append(foot - 0.5)
        axes.text(span * 1.03, foot - 0.5, peak, va="center", fontsize=9, color=palette.GREY)
    axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold", pad=2)
    axes.set_yticks(middles, range(len(middles)), fontsize=8.5)
    axes.tick_params(length=0, labelsize=8.5)
    axes.set(xlim=(0, span * 1.12), ylim=((1 + GAP) * len(middles) + 0.05, GAP / 2))
    axes.spines[:].set_visible(False)
