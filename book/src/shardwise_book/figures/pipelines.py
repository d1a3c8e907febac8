"""The explorer of pipelines: a schedule, its costs, and what each task waits for."""

import functools
from collections.abc import Mapping
from html import escape

from shardwise import schedules
from shardwise_book.figures import palette, svg
from shardwise_book.figures.interactive import Control, Interactive, explorer, said
from shardwise_book.figures.timelines import COLOURS, chunk

START = {"schedule": list(schedules.SCHEDULES).index("1f1b"), "devices": 1, "microbatches": 2}
START |= {"backward": 1, "task": 4}
STYLE = "".join(
    f".shardwise-figure .{kind} {{ --kind: {colour}; --ink: {palette.ink(colour)}; "
    f"--c: var(--{kind}); }}"
    for kind, colour in COLOURS.items()
)
KINDS = "".join(f'<span class="{k}">{k} {name}</span>' for k, name in schedules.KINDS.items())
LAYOUT = f"""<style>{STYLE}</style><div class="kinds">{KINDS}</div><div id="@costs"></div>
<div class="timeline" role="img" aria-label="A row for each device: its tasks over time, and below
them what is live"><div id="@rows"></div><div id="@axis" class="axis"></div></div>
<p id="@result" role="status" aria-live="polite"><span id="@takes"></span> <span id="@live"></span>
<br><span id="@story"></span></p>"""


def pipeline_explorer(start: Mapping[str, int] | None = None) -> Interactive:
    """Choose a schedule, its size and costs; see when tasks run, wait for what, and what is live.

    Everything in `schedules.SCHEDULES` is on offer, each with as many stages on a device, up to
    two, as it takes; the stages of a device share its layers, so a device's work is the same. The
    costs: a forward of all its layers is 1. `start` has the number of the option shown first, for
    "schedule", "devices", "microbatches", "backward", "transfer", "device" or "task".
    """

    spread = functools.cache(schedules.spread)

    @functools.cache
    def run(schedule, devices, microbatches, backward=2, transfer=0):
        return timeline(spread(schedule, devices, microbatches), backward, transfer)

    def orders(schedule, devices, microbatches, device):
        try:
            return range(len(spread(schedule, devices, microbatches).tasks[device]))
        except ValueError:
            return range(1)

    def takes(schedule, devices, microbatches, backward, transfer):
        try:
            found = run(schedule, devices, microbatches, backward, transfer)
        except ValueError as refusal:
            return f'<span class="error">{escape(str(refusal))}</span>'
        makespan, bubble = svg.short(found.makespan, 3), f"{svg.short(100 * found.bubble, 1)} %"
        return f"Makespan {said('makespan', makespan)}, bubble {said('bubble', bubble)}."

    def live(schedule, devices, microbatches):
        return _live(run(schedule, devices, microbatches))

    def rows(schedule, devices, microbatches):
        return _rows(run(schedule, devices, microbatches))

    def costs(schedule, devices, microbatches, backward, transfer):
        return _costs(run(schedule, devices, microbatches, backward, transfer))

    def axis(schedule, devices, microbatches, backward, transfer):
        return _axis(run(schedule, devices, microbatches, backward, transfer).makespan)

    def story(schedule, devices, microbatches, device, task):
        return _story(spread(schedule, devices, microbatches), device, task)

    drawn = {draw.__name__: _unless_refused(draw) for draw in (live, rows, costs, axis, story)}
    controls = {
        "schedule": Control("Schedule", list(schedules.SCHEDULES)),
        "devices": Control("Devices", (2, 4)),
        "microbatches": Control("Microbatches", (2, 4, 8)),
        "backward": Control("Backward costs", (1, 2, 3)),
        "transfer": Control("Transfer takes", (0, 0.5, 1)),
        "device": Control("Device", lambda devices: range(devices), "range"),
        "task": Control("Task", orders, "range"),
    }
    return explorer(controls, LAYOUT, {"takes": takes, **drawn}, START | dict(start or {}))


def _unless_refused(draw):
    """Draws nothing where the schedule refuses; the words say why."""

    @functools.wraps(draw)
    def drawn(**choice):
        try:
            return draw(**choice)
        except ValueError:
            return ""

    return drawn


def timeline(
    made: schedules.Schedule, backward: float = 2, transfer: float = 0
) -> schedules.Timeline:
    """When tasks run, where the forward of all of a device's layers takes 1."""
    share = made.devices / made.stages
    half = backward * share / 2
    costs = {"F": share, "B": backward * share, "I": half, "W": half}
    return schedules.timeline(made, costs, transfer)


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


def _axis(span):
    ticks = range(0, int(span) + 1, max(1, int(span / 4)))
    return "".join(f'<span style="left:{100 * t / span:.3g}%">{t}</span>' for t in ticks)


def _rows(run):
    """The tasks of each device in its order, whatever they cost, and what is live meanwhile."""
    drawn = ""
    for device, order in enumerate(run.schedule.tasks):
        live, boxes = 0, ""
        for place, task in enumerate(order):
            live += task.kind == "F"
            second = " second" * bool(chunk(run.schedule, task))
            boxes += (
                f'<i class="{task.kind}{second}" style="--l:{live}" title="{_name(task)}" '
                f'data-chooses="device={device} task={place}">{task.microbatch}</i>'
            )
            live -= task.kind in "BW"
        drawn += f'<div class="lane"><b>{device}</b>{boxes}</div>'
    return drawn


def _live(run):
    share = run.schedule.devices / run.schedule.stages
    peaks = ", ".join(svg.short(share * peak, 3) for peak in run.peak_live)
    pending = ", ".join(svg.short(share * peak, 3) for peak in run.peak_weights_pending)
    return (
        f"At most live, in microbatches through all layers of a device: {said('peaks', peaks)}; "
        f"waiting for W: {said('pending', pending)}."
    )


def _story(made, device, task):
    """What one task waits for, in words, and outlined."""
    chosen, *needs = map(
        _name, (made.tasks[device][task], *made.dependencies(made.tasks[device][task]))
    )
    dashed = ",".join(map(_box, needs)) or "b"
    return (
        f"<b>{chosen}</b> needs {' and '.join(needs) or 'nothing'}.<style>#@rows{{{_box(chosen)}"
        f"{{outline:3px solid;z-index:1}}{dashed}{{outline:2px dashed;z-index:1}}}}</style>"
    )


def _box(name):
    return f'[title="{name}"]'


def _name(task):
    return f"{task.kind} of stage {task.stage}, microbatch {task.microbatch}"
