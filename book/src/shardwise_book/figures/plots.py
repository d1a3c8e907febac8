"""The static figures: blocks, meshes, collectives, random bits, loss curves, bars that compare."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle
from numpy.typing import ArrayLike

from shardwise_book.figures import palette
from shardwise_book.figures.pieces import Piece, pieces

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce")


class Drawing(Figure):
    """A matplotlib figure that shows itself as SVG, sharp on every screen, and only once.

    It belongs to no pyplot state, so that nothing is shown unless it ends a cell.
    """

    def _repr_svg_(self) -> str:
        out = io.StringIO()
        with palette.style():
            self.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None})
        return out.getvalue()


def canvas(
    width: float = 4.3, height: float = 3.0, columns: int = 1, rows: int = 1, **grid: Any
) -> tuple[Drawing, Any]:
    """A transparent drawing in the book's style, in inches (4.5 fit a phone), and its axes.

    `grid` is for matplotlib's `subplots`.
    """
    with palette.style():
        drawing = Drawing(figsize=(width, height), layout="constrained")
        return drawing, drawing.subplots(rows, columns, **grid)


def tile(
    axes: Axes, x: float, y: float, wide: float, high: float, colour: str, label: Any = "",
    at: float = 0.5, **style: Any,
) -> None:  # fmt: skip
    """A filled rectangle, and a label in black or white, `at` that share of its height."""
    axes.add_patch(Rectangle((x, y), wide, high, facecolor=colour, linewidth=0))
    words(axes, x + wide / 2, y + at * high, label, color=palette.ink(colour), **style)


def words(axes: Axes, x: float, y: float, text: Any, **style: Any) -> None:
    """Text around a point, in grey unless told otherwise."""
    if str(text):
        axes.text(x, y, text, **{"color": palette.GREY, "ha": "center", "va": "center"} | style)


def outline(axes: Axes, x: float, y: float, wide: float, high: float, line: float = 1.2) -> None:
    """A rectangle's edge, so many points thick."""
    axes.add_patch(Rectangle((x, y), wide, high, fill=False, ec=palette.GREY, linewidth=line))


def shards(array: jax.Array) -> Drawing:
    """Which device holds which block of a 1-D or 2-D array.

    Each block has an outline; one that several devices hold shows a strip for each of them.
    Raises ValueError for other ranks.
    """
    shape, sharding = array.shape, array.sharding
    if len(shape) not in (1, 2):
        raise ValueError(f"figures.shards draws arrays of 1 or 2 axes, not of shape {shape}.")
    rows, columns = (1, *shape)[-2:]
    height = min(3.2, max(1.1, 4.0 * rows / columns))
    drawing, axes = canvas(min(4.6, max(2.2, 0.6 + height * columns / rows)), height)
    holders: dict[Piece, list[int]] = {}
    held = pieces(sharding, shape, len(shape) - 1)
    for device, piece in zip(sharding.devices_indices_map(shape), held, strict=True):
        holders.setdefault(piece, []).append(device.id)
    for piece, ids in holders.items():
        left, top, wide, high = piece.box()
        strip = wide / len(ids)
        for i, n in enumerate(ids):
            tile(axes, left + i * strip, top, strip, high, palette.device(n), n, fontweight="bold")
        outline(axes, left, top, wide, high, 3)
    _frame(axes, rows, columns)
    title = f"{getattr(sharding, 'spec', type(sharding).__name__)} of shape {shape}"
    axes.set(xticks=[0, columns], yticks=[0, rows] if len(shape) == 2 else [], title=title)
    return drawing


