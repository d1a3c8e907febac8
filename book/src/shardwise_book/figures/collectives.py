"""The picture of what collectives do: who holds which block before and after, and the ring."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from matplotlib.patches import Circle, FancyArrowPatch

from shardwise_book.figures import palette
from shardwise_book.figures.plots import Drawing, canvas, outline, tile, words

NAMES = ("all-gather", "reduce-scatter", "all-reduce")


def collective_picture(mesh: Mesh, names: Sequence[str] = NAMES) -> Drawing:
    """What each device holds before and after each collective, which is run; and the ring.

    `mesh` has one axis. A column is a device and a row a block; the colour says which device a
    block comes from, and a block of several colours is the sum of theirs.
    """
    n, apart = mesh.size, 2.6
    pitch = n + 2.7
    drawing, axes = canvas(3.1, 0.29 * (pitch * len(names) + 5.2))
    for i, name in enumerate(names):
        top, turns = i * pitch, 2 if name == "all-reduce" else 1
        words(axes, 0, top - 0.85, name, fontweight="bold", ha="left")
        whose = " of its own" if name == "all-to-all" else ""
        sends = f"each sends {turns * (n - 1)} blocks{whose}"
        words(axes, 2 * n + apart, top - 0.85, sends, ha="right", fontsize=9)
        for left, state in zip((0, n + apart), _states(mesh, name), strict=True):
            _state(axes, left, top, state)
        arrow = FancyArrowPatch((n + 0.4, top + n / 2), (n + apart - 0.4, top + n / 2))
        _line(axes, arrow)
    _ring(axes, n + apart / 2, len(names) * pitch + 0.9, n)
    limits = {"xlim": (-0.1, 2 * n + apart + 0.1), "ylim": (len(names) * pitch + 3.8, -1.4)}
    axes.set(**limits, aspect="equal")
    axes.set_axis_off()
    return drawing


def _states(mesh, name):
    """Marks [block, device] before and after: bit d for what comes from device d, 0 for nothing."""
    n, (axis,) = mesh.size, mesh.axis_names
    cut, rows = PartitionSpec(None, axis), 1 << np.arange(n)
    run = {
        "all-gather": lambda x: jax.lax.all_gather(x.sum(0), axis),
        "reduce-scatter": lambda x: jax.lax.psum_scatter(x, axis, tiled=True),
        "all-reduce": lambda x: jax.lax.psum(x, axis),
        "all-to-all": lambda x: jax.lax.all_to_all(x, axis, 0, 0, tiled=True),
    }[name]
    before = np.diag(rows) if name == "all-gather" else np.tile(rows, (n, 1))
    after = np.array(jax.jit(jax.shard_map(run, mesh=mesh, in_specs=cut, out_specs=cut))(before))
    return before, np.diag(after[0]) if name == "reduce-scatter" else after


def _state(axes, left, top, state):
    """One column a device, its blocks from top to bottom."""
    for (block, device), mark in np.ndenumerate(state):
        x, y = left + device, top + block
        whose = [d for d in range(len(state)) if mark >> d & 1]
        wide, high = 0.88 / max(1, len(whose)), 0.88
        for i, d in enumerate(whose):
            at, label = (x + 0.06 + i * wide, y + 0.06), d if len(whose) == 1 else ""
            tile(axes, *at, wide, high, palette.device(d), label, 0.52, fontsize=9)
    for device in range(len(state)):
        outline(axes, left + device, top, 1, len(state), 0.9)
        words(axes, left + device + 0.5, top + len(state) + 0.5, device)


def _ring(axes, x, y, n):
    """n devices on a flat ring, each with an arrow to the next."""
    angles = [math.pi * (1 + 2 * d / n) + math.pi / n for d in range(n)]
    places = [(x + 3.2 * math.cos(a), y + 1.5 * math.sin(a)) for a in angles]
    for d, place in enumerate(places):
        colour = palette.device(d)
        axes.add_patch(Circle(place, 0.52, color=colour, lw=0))
        words(axes, *place, d, color=palette.ink(colour))
        _line(axes, FancyArrowPatch(place, places[(d + 1) % n], shrinkA=13, shrinkB=13))
    words(axes, x, y + 2.4, "in a ring, each sends to the next", fontsize=9)


def _line(axes, arrow):
    arrow.set(arrowstyle="-|>", mutation_scale=11, color=palette.GREY, lw=1.4)
    axes.add_patch(arrow)
