"""The interactive figure that steps through sharded training: what is where, layer by layer."""

from collections.abc import Mapping
from html import escape

from shardwise_book.figures import palette
from shardwise_book.figures.interactive import (
    STYLE,
    Choice,
    Data,
    Interactive,
    controls,
    select,
    status,
    steps,
)
from shardwise_book.figures.zero import training_step

ZEROS = ["0, data parallelism", "1, optimizer state cut", "2, gradients too", "3, FSDP"]
PASSES = ["gather layers again", "keep them gathered"]

_LEFT, _TOP, _ROW, _PART = 52, 40, 30, 6  # of the grid of layers, in units of the picture
_KINDS = ("P", "G", "M")


def fsdp_stepper(
    layers: Mapping[str, int], devices: int = 4, zero: int = 3, step: int = 7
) -> Interactive:
    """Choose ZeRO's number and step through forward, backward and update on `devices` devices.

    `layers` maps the name of each layer to the bytes of its parameters, a multiple of `devices`.
    The figure first shows `zero`, after event `step`.

    Raises:
      ValueError: what `training_step` raises.
    """
    data = table(layers, devices)
    start = {"zero": zero, "passes": 0, "step": step}
    still = _controls(data, start) + _pictures(data, start) + status(describe(data, start))
    return Interactive("stepping.js", data | {"start": start}, STYLE + still)


def table(layers: Mapping[str, int], devices: int = 4) -> Data:
    """Everything on offer, as plain numbers and short words; stepping.js reads the same."""
    sizes = [*layers.values()]
    runs = [
        [training_step(sizes, devices, zero, again) for again in (True, False)]
        for zero in range(len(ZEROS))
    ]
    return {
        "layers": [*layers],
        "devices": devices,
        "psi": sum(sizes),
        "colours": palette.DEVICES,
        "zeros": ZEROS,
        "most": max(frame.held for pair in runs for run in pair for frame in run),
        "runs": [[_run(frames) for frames in pair] for pair in runs],
    }


def look(data: Data, choice: Choice) -> Data:
    """The chosen frame, the peak of its run, and all bytes that are sent; as in stepping.js."""
    run = data["runs"][choice["zero"]][choice["passes"]]
    frame = run[choice["step"]]
    held = [sum(one["bytes"]) for one in run]
    return {
        "frame": frame,
        "last": len(run) - 1,
        "held": held,
        "peak": held.index(max(held)),
        "all": run[-1]["sent"],
    }


def describe(data: Data, choice: Choice) -> str:
    """The frame in words, as stepping.js writes them too; numbers carry names."""
    answer = look(data, choice)
    frame, n = answer["frame"], data["devices"]
    shards, gathered, gradients, moments = frame["bytes"]
    passes = answer["all"] * n // (data["psi"] * (n - 1))
    return (
        f'ZeRO {data["zeros"][choice["zero"]]}. Event <b data-name="step">{choice["step"]}</b> '
        f'of {answer["last"]}: <b data-name="event">{event(data, frame)}</b>. Each device holds '
        f'<b data-name="held">{answer["held"][choice["step"]]:,}</b> bytes: {shards:,} of '
        f"parameters, {gathered:,} gathered, {gradients:,} of gradients, {moments:,} of moments. "
        f'The peak is <b data-name="peak">{answer["held"][answer["peak"]]:,}</b>, at event '
        f'{answer["peak"]}. It has sent <b data-name="sent">{frame["sent"]:,}</b> of '
        f'<b data-name="all">{answer["all"]:,}</b> bytes, {passes}Ψ(n − 1)/n for Ψ = '
        f"{data['psi']:,} and n = {n}."
    )


def event(data: Data, frame: Data) -> str:
    """The event and its layers in words."""
    names = [data["layers"][i] for i in frame["layers"]]
    if not names:
        return frame["event"]
    return f"{frame['event']}, {'all layers' if len(names) > 1 else escape(names[0])}"


def grid_picture(data: Data, choice: Choice) -> str:
    """A column for each device, a row for each layer; in a cell the n parts, filled where held."""
    frame, n = look(data, choice)["frame"], data["devices"]
    zero, parts = choice["zero"], []
    for i, name in enumerate(data["layers"]):
        y = _TOP + i * _ROW + 16
        weight = "bold" if i in frame["layers"] else "normal"
        parts.append(f'<text x="0" y="{y}" font-weight="{weight}">{escape(name)}</text>')
    for device in range(n):
        x = _column(n, device)
        middle = x + 9 * n + 4
        parts.append(f'<text x="{middle}" y="14" text-anchor="middle">device {device}</text>')
        for k, kind in enumerate(_KINDS):
            left = x + k * (_cell(n) + 4)
            centre = left + 3 * n
            parts.append(f'<text x="{centre}" y="32" text-anchor="middle">{kind}</text>')
            for i in range(len(data["layers"])):
                fills = _fills(frame, zero, kind, i, device, n)
                moving = i in frame["layers"] and kind in _moving(frame)
                place = left, _TOP + i * _ROW
                parts.append(_strip(data["colours"], place, fills, moving))
    return "".join(parts)


