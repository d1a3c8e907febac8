"""What the pipeline explorer says and shows of one choice, as pipelines.js does too."""

import math

from shardwise.schedules import Task, Timeline
from shardwise_book.figures import palette
from shardwise_book.figures.timelines import COLOURS, chunk, number

# Of the picture, in its own units; a row is a box of 26, and below it what is live, up to HIGH.
LEFT, WIDTH, ROW, TOP, HIGH = 24, 430, 44, 4, 12
INKS = {kind: palette.ink(colour) for kind, colour in COLOURS.items()}


def describe(run: Timeline, task: Task) -> str:
    """The result, and what one task waits for, in words; numbers carry names."""
    share = run.schedule.devices / run.schedule.stages
    peaks = ", ".join(number(share * peak) for peak in run.peak_live)
    pending = ", ".join(number(share * peak) for peak in run.peak_weights_pending)
    return (
        f'Makespan <b data-name="makespan">{number(run.makespan)}</b>, bubble '
        f'<b data-name="bubble">{number(_rounded(100 * run.bubble, 10))} %</b>. At most '
        f'live, in microbatches through all layers of a device: <b data-name="peaks">{peaks}</b>; '
        f'waiting for W: <b data-name="pending">{pending}</b>.<br>'
        f"{_story(run, task)}"
    )


def _story(run, task):
    """What one task waits for."""
    device = run.schedule.device_of[task.stage]
    free = _free(run, task)
    told = f"<b>{_name(task)}</b> on device {device} runs from {number(run.start[task])} to "
    told += f"{number(run.end[task])}. It needs "
    needs = [
        f"{_name(need)}, done at {number(run.end[need])} on device "
        f"{run.schedule.device_of[need.stage]}"
        for need in run.schedule.dependencies(task)
    ]
    told += (" and ".join(needs) or "nothing") + f"; the device is free from {number(free)}"
    wait = run.start[task] - free
    return told + (f" and waits {number(wait)}." if wait else ".")


def _free(run, task):
    order = run.schedule.tasks[run.schedule.device_of[task.stage]]
    before = order.index(task) - 1
    return run.end[order[before]] if before >= 0 else 0


def _name(task):
    return f"{task.kind} of stage {task.stage}, microbatch {task.microbatch}"


def picture(run: Timeline, chosen: Task) -> str:
    """The timeline as the inside of an SVG, with what the chosen task needs outlined."""
    scale, made = WIDTH / run.makespan, run.schedule
    parts = []
    for device, order in enumerate(made.tasks):
        y = TOP + ROW * device
        parts.append(f'<text x="{LEFT - 8}" y="{y + 18}" text-anchor="end">{device}</text>')
        parts.append(_rect(LEFT, y, WIDTH, 26, 'class="waits" fill="currentColor" opacity=".12"'))
        for position, task in enumerate(order):
            x, wide = LEFT + scale * run.start[task], scale * (run.end[task] - run.start[task])
            at = f'data-device="{device}" data-task="{position}" fill="{COLOURS[task.kind]}"'
            parts.append(_rect(x, y, wide - min(1, wide / 6), 26, at))
            ink = f'fill="{INKS[task.kind]}" pointer-events="none"'
            if wide >= 8 * len(str(task.microbatch)) + 2:
                parts.append(
                    f'<text x="{_point(x + wide / 2)}" y="{y + 17}" text-anchor="middle" {ink}>'
                    f"{task.microbatch}</text>"
                )
            if chunk(made, task):
                parts.append(_rect(x + wide / 8, y + 21, 3 * wide / 4, 2, ink))
        parts.append(_area(run, device, scale))
    return "".join(parts) + _waits(run, chosen, scale) + _axis(run)


def _area(run, device, scale):
    """What is live on a device, as an area under its row; the highest of any device fills it."""
    foot, most = TOP + ROW * device + 26 + HIGH, max(run.peak_live)
    steps = "".join(
        f"H{_point(LEFT + scale * time)}V{_point(foot - HIGH * count / most)}"
        for time, count in run.live[device]
    )
    path = f'd="M{LEFT} {foot}{steps}Z" fill="currentColor" opacity=".45"'
    return f'<path class="live" {path}></path>'


def _waits(run, chosen, scale):
    """The chosen task outlined, and what it needs; a line from where another device sends it."""
    made, parts = run.schedule, []

    def row(task):
        return TOP + ROW * made.device_of[task.stage]

    def outline(task, dashes):
        x, wide = LEFT + scale * run.start[task], scale * (run.end[task] - run.start[task])
        more = f'fill="none" stroke="currentColor" stroke-width="2.5"{dashes} pointer-events="none"'
        return _rect(x, row(task), wide, 26, more)

    for need in made.dependencies(chosen):
        parts.append(outline(need, ' stroke-dasharray="4 2"'))
        if row(need) == row(chosen):
            continue  # a line along the row would hide the numbers in between
        parts.append(
            f'<line x1="{_point(LEFT + scale * run.end[need])}" y1="{row(need) + 13}" '
            f'x2="{_point(LEFT + scale * run.start[chosen])}" y2="{row(chosen) + 13}" '
            f'stroke="currentColor" stroke-width="2" pointer-events="none"></line>'
        )
    return "".join(parts) + outline(chosen, "")


def _axis(run):
    y, scale = TOP + ROW * run.schedule.devices + 14, WIDTH / run.makespan
    step = max(1, math.floor(run.makespan / 4))
    marks = (
        f'<text x="{_point(LEFT + scale * tick)}" y="{y}" text-anchor="middle">{tick}</text>'
        for tick in range(0, math.floor(run.makespan) + 1, step)
    )
    return "".join(marks)


def _rounded(value, parts):
    """Halves upwards, in both languages."""
    return math.floor(value * parts + 0.5) / parts


def _point(value):
    return f"{_rounded(value, 100):.2f}".rstrip("0").rstrip(".")


def _rect(x, y, width, height, more):
    box = f'x="{_point(x)}" y="{y}" width="{_point(width)}" height="{height}"'
    return f"<rect {box} {more}></rect>"
