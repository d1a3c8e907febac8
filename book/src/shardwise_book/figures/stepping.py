"""The figure that steps through sharded training: what is where, layer by layer."""

import functools
from collections.abc import Mapping, Sequence

from shardwise_book.figures import svg
from shardwise_book.figures.interactive import RESULT, Control, Interactive, explorer, said
from shardwise_book.figures.zero import Frame, training_step

ZEROS = ["0, data parallelism", "1, optimizer state cut", "2, gradients too", "3, FSDP"]
PASSES = {"gather layers again": True, "keep them gathered": False}
_KEY = """<p style="margin-top: .7rem; font-size: .88em">P parameters, G gradients, M moments, each
cut into a shard for every device and filled where this device holds it. Pale gradients are the
device's own, not yet summed. Bold frames are what the event is about. Below, a bar for every event:
the bytes then held.</p>"""
N = 4  # devices
_LEFT, _TOP, _ROW, _PART = 52, 40, 30, 6  # of the grid of layers, in units of the picture


def fsdp_stepper(layers: Mapping[str, int]) -> Interactive:
    """Choose ZeRO's number and step through forward, backward and update on four devices.

    `layers` maps the name of each layer to the bytes of its parameters, a multiple of four.

    Raises:
      ValueError: what `training_step` raises.
    """
    names, sizes = list(layers), list(layers.values())
    run = functools.cache(lambda zero, again: training_step(sizes, N, zero, again))
    most = max(f.held for zero in range(4) for again in (True, False) for f in run(zero, again))

    def result(zero, again, step):
        return describe(run(zero, again), step, names, sum(sizes), zero)

    def grid(zero, again, step):
        return _grid(run(zero, again)[step], names, zero)

    def course(zero, again, step):
        return _course([frame.held for frame in run(zero, again)], step, most, zero)

    controls = {
        "zero": Control("ZeRO", {name: i for i, name in enumerate(ZEROS)}),
        "again": Control("Backward pass, with ZeRO 3", PASSES),
        "step": Control("Event", lambda zero, again: range(len(run(zero, again))), "steps"),
    }
    wide, high = _column(N) - 8, _TOP + len(layers) * _ROW
    layout = (
        f'{_KEY}<div class="pictures"><div style="min-width: 19rem; flex: 1 1 20rem">'
        + svg.picture("grid", wide, high, "What each device holds of each layer", rem=34)
        + svg.picture("course", 404, 102, "Bytes held after each event", rem=34)
        + f"</div></div>{RESULT}"
    )
    parts = {"result": result, "grid": grid, "course": course}
    return explorer(controls, layout, parts, {"zero": 3, "step": 7}, shows="event")


def describe(run: Sequence[Frame], step: int, names: Sequence[str], psi: int, zero: int) -> str:
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
        f"{said('all', every)} bytes, {every * N // (psi * (N - 1))}Ψ(n − 1)/n for Ψ = {psi:,} and "
        f"n = {N}."
    )


def _grid(frame, names, zero):
    """A column for each device, a row for each layer; in a cell the n parts, filled where held."""
    drawn = []
    for i, name in enumerate(names):
        bold = 'font-weight="bold"' if i in frame.layers else ""
        drawn.append(svg.text(0, _TOP + i * _ROW + 16, name, more=bold))
    for device in range(N):
        x = _column(device)
        drawn.append(svg.text(x + 9 * N + 4, 14, f"device {device}", "middle"))
        for k, kind in enumerate("PGM"):
            left = x + k * (_PART * N + 4)
            drawn.append(svg.text(left + _PART * N / 2, 32, kind, "middle"))
            for i in range(len(names)):
                y, fills = _TOP + i * _ROW, _fills(frame, zero, kind, i, device)
                for part, opacity in enumerate(fills):
                    if opacity:
                        pale = 'fill-opacity=".4"' if opacity < 1 else ""
                        colour = svg.device(part)
                        drawn.append(svg.box(left + part * _PART, y, _PART, 22, colour, pale))
                moves = i in frame.layers and kind in _moving(frame.event)
                edge = 'stroke-width="2.5"' if moves else 'stroke-opacity=".45"'
                drawn.append(
                    svg.box(left, y, _PART * N, 22, more=f'class="cell" {svg.EDGE} {edge}')
                )
    return "".join(drawn)


def _fills(frame, zero, kind, layer, device):
    """The opacity of each of the n parts: 0 is not held, and a device's own sum is pale."""
    own = [int(part == device) for part in range(N)]
    if kind == "P":
        return [1] * N if zero == 0 or frame.gathered[layer] else own
    if kind == "M":
        return [1] * N if zero == 0 else own
    held = {"": [0] * N, "partial": [0.4] * N, "whole": [1] * N, "shard": own}
    return held[frame.gradients[layer]]


def _moving(event):
    """The kinds that an event changes, whose cells are framed in bold."""
    if event == "update":
        return "PM"
    return "P" if event.endswith("all-gather") or event.startswith("forward") else "G"


def _column(device):
    return _LEFT + device * (3 * _PART * N + 20)


def _course(held, step, most, zero):
    """A bar for each event, as high as what is held after it, on one scale for all of ZeRO."""
    peak, wide = held.index(max(held)), 400 // len(held)
    drawn = [f'<path d="M2 30H402" {svg.EDGE} stroke-dasharray="1 4"/>']
    if zero:
        drawn.append(svg.text(2, 24, "peak of data parallelism"))
    for k, size in enumerate(held):
        high, fill = 70 * size // most, "currentColor" if k == step else "none"
        drawn.append(svg.box(2 + k * wide, 100 - high, wide - 2, high, fill))
    ends = peak > len(held) // 2  # so that the label stays within the picture
    x, y = peak * wide + (wide if ends else 2), 94 - 70 * held[peak] // most
    label = svg.text(x, y, f"peak, {held[peak]:,} bytes", "end" if ends else "")
    return "".join(drawn) + label