def mesh_picture(mesh: Mesh, per_host: int | None = None) -> Drawing:
    """The devices of a mesh of one to three axes, by axis name; a first of three gives panels.

    `per_host` notes on each device which machine it would be in, if each held so many.
    """
    devices = np.asarray(mesh.devices)
    first, down, across = (None, None, *mesh.axis_names)[-3:]
    grid = devices[(None,) * (3 - devices.ndim)]
    panels, rows, columns = grid.shape
    drawing, axes = canvas(0.75 * panels * columns + 0.9, 0.55 * rows + 0.75, panels)
    for panel, ax in enumerate(np.atleast_1d(axes)):
        for (row, column), d in np.ndenumerate(grid[panel]):
            colour, at = palette.device(d.id), 0.4 if per_host else 0.5
            tile(ax, column + 0.06, row + 0.06, 0.88, 0.88, colour, d.id, at, fontweight="bold")
            host = f"host {d.id // per_host}" if per_host else ""
            words(ax, column + 0.5, row + 0.75, host, color=palette.ink(colour), fontsize=7)
        _frame(ax, rows, columns)
        ax.set_xticks(np.arange(columns) + 0.5, range(columns))
        ax.set_yticks(np.arange(rows) + 0.5 if down else [], range(rows) if down else [])
        title = f"{first} = {panel}" if first else ""
        ax.set(xlabel=across, ylabel=down or "", title=title)
    return drawing


def collective_picture(mesh: Mesh, names: Sequence[str] = COLLECTIVES) -> Drawing:
    """What each device holds before and after each collective, which is run; and the ring.

    `mesh` has one axis. A column is a device and a row a block; the colour says which device a
    block comes from, and a block of several colours is the sum of theirs.
    """
    n, apart, pitch = mesh.size, 2.6, mesh.size + 2.7
    foot = pitch * len(names)
    drawing, axes = canvas(3.1, 0.29 * (foot + 5.2))
    for i, name in enumerate(names):
        top, turns = i * pitch, 2 if name == "all-reduce" else 1
        words(axes, 0, top - 0.85, name, fontweight="bold", ha="left")
        whose = " of its own" if name == "all-to-all" else ""
        sends = f"each sends {turns * (n - 1)} blocks{whose}"
        words(axes, 2 * n + apart, top - 0.85, sends, ha="right", fontsize=9)
        for left, state in zip((0, n + apart), _states(mesh, name), strict=True):
            _state(axes, left, top, state)
        _arrow(axes, (n + 0.4, top + n / 2), (n + apart - 0.4, top + n / 2))
    _ring(axes, n + apart / 2, foot + 0.9, n)
    axes.set(xlim=(-0.1, 2 * n + apart + 0.1), ylim=(foot + 3.8, -1.4), aspect="equal")
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
        axes.add_patch(Circle(place, 0.52, color=palette.device(d), lw=0))
        words(axes, *place, d, color=palette.ink(palette.device(d)))
        _arrow(axes, place, places[(d + 1) % n], shrinkA=13, shrinkB=13)
    words(axes, x, y + 2.4, "in a ring, each sends to the next", fontsize=9)


def _arrow(axes, start, end, **ends):
    look = {"arrowstyle": "-|>", "mutation_scale": 11, "color": palette.GREY, "linewidth": 1.4}
    axes.add_patch(FancyArrowPatch(start, end, **look, **ends))


def counters(key: jax.Array, drawn: Mapping[str, jax.Array]) -> Drawing:
    """Arrays of `jax.random.bits(key, shape)`, cut in several ways, by the counters behind them.

    `drawn` maps a title to such an array of two axes. Each entry of each shard is looked up in the
    stream `jax.random.bits(key, (size,))`, and its place there is the number written into it; its
    colour is the device that holds it. The strip below is the stream in order, coloured alike.

    Raises:
      ValueError: a shard holds a number that stands nowhere in the stream.
    """
    drawing, panels = canvas(2.05 * len(drawn), 2.6, len(drawn))
    for axes, (title, array) in zip(np.atleast_1d(panels), drawn.items(), strict=True):
        found, devices = origins(key, array)
        rows, columns = found.shape
        wide, foot = columns / found.size, rows + 2.6
        for (i, j), counter in np.ndenumerate(found):
            colour = palette.device(devices[i, j])
            tile(axes, j, i, 0.96, 0.96, colour, counter, fontsize=9, va="center_baseline")
            place = counter * wide, rows + 1.1
            axes.add_patch(Rectangle(place, wide, 1, color=colour, linewidth=0.4))  # they touch
        words(axes, 0, foot, 0, ha="left", fontsize=9)
        words(axes, columns / 2, foot, "the stream", fontsize=9)
        words(axes, columns, foot, found.size - 1, ha="right", fontsize=9)
        axes.set(xlim=(-0.1, columns + 0.1), ylim=(rows + 3.1, -0.1), aspect="equal")
        axes.set_title(title, fontsize=9)
        axes.axis("off")
    return drawing


