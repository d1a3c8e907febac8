"""The palette, and what the still figures draw."""

import collections
import itertools
import subprocess
import sys
from pathlib import Path

import jax
import matplotlib.pyplot
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.colors import to_rgb, to_rgba

import shardwise
from shardwise import mesh, schedules
from shardwise_book import figures
from shardwise_book.figures import palette, pipelines


def lightness(colour):
    """CIE L* of a colour, from 0 to 100."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 116 * np.cbrt(np.dot([0.2126, 0.7152, 0.0722], linear)) - 16


def test_device_colours_differ_in_grey():
    steps = np.diff([lightness(colour) for colour in palette.DEVICES])
    assert len(steps) == 7 and steps.min() > 5
    assert palette.device(8) == palette.device(0)


def test_numbers_read_on_their_device_and_lines_on_light_and_dark():
    assert palette.contrast("#000000", "#ffffff") == pytest.approx(21)
    for colour in palette.DEVICES:
        assert palette.contrast(colour, palette.ink(colour)) >= 4.5
    for page in ("#ffffff", "#121212"):
        assert min(palette.contrast(page, line) for line in palette.LINES) >= 3
        assert palette.contrast(page, palette.GREY) >= 4


def boxes(axes):
    """Device number to the box in which it is written, as (left, top, width, height)."""
    filled = [patch for patch in axes.patches if patch.get_fill()]
    numbers = [text for text in axes.texts if text.get_text().isdigit()]
    found = {}
    for box, number in zip(filled, numbers, strict=True):
        assert box.contains_point(axes.transData.transform(number.get_position()))
        found[int(number.get_text())] = (*box.get_xy(), box.get_width(), box.get_height())
    return found


@settings(max_examples=25)
@given(
    st.sampled_from([(8, 1), (4, 2), (2, 4), (1, 8)]),
    st.permutations([None, "data", "model", ("data", "model"), ("model", "data")]),
    st.lists(st.integers(1, 3), min_size=1, max_size=2),
)
def test_shards_draws_each_device_once_inside_its_block(sizes, entries, counts):
    named = str(entries[: len(counts)])
    if named.count("data") > 1 or named.count("model") > 1:
        entries = [None, entries[0]]
    shape = tuple(8 * n for n in counts)
    sharding = NamedSharding(mesh.make(data=sizes[0], model=sizes[1]), P(*entries[: len(shape)]))
    (axes,) = figures.shards(jax.device_put(np.zeros(shape), sharding)).axes
    drawn = boxes(axes)
    assert sorted(drawn) == list(range(8))
    area = sum(width * height for *_, width, height in drawn.values())
    assert area == pytest.approx(np.prod(shape))  # and none outside, so none overlap
    for device, index in sharding.devices_indices_map(shape).items():
        left, top, width, height = drawn[device.id]
        ranges = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
        (first, last), (start, stop) = [(0, 1), *ranges][-2:]
        assert (top, top + height) == (first, last)
        assert start <= left and left + width <= stop + 1e-9


def test_shards_says_what_it_draws():
    x = jax.device_put(np.zeros((8, 4)), NamedSharding(mesh.make(data=4, model=2), P("data")))
    (axes,) = figures.shards(x).axes
    assert "'data'" in axes.get_title() and "(8, 4)" in axes.get_title()
    (axes,) = figures.shards(jax.device_put(np.zeros((2, 3)), mesh.devices()[5])).axes
    assert boxes(axes) == {5: (0, 0, 3, 2)}


@pytest.mark.parametrize("shape", [(), (2, 2, 2)])
def test_shards_says_what_it_cannot_draw(shape):
    with pytest.raises(ValueError, match=r"1 or 2 axes, not of shape \(.*\)"):
        figures.shards(jax.numpy.zeros(shape))


@pytest.mark.parametrize("sizes", [{"a": 8}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2}])
def test_mesh_picture_writes_each_device_at_its_place(sizes):
    grid = mesh.make(**sizes)
    drawing = figures.mesh_picture(grid, per_host=2)
    panels = grid.devices.reshape((1,) * (3 - len(sizes)) + grid.devices.shape)
    assert len(drawing.axes) == len(panels)
    for panel, axes in zip(panels, drawing.axes, strict=True):
        drawn = boxes(axes)
        for (row, column), device in np.ndenumerate(panel):
            left, top, width, height = drawn[device.id]
            assert column < left < left + width < column + 1
            assert row < top < top + height < row + 1
        notes = [text.get_text() for text in axes.texts if "host" in text.get_text()]
        assert notes == [f"host {device.id // 2}" for device in panel.flat]
        named = {axes.get_xlabel(), axes.get_ylabel(), axes.get_title().split(" = ")[0]}
        assert named - {""} == set(sizes)


@pytest.mark.parametrize("n", [2, 4])
def test_the_picture_of_collectives_shows_what_they_did(n):
    names = ["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
    drawing = figures.collective_picture(mesh.make(x=n), names)
    (axes,) = drawing.axes
    assert [t.get_text() for t in axes.texts if t.get_fontweight() == "bold"] == names
    said = [t.get_text() for t in axes.texts if "sends" in t.get_text()][:4]
    turns = [f"each sends {k * (n - 1)} blocks" for k in (1, 1, 2, 1)]
    assert said == [*turns[:3], turns[3] + " of its own"]
    # Blocks drawn: all those held, and n colours in each that is a sum.
    colours = collections.Counter(p.get_facecolor() for p in axes.patches if p.get_linewidth() == 0)
    held = (n + n * n) + (n * n + n * n) + (n * n + n * n * n) + 2 * n * n
    assert [colours[to_rgba(palette.device(d))] for d in range(n)] == [held // n + 1] * n


def test_bars_write_both_numbers_of_each_pair():
    drawing = figures.bars(["one", "two"], [1.0, 2000.0], [1.25, 2100.0], "MB")
    svg = drawing._repr_svg_()
    for text in ("one", "two", "1", "1.25", "2,000", "2,100", "MB", "predicted", "measured"):
        assert f"<!-- {text} -->" in svg, text
    widths = [bar.get_width() for bar in drawing.axes[0].patches]
    assert widths == [1.0, 2000.0, 1.25, 2100.0]


def test_curves_carry_their_names_apart():
    steps = [0, 1, 2]
    runs = {"ours": (steps, [3, 2, 1]), "theirs": (steps, [3, 2.5, 1.01])}
    drawing = figures.curves(runs, "step", "loss, nats", {"bigram": 1.02})
    (axes,) = drawing.axes
    for line, (x, y) in zip(axes.lines, runs.values(), strict=False):
        assert (list(line.get_xdata()), list(line.get_ydata())) == (x, y)
    assert axes.lines[2].get_ydata()[0] == 1.02
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 3
    svg = drawing._repr_svg_()
    for text in ("ours", "theirs", "bigram", "step", "loss, nats"):
        assert f"<!-- {text} -->" in svg, text
    extents = [text.get_window_extent() for text in axes.texts]
    assert not any(a.overlaps(b) for i, a in enumerate(extents) for b in extents[:i])


def test_no_two_curves_look_alike():
    (axes,) = figures.curves({f"{i}": ([0, 1], [i, i]) for i in range(9)}, "x", "y").axes
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 9


def test_drawings_are_transparent_reproducible_and_shown_once():
    one, two = (figures.curves({"a": ([0, 1], [1, 0])}, "x", "y") for _ in range(2))
    assert one._repr_svg_() == one._repr_svg_() == two._repr_svg_()
    assert to_rgba(one.get_facecolor())[3] == 0
    assert to_rgba(one.axes[0].get_facecolor())[3] == 0
    assert not matplotlib.pyplot.get_fignums()
    before = dict(matplotlib.rcParams)
    with figures.style():
        assert matplotlib.rcParams["axes.labelcolor"] == palette.GREY
    assert dict(matplotlib.rcParams) == before


def test_the_library_does_not_name_the_package_of_its_book():
    root = Path(shardwise.__file__).parent
    assert [str(path) for path in root.rglob("*.py") if "shardwise_book" in path.read_text()] == []


@pytest.mark.slow
def test_the_library_imports_without_its_book_and_matplotlib():
    program = """
