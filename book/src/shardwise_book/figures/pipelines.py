"""Pipelines over time: what each device does when, what is live on it, and the explorer of both."""

from collections.abc import Mapping

from matplotlib.patches import Rectangle

from shardwise import schedules
from shardwise_book.figures import palette, svg
from shardwise_book.figures.interactive import Control, Interactive, Refusal, explorer, said
from shardwise_book.figures.plots import Drawing, canvas, legend, tile, words

WAITS = {"color": palette.GREY, "alpha": 0.18, "linewidth": 0}

# Forwards darkest, backwards to the weights lightest, so that they differ in grey too.
COLOURS = {
    "F": palette.DEVICES[1],
    "B": palette.DEVICES[4],
    "I": palette.DEVICES[5],
    "W": palette.DEVICES[7],
}
START = {"schedule": list(schedules.SCHEDULES).index("1f1b"), "devices": 1, "microbatches": 2}
START |= {"backward": 1, "task": 4}
STYLE = "".join(
    f".shardwise-figure .{kind} {{ --kind: {colour}; --ink: {palette.ink(colour)}; "
    f"--c: var(--{kind}); }}"
    for kind, colour in COLOURS.items()
)
KINDS = "".join(f'<span class="{k}">{k} {name}</span>' for k, name in schedules.table.KINDS.items())
LAYOUT = f"""<style>{STYLE}</style><div class="kinds">{KINDS}</div><div id="@costs"></div>
<div class="timeline" role="img" aria-label="A row for each device: its tasks over time, and below
them what is live"><div id="@rows"></div><div id="@axis" class="axis"></div></div>
<p role="status" aria-live="polite"><span id="@result"></span> <span id="@live"></span>
<br><span id="@story"></span></p>"""


def schedule(runs: Mapping[str, schedules.Timeline], width: float = 5.2) -> Drawing:
    """Timelines under their titles, {title: `schedules.Timeline`}, on one axis of time.

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


def pipeline_explorer() -> Interactive:
    """Choose a schedule, its size and costs; see when tasks run, wait for what, and what is live.

    Everything in `schedules.SCHEDULES` is on offer, each with as many stages on a device, up to
    two, as it takes; the stages of a device share its layers, so a device's work is the same. The
    costs: a forward of all its layers is 1.
    """

    def tried(make, *given):
        try:
            return make(*given)
        except ValueError as error:
            return Refusal(error)

    made = {
        "order": lambda schedule, devices, microbatches: tried(
            schedules.spread, schedule, devices, microbatches
        ),
        "run": lambda order, backward, transfer: tried(timeline, order, backward, transfer),
        "plain": lambda order: tried(timeline, order),
    }
    controls = {
        "schedule": Control("Schedule", list(schedules.SCHEDULES)),
        "devices": Control("Devices", (2, 4)),
        "microbatches": Control("Microbatches", (2, 4, 8)),
        "backward": Control("Backward costs", (1, 2, 3)),
        "transfer": Control("Transfer takes", (0, 0.5, 1)),
        "device": Control("Device", lambda devices: range(devices), "range"),
        "task": Control("Task", lambda order, device: range(len(order.tasks[device])), "range"),
    }
    parts = _result, _live, _story, _costs, _rows, _axis
    return explorer(controls, LAYOUT, *parts, start=START, **made)


def timeline(
    made: schedules.Schedule, backward: float = 2, transfer: float = 0
) -> schedules.Timeline:
    """When tasks run, where the forward of all of a device's layers takes 1."""
    share = made.devices / made.stages  # of a device's layers, in a stage
    half = backward * share / 2
    costs = {"F": share, "B": backward * share, "I": half, "W": half}
    return schedules.timeline(made, costs, transfer)


def _result(run):
    makespan, bubble = svg.short(run.makespan, 3), f"{svg.short(100 * run.bubble, 1)} %"
    return f"Makespan {said('makespan', makespan)}, bubble {said('bubble', bubble)}."


def _costs(run):
    """What each kind takes, and each task waits, in ticks."""
    span = {task.kind: run.end[task] - run.start[task] for task in run.start}
    sizes = "".join(f"--{kind}:{svg.short(ticks, 3)};" for kind, ticks in span.items())
    waits = ""
    for order in run.schedule.tasks:
        free = 0
        for task in order:
            if run.start[task] > free:
                waits += f"{_box(_name(task))}{{--w:{svg.short(run.start[task] - free, 3)}}}"
            free = run.end[task]
    sizes += f"--span:{svg.short(run.makespan, 3)};--most:{max(run.peak_live)};"
    return f"<style>#@rows{{{sizes}{waits}}}</style>"


def _axis(run):
    for tick in range(0, int(run.makespan) + 1, max(1, int(run.makespan / 4))):
        yield f'<span style="left:{100 * tick / run.makespan:.3g}%">{tick}</span>'


def _rows(plain):
    """The tasks of each device in its order, whatever they cost, and what is live meanwhile."""
    for device, order in enumerate(plain.schedule.tasks):
        live, boxes = 0, ""
        for place, task in enumerate(order):
            live += task.kind == "F"
            second = " second" * bool(chunk(plain.schedule, task))
            boxes += (
                f'<i class="{task.kind}{second}" style="--l:{live}" title="{_name(task)}" '
                f'data-chooses="device={device} task={place}">{task.microbatch}</i>'
            )
            live -= task.kind in "BW"
        yield f'<div class="lane"><b>{device}</b>{boxes}</div>'


def _live(plain):
    share = plain.schedule.devices / plain.schedule.stages
    peaks = ", ".join(svg.short(share * peak, 3) for peak in plain.peak_live)
    pending = ", ".join(svg.short(share * peak, 3) for peak in plain.peak_weights_pending)
    return (
        f"At most live, in microbatches through all layers of a device: {said('peaks', peaks)}; "
        f"waiting for W: {said('pending', pending)}."
    )


def _story(order, device, task):
    """What one task waits for, in words, and outlined."""
    one = order.tasks[device][task]
    chosen, *needs = map(_name, (one, *order.dependencies(one)))
    dashed = ",".join(map(_box, needs)) or "b"
    return (
        f"<b>{chosen}</b> needs {' and '.join(needs) or 'nothing'}.<style>#@rows{{{_box(chosen)}"
        f"{{outline:3px solid;z-index:1}}{dashed}{{outline:2px dashed;z-index:1}}}}</style>"
    )


def _box(name):
    return f'[title="{name}"]'


def _name(task):
    return f"{task.kind} of stage {task.stage}, microbatch {task.microbatch}"
