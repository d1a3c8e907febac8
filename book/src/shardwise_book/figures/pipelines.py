"""The interactive pipeline: a schedule, its costs, and what each task waits for."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from shardwise import schedules
from shardwise_book.figures import pipeline_drawing as drawing
from shardwise_book.figures.interactive import (
    STYLE,
    Choice,
    Data,
    Interactive,
    controls,
    select,
    slider,
    status,
)
from shardwise_book.figures.timelines import COLOURS, chunk

WIDE = """<style>
.shardwise-figure svg.timeline { max-width: 40rem;
  cursor: pointer; touch-action: manipulation; }
.shardwise-figure .key { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; font-size: .88em; }
.shardwise-figure .key span::before { content: ""; display: inline-block; width: .8em;
  height: .8em; margin-right: .35em; background: var(--kind); }
</style>"""


def pipeline_explorer(
    devices: Sequence[int] = (2, 4, 8),
    microbatches: Sequence[int] = (2, 4, 8, 16),
    start: Mapping[str, Any] | None = None,
) -> Interactive:
    """Choose a schedule, its size and costs; see when tasks run, wait for what, and what is live.

    Everything in `schedules.SCHEDULES` is on offer, each with as many stages on a device, up to
    two, as it takes; the stages of a device share its layers, so a device's work is the same. The
    costs: a forward of all its layers is 1. `start` changes what is chosen at first, by the keys
    of `START`.

    Raises:
      ValueError: more than 36 microbatches, or a start that is not on offer.
    """
    data = table(devices, microbatches, start)
    choice = data["start"]
    still = _controls(data) + _picture(data, choice) + status(describe(data, choice))
    return Interactive("pipelines.js", data, STYLE + WIDE + still)


DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
START = {
    "schedule": "1f1b",
    "devices": 4,
    "microbatches": 8,
    "backward": 2,
    "transfer": 0,
    "device": 0,
    "task": 4,
}


def table(
    devices: Sequence[int], microbatches: Sequence[int], start: Mapping[str, Any] | None = None
) -> Data:
    """Everything on offer; the orders as text, two characters a task, for pipelines.js."""
    offered = {
        "schedule": list(schedules.SCHEDULES),
        "devices": list(devices),
        "microbatches": list(microbatches),
        "backward": [1, 1.5, 2, 3],
        "transfer": [0, 0.25, 0.5, 1],
    }
    if max(microbatches) > len(DIGITS):
        raise ValueError(
            f"pipeline_explorer: {max(microbatches)} microbatches; it numbers {len(DIGITS)}, and "
            f"boxes of more would be too narrow to see."
        )
    chosen = START | (start or {})
    for key, values in offered.items():
        if chosen[key] not in values:
            raise ValueError(
                f"pipeline_explorer: start has {key} {chosen[key]!r}; on offer are {values}."
            )
    orders = [
        [[_order(name, p, m) for m in microbatches] for p in devices]
        for name in offered["schedule"]
    ]
    return {
        "offered": offered,
        "orders": orders,
        "colours": COLOURS,
        "inks": drawing.INKS,
        "sizes": [drawing.LEFT, drawing.WIDTH, drawing.ROW, drawing.TOP, drawing.HIGH],
        "kinds": schedules.KINDS,
        "start": {
            key: offered[key].index(value) if key in offered else value
            for key, value in chosen.items()
        },
    }


def _order(name, devices, microbatches):
    """`[device of each stage, one string for each device]`, or the error as text."""
    try:
        made = schedules.spread(name, devices, microbatches)
    except ValueError as error:
        return str(error)
    letters = [
        "".join(_letter(made, task) + DIGITS[task.microbatch] for task in order)
        for order in made.tasks
    ]
    return [list(made.device_of), letters]


def _letter(made, task):
    return task.kind.lower() if chunk(made, task) else task.kind


def look(data: Data, choice: Choice) -> schedules.Timeline | str:
    """The timeline of a choice, by `schedules` itself; the error as text if there is none."""
    name, devices, microbatches, backward, transfer = (
        values[choice[key]] for key, values in data["offered"].items()
    )
    try:
        made = schedules.spread(name, devices, microbatches)
    except ValueError as error:
        return str(error)
    share = devices / made.stages
    costs = {
        "F": share,
        "B": backward * share,
        "I": backward * share / 2,
        "W": backward * share / 2,
    }
    return schedules.timeline(made, costs, transfer)


def describe(data: Data, choice: Choice) -> str:
    """The result in words, or why there is none."""
    run = look(data, choice)
    if isinstance(run, str):
        return f'<span class="error">{escape(run)}</span>'
    return drawing.describe(run, picked(run, choice))


def picture(data: Data, choice: Choice) -> str:
    """The timeline as the inside of an SVG; empty if there is none."""
    run = look(data, choice)
    return "" if isinstance(run, str) else drawing.picture(run, picked(run, choice))


def picked(run: schedules.Timeline, choice: Choice) -> schedules.Task:
    """The task that a choice points at; a shorter order's last task where it has no such one."""
    order = run.schedule.tasks[min(choice["device"], run.schedule.devices - 1)]
    return order[min(choice["task"], len(order) - 1)]


def _picture(data, choice):
    devices = data["offered"]["devices"][choice["devices"]]
    left, width, row, top, _ = data["sizes"]
    return (
        f'<div class="key">{"".join(_key(data, kind) for kind in data["kinds"])}</div>'
        f'<div class="pictures"><svg id="@timeline" class="timeline" viewBox="0 0 '
        f'{left + width + 18} {top + row * devices + 20}" role="img" aria-label="A row for each '
        f'device: its tasks over time, and below them what is live">'
        f"{picture(data, choice)}</svg></div>"
    )


def _key(data, kind):
    return f'<span style="--kind:{data["colours"][kind]}">{kind} {data["kinds"][kind]}</span>'


def _controls(data):
    names = {
        "schedule": "Schedule",
        "devices": "Devices",
        "microbatches": "Microbatches",
        "backward": "Backward costs",
        "transfer": "Transfer takes",
    }
    start, run = data["start"], look(data, data["start"])
    made = "".join(
        select(key, label, [str(value) for value in data["offered"][key]], start[key])
        for key, label in names.items()
    )
    orders = [[None]] if isinstance(run, str) else run.schedule.tasks
    order = orders[min(start["device"], len(orders) - 1)]
    last = {"device": len(orders) - 1, "task": len(order) - 1}
    sliders = "".join(
        slider(key, label, last[key], start[key])
        for key, label in (("device", "Device"), ("task", "Task"))
    )
    return controls(made + sliders, "choice")
