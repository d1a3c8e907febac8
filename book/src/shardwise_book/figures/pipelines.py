"""The explorer of pipelines: a schedule, its costs, and what each task waits for."""

from shardwise import schedules
from shardwise_book.figures import palette, svg
from shardwise_book.figures.interactive import Control, Interactive, Refusal, explorer, said
from shardwise_book.figures.timelines import COLOURS, chunk

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
    share = made.devices / made.stages
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
