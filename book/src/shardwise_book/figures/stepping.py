"""The figure that steps through sharded training: what is where, layer by layer."""

import functools
from collections.abc import Mapping, Sequence

from shardwise_book.figures import palette
from shardwise_book.figures.interactive import (
    EDGE,
    RESULT,
    Control,
    Interactive,
    box,
    explorer,
    said,
    svg,
    text,
)
from shardwise_book.figures.zero import Frame, training_step

ZEROS = ["0, data parallelism", "1, optimizer state cut", "2, gradients too", "3, FSDP"]
PASSES = {"gather layers again": True, "keep them gathered": False}
_KEY = """<p style="margin-top: .7rem; font-size: .88em">P parameters, G gradients, M moments, each
cut into a shard for every device and filled where this device holds it. Pale gradients are the
device's own, not yet summed. Bold frames are what the event is about. Below, a bar for every event:
the bytes then held.</p>"""
_LEFT, _TOP, _ROW, _PART = 52, 40, 30, 6  # of the grid of layers, in units of the picture


def fsdp_stepper(
    layers: Mapping[str, int], devices: int = 4, zero: int = 3, step: int = 7
) -> Interactive:
    """Choose ZeRO's number and step through forward, backward and update on `devices` devices.

    `layers` maps the name of each layer to the bytes of its parameters, a multiple of `devices`.
    The figure first shows `zero`, after event `step`.

    Raises:
      ValueError: what `training_step` raises.
    """
    sizes, names = [*layers.values()], [*layers]
    run = functools.cache(lambda zero, again: training_step(sizes, devices, zero, again))
    most = max(frame.held for number in range(4) for frame in run(number, True))
    most = max(most, *(frame.held for frame in run(3, False)))

    def result(zero, again, step):
        return describe(run(zero, again), step, names, sum(sizes), devices, zero)

    def grid(zero, again, step):
        return _grid(run(zero, again)[step], names, devices, zero)

    def course(zero, again, step):
        return _course([frame.held for frame in run(zero, again)], step, most, zero)

    controls = {
        "zero": Control("ZeRO", {name: i for i, name in enumerate(ZEROS)}, zero),
        "again": Control("Backward pass, with ZeRO 3", PASSES),
        "step": Control("Event", lambda zero, again: range(len(run(zero, again))), step, "steps"),
    }
    wide, high = _column(devices, devices) - 8, _TOP + len(layers) * _ROW
    scrolls = f'<div style="min-width: {wide * 11 // 13}px; flex: 1 1 20rem">'
    layout = (
        f'{_KEY}<div class="pictures">{scrolls}'
        + svg("grid", wide, high, "What each device holds of each layer", rem=34)
        + svg("course", 404, 102, "Bytes held after each event", rem=34)
        + f"</div></div>{RESULT}"
    )
    return explorer(controls, layout, {"result": result, "grid": grid, "course": course}, "event")


def describe(
    run: Sequence[Frame], step: int, names: Sequence[str], psi: int, n: int, zero: int
) -> str:
    """The frame in words; numbers carry names."""
    frame, held = run[step], [one.held for one in run]
    peak, every = held.index(max(held)), run[-1].sent
    about = [names[i] for i in frame.layers]
    event = ", ".join([frame.event, *(["all layers"] if len(about) > 1 else about)])
    return (
        f"ZeRO {ZEROS[zero]}. Event {said('step', step)} of {len(run) - 1}: "
        f"{said('event', event)}. Each device holds {said('held', frame.held)} bytes: "
        f"{frame.parameter_bytes:,} of parameters, {frame.gathered_bytes:,} gathered, "
        f"{frame.gradient_bytes:,} of gradients, {frame.moment_bytes:,} of moments. The peak is "
        f"{said('peak', held[peak])}, at event {peak}. It has sent {said('sent', frame.sent)} of "
        f"{said('all', every)} bytes, {every * n // (psi * (n - 1))}Ψ(n − 1)/n for Ψ = {psi:,} and "
        f"n = {n}."
    )


def _grid(frame, names, n, zero):
    """A column for each device, a row for each layer; in a cell the n parts, filled where held."""
    drawn = []
    for i, name in enumerate(names):
        bold = 'font-weight="bold"' if i in frame.layers else ""
        drawn.append(text(0, _TOP + i * _ROW + 16, name, more=bold))
    for device in range(n):
        x = _column(n, device)
        drawn.append(text(x + 9 * n + 4, 14, f"device {device}", "middle"))
        for k, kind in enumerate("PGM"):
            left = x + k * (_PART * n + 4)
            drawn.append(text(left + _PART * n / 2, 32, kind, "middle"))
            for i in range(len(names)):
                y, fills = _TOP + i * _ROW, _fills(frame, zero, kind, i, device, n)
                for part, opacity in enumerate(fills):
                    if opacity:
                        pale = 'fill-opacity=".4"' if opacity < 1 else ""
                        colour = palette.device(part)
                        drawn.append(box(left + part * _PART, y, _PART, 22, colour, pale))
                moves = i in frame.layers and kind in _moving(frame.event)
                edge = 'stroke-width="2.5"' if moves else 'stroke-opacity=".45"'
                drawn.append(box(left, y, _PART * n, 22, more=f'class="cell" {EDGE} {edge}'))
    return "".join(drawn)


def _fills(frame, zero, kind, layer, device, n):
    """The opacity of each of the n parts: 0 is not held, and a device's own sum is pale."""
    own = [int(part == device) for part in range(n)]
    if kind == "P":
        return [1] * n if zero == 0 or frame.gathered[layer] else own
    if kind == "M":
        return [1] * n if zero == 0 else own
    held = {"": [0] * n, "partial": [0.4] * n, "whole": [1] * n, "shard": own}
    return held[frame.gradients[layer]]


def _moving(event):
    """The kinds that an event changes, whose cells are framed in bold."""
    if event == "update":
        return "PM"
    return "P" if event.endswith("all-gather") or event.startswith("forward") else "G"


def _column(n, device):
    return _LEFT + device * (3 * _PART * n + 20)


def _course(held, step, most, zero):
    """A bar for each event, as high as what is held after it, on one scale for all of ZeRO."""
    peak, wide = held.index(max(held)), 400 // len(held)
    drawn = [f'<path d="M2 30H402" {EDGE} stroke-dasharray="1 4"/>']
    if zero:
        drawn.append(text(2, 24, "peak of data parallelism"))
    for k, size in enumerate(held):
        high, fill = 70 * size // most, "currentColor" if k == step else "none"
        drawn.append(box(2 + k * wide, 100 - high, wide - 2, high, fill))
    ends = peak > len(held) // 2  # so that the label stays within the picture
    x, y = peak * wide + (wide if ends else 2), 94 - 70 * held[peak] // most
    label = text(x, y, f"peak, {held[peak]:,} bytes", "end" if ends else "")
    return "".join(drawn) + label
