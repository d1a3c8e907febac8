"""The figure that steps through sharded training: what a device holds and sends, event by event."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardwise_book.figures import svg
from shardwise_book.figures.interactive import Control, Interactive, explorer, said

ZEROS = ["0, data parallelism", "1, optimizer state cut", "2, gradients too", "3, FSDP"]
PASSES = {"gather layers again": True, "keep them gathered": False}
_KEY = """<p style="margin-top: .7rem; font-size: .88em">P parameters, G gradients, M moments, each
cut into a shard for every device and filled where this device holds it. Pale gradients are the
device's own, not yet summed. Bold frames are what the event is about. Below, a bar for every event:
the bytes then held.</p>"""
N = 4  # devices
_LEFT, _TOP, _ROW, _PART = 52, 40, 30, 6  # of the grid of layers, in units of the picture
_COLUMN = 3 * _PART * N + 20  # from one device to the next


class Frame(NamedTuple):
    """What `training_step` says of one event; all devices hold alike."""

    event: str
    layers: tuple[int, ...]
    gathered: tuple[bool, ...]
    gradients: tuple[str, ...]
    parameter_bytes: int
    gathered_bytes: int
    gradient_bytes: int
    moment_bytes: int
    sent: int

    @property
    def held(self) -> int:
        """Bytes on each device; activations are not counted."""
        return self.parameter_bytes + self.gathered_bytes + self.gradient_bytes + self.moment_bytes


def training_step(
    layers: Sequence[int], devices: int = 4, zero: int = 3, again: bool = True
) -> list[Frame]:
    """The frames of a training step with Adam, one at its start and one after each event.

    A frame has the `.event` in words and the numbers of the `.layers` that it is about; for each
    layer, whether its weights lie whole (`.gathered`), and what there is of its gradient
    (`.gradients`): "" nothing, "partial" a device's own, "whole" the sum over devices, "shard" its
    part of that; what each device holds, `.parameter_bytes`, `.gathered_bytes`, `.gradient_bytes`
    and `.moment_bytes`, in all `.held`; and the bytes that it has `.sent`.

    `layers` holds the bytes of each layer's parameters. `zero` is ZeRO's number: 0 is data
    parallelism; from 1 on, moments are held in shards, and here parameters too. 1 and 2 gather all
    layers before the forward pass, 3 each where it is used, and in the backward pass `again` or
    not; 1 reduce-scatters all gradients at the end, 2 and 3 each layer's at once (Rajbhandari et
    al., 2020).

    Raises:
      ValueError: another number, or a layer that does not divide over the devices.
    """
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"figures.training_step: zero={zero}; expected 0, 1, 2 or 3.")
    if bad := [size for size in layers if size % devices]:
        raise ValueError(
            f"figures.training_step: a layer of {bad[0]} bytes does not divide over {devices} "
            f"devices; give each layer a multiple of {devices}."
        )
    every = tuple(range(len(layers)))
    shards = sum(layers) // (devices if zero else 1)
    gathered, gradients, sent = [False] * len(layers), [""] * len(layers), 0
    frames: list[Frame] = []

    def happens(event, about, gather=None, gradient=None, passes=0):
        """What an event makes of the layers that it is about; each pass sends (n − 1)/n of them."""
        nonlocal sent
        for i in about:
            gathered[i] = gathered[i] if gather is None else gather
            gradients[i] = gradients[i] if gradient is None else gradient
        sent += passes * sum(layers[i] for i in about) * (devices - 1) // devices
        parts = {"": 0, "partial": devices, "whole": devices, "shard": 1}
        sizes = [size // devices for size in layers]
        held = (
            shards,
            sum(size for size, whole in zip(layers, gathered, strict=True) if whole),
            sum(size * parts[kind] for size, kind in zip(sizes, gradients, strict=True)),
            2 * shards,
        )
        frames.append(Frame(event, about, tuple(gathered), tuple(gradients), *held, sent))

    happens("start", ())
    if zero in (1, 2):
        happens("before the loss: all-gather", every, gather=True, passes=1)
    for i in every:
        if zero == 3:
            happens("forward: all-gather", (i,), gather=True, passes=1)
        happens("forward: compute", (i,))
        gathered[i] &= zero < 3 or not again
    for i in reversed(every):
        if zero == 3 and again:
            happens("backward: all-gather", (i,), gather=True, passes=1)
        happens("backward: compute", (i,), gradient="partial")
        gathered[i] &= zero < 3
        if zero >= 2:
            happens("backward: reduce-scatter", (i,), gradient="shard", passes=1)
    gathered[:] = [False] * len(layers)
    if zero == 0:
        happens("after the backward pass: all-reduce", every, gradient="whole", passes=2)
    if zero == 1:
        happens("after the backward pass: reduce-scatter", every, gradient="shard", passes=1)
    happens("update", every, gradient="")
    return frames


def fsdp_stepper(layers: Mapping[str, int]) -> Interactive:
    """Choose ZeRO's number and step through forward, backward and update on four devices.

    `layers` maps the name of each layer to the bytes of its parameters, a multiple of four.

    Raises:
      ValueError: what `training_step` raises.
    """
    names, sizes = list(layers), list(layers.values())

    def run(zero, again):
        return training_step(sizes, N, zero, again)

    most = max(f.held for zero in range(4) for again in (True, False) for f in run(zero, again))
    controls = {
        "zero": Control("ZeRO", {name: i for i, name in enumerate(ZEROS)}),
        "again": Control("Backward pass, with ZeRO 3", PASSES),
        "step": Control("Event", lambda run: range(len(run)), "steps"),
    }
    wide, high = _LEFT + N * _COLUMN - 8, _TOP + len(layers) * _ROW
    layout = (
        f'{_KEY}<div class="pictures"><div style="min-width: 19rem; flex: 1 1 20rem">'
        + svg.picture("grid", wide, high, "What each device holds of each layer", rem=34)
        + svg.picture("course", 404, 102, "Bytes held after each event", rem=34)
        + "</div></div>"
    )
    more = {"start": {"zero": 3, "step": 7}, "shows": "event", "result": describe}
    fixed = {"names": names, "psi": sum(sizes), "most": most}
    return explorer(controls, layout, run, _grid, _course, fixed=fixed, **more)


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


def _grid(run, step, names, zero):
    """A column for each device, a row for each layer; in a cell the n parts, filled where held.

    Bold frames are around what the event changes; a device's own sum of gradients is pale.
    """
    frame = run[step]
    gathers = frame.event.endswith("all-gather") or frame.event.startswith("forward")
    moving = "PM" if frame.event == "update" else "P" if gathers else "G"
    kinds = {
        "P": ["shard" if zero and not whole else "whole" for whole in frame.gathered],
        "G": frame.gradients,
        "M": ["shard" if zero else "whole"] * len(names),
    }
    for i, name in enumerate(names):
        bold = 'font-weight="bold"' if i in frame.layers else ""
        yield svg.text(0, _TOP + i * _ROW + 16, name, more=bold)
    for device in range(N):
        x = _LEFT + device * _COLUMN
        yield svg.text(x + 9 * N + 4, 14, f"device {device}", "middle")
        for k, (kind, states) in enumerate(kinds.items()):
            left = x + k * (_PART * N + 4)
            yield svg.text(left + _PART * N / 2, 32, kind, "middle")
            for i, state in enumerate(states):
                y, pale = _TOP + i * _ROW, 'fill-opacity=".4"' if state == "partial" else ""
                for part in range(N) if state in ("whole", "partial") else [device] * bool(state):
                    yield svg.box(left + part * _PART, y, _PART, 22, svg.device(part), pale)
                moves = i in frame.layers and kind in moving
                edge = 'stroke-width="2.5"' if moves else 'stroke-opacity=".45"'
                yield svg.box(left, y, _PART * N, 22, more=f'class="cell" {svg.EDGE} {edge}')


def _course(run, step, most, zero):
    """A bar for each event, as high as what is held after it, on one scale for all of ZeRO."""
    held = [frame.held for frame in run]
    peak, wide = held.index(max(held)), 400 // len(held)
    yield svg.line("M2 30H402", 'stroke-dasharray="1 4"')
    if zero:
        yield svg.text(2, 24, "peak of data parallelism")
    for k, size in enumerate(held):
        high, fill = 70 * size // most, "currentColor" if k == step else "none"
        yield svg.box(2 + k * wide, 100 - high, wide - 2, high, fill)
    ends = peak > len(held) // 2  # so that the label stays within the picture
    x, y = peak * wide + (wide if ends else 2), 94 - 70 * held[peak] // most
    yield svg.text(x, y, f"peak, {held[peak]:,} bytes", "end" if ends else "")
