"""The explorer of pipelines: a schedule, its costs, and what each task waits for."""

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
KINDS = "".join(f'<span class="{k}">{k} {name}</span>' for k, name in schedules.table.KINDS.items())
LAYOUT = f"""<style>{STYLE}</style><div class="kinds">{KINDS}</div><div id="@costs"></div>
<div class="timeline" role="img" aria-label="A row for each device: its tasks over time, and below
them what is live"><div id="@rows"></div><div id="@axis" class="axis"></div></div>
<p id="@result" role="status" aria-live="polite"><span id="@takes"></span> <span id="@live"></span>
<br><span id="@story"></span></p>"""


def pipeline_explorer() -> Interactive:
    """Choose a schedule, its size and costs; see when tasks run, wait for what, and what is live.

    Everything in `schedules.SCHEDULES` is on offer, each with as many stages on a device, up to
    two, as it takes; the stages of a device share its layers, so a device's work is the same. The
    costs: a forward of all its layers is 1.
    """

    def order(schedule, devices, microbatches):
        return _or_why(schedules.spread, schedule, devices, microbatches)

    def run(order, backward, transfer):
        return order if isinstance(order, str) else _or_why(timeline, order, backward, transfer)

    def orders(order, device):
        return range(1 if isinstance(order, str) else len(order.tasks[device]))

    def takes(run):
        if isinstance(run, str):
            return f'<span class="error">{escape(run)}</span>'
        makespan, bubble = svg.short(run.makespan, 3), f"{svg.short(100 * run.bubble, 1)} %"
        return f"Makespan {said('makespan', makespan)}, bubble {said('bubble', bubble)}."

    # Where a schedule refuses nothing is drawn; the words say why.
    parts = {
        "plain": lambda order: run(order, 2, 0),
        "live": lambda plain: "" if isinstance(plain, str) else _live(plain),
        "rows": lambda plain: "" if isinstance(plain, str) else _rows(plain),
        "costs": lambda run: "" if isinstance(run, str) else _costs(run),
        "axis": lambda run: "" if isinstance(run, str) else _axis(run.makespan),
        "story": lambda order, device, task: (
            "" if isinstance(order, str) else _story(order, device, task)
        ),
    }
    controls = {
        "schedule": Control("Schedule", list(schedules.SCHEDULES)),
        "devices": Control("Devices", (2, 4)),
        "microbatches": Control("Microbatches", (2, 4, 8)),
        "backward": Control("Backward costs", (1, 2, 3)),
        "transfer": Control("Transfer takes", (0, 0.5, 1)),
        "device": Control("Device", lambda devices: range(devices), "range"),
        "task": Control("Task", orders, "range"),
    }
    return explorer(controls, LAYOUT, order, run, takes, start=START, **parts)


def _or_why(make, *given):
    """What is made, or in words why not."""
    try:
        return make(*given)
    except ValueError as refusal:
        return str(refusal)


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
