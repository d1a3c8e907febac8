"""The explorer of pipelines: a schedule, its costs, and what each task waits for."""

import functools
from collections.abc import Mapping, Sequence
from html import escape

from shardwise import schedules
from shardwise_book.figures import palette
from shardwise_book.figures.interactive import Control, Interactive, explorer, said
from shardwise_book.figures.timelines import COLOURS, chunk, number

START = {"schedule": list(schedules.SCHEDULES).index("1f1b"), "devices": 1, "microbatches": 2}
START |= {"backward": 1, "task": 4}
LAYOUT = f"""<div class="key">{
    "".join(f'<span class="{kind}">{kind} {name}</span>' for kind, name in schedules.KINDS.items())
}</div><div id="@costs"></div><div class="timeline" role="img" aria-label="A
row for each device: its tasks over time, and below them what is live"><div id="@rows"></div><div
id="@axis" class="axis"></div></div><p id="@result" role="status" aria-live="polite"><span
id="@takes"></span> <span id="@live"></span><br><span id="@story"></span></p>"""
# A box is as wide as its kind takes ticks (--F and so on of --span), after a margin that it waits
# (--w); below it is what is live meanwhile (--l of at most --most), less what it adds (--more).
TIMELINE = f"""<style>
.shardwise-figure .key {{ display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; font-size: .88em;
  margin-top: .7rem; }}
.shardwise-figure .key span::before {{ content: ""; display: inline-block; width: .8em;
  height: .8em; margin-right: .35em; background: var(--kind); }}
.shardwise-figure .timeline {{ max-width: 40rem; margin: .9rem 0 .4rem; padding-left: 1.2rem; }}
.shardwise-figure .lane {{ display: flex; height: 1.6rem; margin-bottom: 1rem; position: relative;
  container-type: inline-size; background: color-mix(in srgb, currentColor 12%, transparent); }}
.shardwise-figure .lane b {{ position: absolute; right: calc(100% + .4rem); font-weight: normal;
  font-size: .8rem; }}
.shardwise-figure .lane i {{ --tick: 100cqw / var(--span); position: relative; flex: none;
  width: calc(var(--c) * var(--tick)); margin-left: calc(var(--w, 0) * var(--tick));
  display: grid; place-items: center; font: min(.75rem, calc(var(--c) * .6 * var(--tick)))
  system-ui, sans-serif; background: var(--kind); box-shadow: inset -1px 0 var(--gap, #fff8); }}
.shardwise-figure .lane i.second {{ text-decoration: underline 2px; text-underline-offset: 2px; }}
.shardwise-figure .lane i::before, .shardwise-figure .lane i::after {{ content: "";
  position: absolute; top: calc(100% + 1px); background: #888; }}
.shardwise-figure .lane i::before {{ right: 100%; width: calc(var(--w, 0) * var(--tick));
  height: calc(.75rem * (var(--l) - var(--more, 0)) / var(--most)); }}
.shardwise-figure .F {{ --more: 1; }}
.shardwise-figure .lane i::after {{ left: 0; width: 100%;
  height: calc(.75rem * var(--l) / var(--most)); }}
.shardwise-figure .axis {{ position: relative; height: 1.2rem; font-size: .8rem; }}
.shardwise-figure .axis span {{ position: absolute; transform: translateX(-50%); }}
{
    "".join(
        f".shardwise-figure .{kind} {{ --kind: {colour}; --c: var(--{kind}); }}"
        f".shardwise-figure .lane .{kind} {{ -webkit-text-fill-color: {palette.ink(colour)}; }}"
        for kind, colour in COLOURS.items()
    )
}
</style>"""