def origins(key: jax.Array, array: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """For each entry of an array of random bits: its place in the stream, and the device's id."""
    stream = np.asarray(jax.random.bits(key, (array.size,), array.dtype))
    place = {bits: i for i, bits in enumerate(stream.tolist())}
    found, devices = np.empty(array.shape, int), np.empty(array.shape, int)
    for shard in array.addressable_shards:
        block = np.asarray(shard.data)
        if strange := [bits for bits in block.ravel().tolist() if bits not in place]:
            raise ValueError(
                f"figures.counters: device {shard.device.id} holds {strange[0]}, which is "
                f"not among the {array.size} numbers that this key draws; was it drawn with "
                f"another key?"
            )
        found[shard.index] = np.vectorize(place.get, otypes=[int])(block)
        if shard.replica_id == 0:  # of several that hold the same block, one gives the colour
            devices[shard.index] = shard.device.id
    return found, devices


def curves(
    series: Mapping[str, tuple[ArrayLike, ArrayLike]],
    xlabel: str,
    ylabel: str,
    levels: Mapping[str, float] | Sequence[tuple[str, float]] = (),
) -> Drawing:
    """Curves that carry their names at their right ends.

    `series` maps a name to (x, y); `levels` maps a name to a height drawn across, such as a bound.
    """
    drawing, axes = canvas(height=3.2)
    ends = []
    for i, (name, (x, y)) in enumerate(series.items()):
        colour, dashes = palette.STYLES[i % len(palette.STYLES)]
        axes.plot(x, y, color=colour, linestyle=dashes)
        ends.append([float(y[-1]), name, colour])
    for name, height in dict(levels).items():
        axes.axhline(height, color=palette.GREY, linewidth=1, linestyle=(0, (2, 2)))
        ends.append([float(height), name, palette.GREY])
    low, high = axes.get_ylim()
    previous = -math.inf
    away = {"xytext": (6, 0), "textcoords": "offset points", "annotation_clip": False}
    for height, name, colour in sorted(ends):  # moved apart where they would overlap
        previous = max(height, previous + 0.075 * (high - low))
        at = {"xy": (1.0, previous), "xycoords": axes.get_yaxis_transform(), "va": "center"}
        axes.annotate(name, color=colour, **at, **away)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    return drawing


def bars(
    labels: Sequence[str],
    predicted: Sequence[float],
    measured: Sequence[float],
    unit: str,
    found: str = "measured",
) -> Drawing:
    """Predicted beside `found`, one pair of bars a label, each with its number in `unit`."""
    drawing, axes = canvas(height=0.62 * len(labels) + 1.0)
    where, blue = np.arange(len(labels)), palette.LINES[0]
    hollow, full = {"fill": False, "hatch": "////", "edgecolor": blue}, {"color": blue}
    pairs = {"predicted": (-0.19, predicted, hollow), found: (0.19, measured, full)}
    for name, (shift, values, look) in pairs.items():
        drawn = axes.barh(where + shift, values, 0.34, label=name, **look)
        said = [f"{v:,.0f}" if v >= 1000 or v == int(v) else f"{v:,.3g}" for v in values]
        axes.bar_label(drawn, labels=said, padding=4, color=palette.GREY)
    axes.set_yticks(where, labels)
    axes.invert_yaxis()
    axes.set(xlabel=unit, xmargin=0.14)
    legend(axes, 2)
    return drawing


def legend(axes: Axes, columns: int, left: float = 0, **options: Any) -> None:
    """A legend above the axes, from `left` on: on a phone the right side is out of sight."""
    with palette.style():
        axes.legend(ncols=columns, loc="lower left", bbox_to_anchor=(left, 1), **options)


def _frame(axes, rows, columns):
    outline(axes, 0, 0, columns, rows)
    axes.set_xlim(-0.01 * columns, 1.01 * columns)
    axes.set_ylim(1.02 * rows, -0.02 * rows)  # row 0 at the top, as arrays are written
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