import importlib, pkgutil, sys
sys.modules["matplotlib"] = sys.modules["shardwise_book"] = None
import shardwise
for module in pkgutil.walk_packages(shardwise.__path__, "shardwise."):
    importlib.import_module(module.name)
print(len(sys.modules))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


# Timelines


def tasks(drawing):
    found = [p for p in drawing.axes[0].patches if p.get_height() > 0.5 and p.get_alpha() is None]
    return [p for p in found if p.get_facecolor()[3] == 1]


@pytest.mark.parametrize("name", list(schedules.SCHEDULES))
def test_timelines_show_every_task_where_it_runs(name):
    run = schedules.timeline(schedules.spread(name, 2, 4), transfer=0.5)
    drawn = tasks(figures.schedule({name: run}))
    assert len(drawn) == len(run.start)
    for (task, start), box in zip(run.start.items(), sorted_like(run, drawn), strict=True):
        device = run.schedule.device_of[task.stage]
        assert (box.get_x(), int(box.get_y())) == (start, 1 + device)
        assert 0.8 * (run.end[task] - start) < box.get_width() <= run.end[task] - start


def sorted_like(run, drawn):
    """The boxes in the order of `run.start`; they are drawn device by device."""
    order = [task for tasks in run.schedule.tasks for task in tasks]
    return [drawn[order.index(task)] for task in run.start]


def test_numbers_stand_in_their_boxes():
    run = schedules.timeline(schedules.spread("1f1b", 2, 4))
    axes = figures.schedule({"": run}).axes[0]
    numbers = sorted((*t.get_position(), t.get_text()) for t in axes.texts if t.get_text())
    expected = sorted(
        ((start + run.end[task]) / 2, 1.53 + task.stage, str(task.microbatch))
        for task, start in run.start.items()
    )
    assert numbers == expected


def test_timelines_share_one_axis_and_name_kinds_that_occur():
    runs = {name: schedules.timeline(schedules.spread(name, 2, 4)) for name in ("gpipe", "zb_h1")}
    axes = figures.schedule(runs).axes[0]
    assert {text.get_text() for text in axes.texts} >= {"gpipe", "zb_h1", "0", "3"}
    kinds = [text.get_text()[0] for text in axes.get_legend().get_texts()]
    assert kinds == ["F", "B", "I", "W"]
    one = figures.schedule({"gpipe": runs["gpipe"]}).axes[0].get_legend().get_texts()
    assert [text.get_text() for text in one] == ["F forward", "B backward"]


def test_kinds_differ_in_grey_and_carry_readable_numbers():
    grey = sorted(palette.luminance(colour) for colour in pipelines.COLOURS.values())
    assert all(b - a > 0.08 for a, b in itertools.pairwise(grey))
    for colour in pipelines.COLOURS.values():
        assert palette.contrast(palette.ink(colour), colour) > 4.5