def course_picture(data: Data, choice: Choice) -> str:
    """A bar for each event, as high as what is held after it, on one scale for all of ZeRO."""
    answer = look(data, choice)
    held, peak = answer["held"], answer["peak"]
    width = 400 // len(held)
    parts = ['<path d="M2 30H402" stroke="currentColor" stroke-dasharray="1 4"></path>']
    if choice["zero"]:
        parts.append('<text x="2" y="24">peak of data parallelism</text>')
    for k, size in enumerate(held):
        high = 70 * size // data["most"]
        fill = "currentColor" if k == choice["step"] else "none"
        parts.append(
            f'<rect class="held" x="{2 + k * width}" y="{100 - high}" width="{width - 2}" '
            f'height="{high}" fill="{fill}" stroke="currentColor"></rect>'
        )
    ends = peak > len(held) // 2  # so that the label stays within the picture
    high = 70 * held[peak] // data["most"]
    x, anchor = (peak * width + width, "end") if ends else (2 + peak * width, "start")
    parts.append(
        f'<text x="{x}" y="{94 - high}" text-anchor="{anchor}">peak, {held[peak]:,} bytes</text>'
    )
    return "".join(parts)


def _fills(frame, zero, kind, layer, device, n):
    """How each of the n parts is drawn: 0 not held, 1 held, 2 the device's own unsummed part."""
    own = [int(part == device) for part in range(n)]
    if kind == "P":
        return [1] * n if zero == 0 or frame["gathered"][layer] else own
    if kind == "M":
        return [1] * n if zero == 0 else own
    return {"": [0] * n, "partial": [2] * n, "whole": [1] * n, "shard": own}[
        frame["gradients"][layer]
    ]


def _moving(frame):
    """The kinds that an event changes, whose cells are framed in bold."""
    if frame["event"] == "update":
        return "PM"
    if frame["event"].endswith("all-gather") or frame["event"].startswith("forward"):
        return "P"
    return "G"


def _strip(colours, place, fills, moving):
    x, y = place
    width, parts = _PART * len(fills), []
    for part, fill in enumerate(fills):
        if fill:
            faint = ' fill-opacity=".4"' if fill == 2 else ""
            parts.append(
                f'<rect x="{x + part * _PART}" y="{y}" width="{_PART}" height="22" '
                f'fill="{colours[part]}"{faint}></rect>'
            )
    edge = 'stroke-width="2.5"' if moving else 'stroke-opacity=".45"'
    return "".join(parts) + (
        f'<rect class="cell" x="{x}" y="{y}" width="{width}" height="22" fill="none" '
        f'stroke="currentColor" {edge}></rect>'
    )


def _cell(n):
    return _PART * n


def _column(n, device):
    return _LEFT + device * (3 * _cell(n) + 8 + 12)


def _run(frames):
    return [
        {
            "event": f.event,
            "layers": f.layers,
            "gathered": [int(whole) for whole in f.gathered],
            "gradients": f.gradients,
            "bytes": [f.parameter_bytes, f.gathered_bytes, f.gradient_bytes, f.moment_bytes],
            "sent": f.sent,
        }
        for f in frames
    ]


def _pictures(data, choice):
    n, rows = data["devices"], len(data["layers"])
    wide, high = _column(n, n) - 8, _TOP + rows * _ROW
    style = f'style="max-width: 34rem; min-width: {wide * 11 // 13}px; font-size: 13px"'
    return (
        '<p class="hint" style="margin-top: .7rem">P parameters, G gradients, M moments, each cut '
        "into a shard for every device and filled where this device holds it. Pale gradients are "
        "the device's own, not yet summed. Bold frames are what the event is about. Below, a bar "
        "for every event: the bytes then held.</p>"
        f'<div class="pictures"><svg id="@grid" viewBox="0 0 {wide} {high}" {style} role="img" '
        f'aria-label="What each device holds of each layer">{grid_picture(data, choice)}</svg>'
        f'<svg id="@course" viewBox="0 0 404 102" {style} role="img" '
        f'aria-label="Bytes held after each event">{course_picture(data, choice)}</svg></div>'
    )


def _controls(data, start):
    made = select("zero", "ZeRO", data["zeros"], start["zero"])
    made += select("passes", "Backward pass, with ZeRO 3", PASSES, start["passes"])
    made += steps("Event", look(data, start)["last"], start["step"])
    return controls(made, "event")