def pipeline_explorer(
    devices: Sequence[int] = (2, 4),
    microbatches: Sequence[int] = (2, 4, 8, 16),
    start: Mapping[str, int] | None = None,
) -> Interactive:
    """Choose a schedule, its size and costs; see when tasks run, wait for what, and what is live.

    Everything in `schedules.SCHEDULES` is on offer, each with as many stages on a device, up to
    two, as it takes; the stages of a device share its layers, so a device's work is the same. The
    costs: a forward of all its layers is 1. `start` has the number of the option shown first, for
    "schedule", "devices", "microbatches", "backward", "transfer", "device" or "task".
    """

    @functools.cache
    def spread(schedule, devices, microbatches):
        try:
            return schedules.spread(schedule, devices, microbatches)
        except ValueError as error:
            return str(error)

    @functools.cache
    def timed(schedule, devices, microbatches, backward=2, transfer=0):
        made = spread(schedule, devices, microbatches)
        return made if isinstance(made, str) else timeline(made, backward, transfer)

    def unless_refused(draw, drawn_of=timed):
        """What `draw` makes of the run, or of the schedule; nothing where the schedule refuses."""

        def drawn(*choice, **more):
            found = drawn_of(*choice)
            return "" if isinstance(found, str) else draw(found, **more)

        return drawn

    def takes(schedule, devices, microbatches, backward, transfer):
        found = timed(schedule, devices, microbatches, backward, transfer)
        if isinstance(found, str):
            return f'<span class="error">{escape(found)}</span>'
        bubble = f"{number(round(100 * found.bubble, 1))} %"
        return (
            f"Makespan {said('makespan', number(found.makespan))}, bubble {said('bubble', bubble)}."
        )

    def orders(schedule, devices, microbatches, device):
        made = spread(schedule, devices, microbatches)
        return range(1 if isinstance(made, str) else len(made.tasks[device]))

    costs, axis = unless_refused(_costs), unless_refused(_axis)
    live, rows = unless_refused(_live), unless_refused(_rows)
    story = unless_refused(_story, spread)
    parts = {
        "takes": takes,
        "live": lambda schedule, devices, microbatches: live(schedule, devices, microbatches),
        "rows": lambda schedule, devices, microbatches: rows(schedule, devices, microbatches),
        "costs": lambda schedule, devices, microbatches, backward, transfer: costs(
            schedule, devices, microbatches, backward, transfer
        ),
        "axis": lambda schedule, devices, microbatches, backward, transfer: axis(
            schedule, devices, microbatches, backward, transfer
        ),
        "story": lambda schedule, devices, microbatches, device, task: story(
            schedule, devices, microbatches, device=device, task=task
        ),
    }
    offered = {
        "schedule": ("Schedule", list(schedules.SCHEDULES)),
        "devices": ("Devices", devices),
        "microbatches": ("Microbatches", microbatches),
        "backward": ("Backward costs", (1, 2, 3)),
        "transfer": ("Transfer takes", (0, 0.5, 1)),
        "device": ("Device", lambda devices: range(devices)),
        "task": ("Task", orders),
    }
    shown = START | dict(start or {})
    controls = {
        name: Control(*one, shown.get(name, 0), "range" if name in ("device", "task") else "select")
        for name, one in offered.items()
    }
    return explorer(controls, LAYOUT, parts, style=TIMELINE)


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
    sizes = "".join(f"--{kind}:{number(ticks)};" for kind, ticks in span.items())
    waits = ""
    for order in run.schedule.tasks:
        free = 0
        for task in order:
            if run.start[task] > free:
                waits += f"{_box(_name(task))}{{--w:{number(run.start[task] - free)}}}"
            free = run.end[task]
    sizes += f"--span:{number(run.makespan)};--most:{max(run.peak_live)};"
    return f"<style>#@rows{{{sizes}{waits}}}</style>"


def _axis(run):
    return "".join(
        f'<span style="left:{100 * tick / run.makespan:.3g}%">{tick}</span>'
        for tick in range(0, int(run.makespan) + 1, max(1, int(run.makespan / 4)))
    )


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
    peaks = ", ".join(number(share * peak) for peak in run.peak_live)
    pending = ", ".join(number(share * peak) for peak in run.peak_weights_pending)
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
