"""One training step of sharded data parallelism, event by event: what a device holds and sends."""

from collections.abc import Sequence
from typing import NamedTuple


class Frame(NamedTuple):
    """After one event: what each of the devices holds, all alike, and has sent in this step.

    `layers` are those that the event is about. For each layer, `gathered` says whether it lies
    whole beside its shard, and `gradients` what there is of its gradient: "" nothing, "partial" the
    device's own, "whole" the sum over devices, "shard" the device's part of that sum.
    """

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
    """The `Frame` at the start of a step with Adam, and after each event (ZeRO).

    `layers` holds the bytes of each layer's parameters. `zero` is ZeRO's number: 0 is data
    parallelism; from 1 on, parameters and moments are held in shards. 1 and 2 gather all layers
    before the forward pass, 3 each where it is used, and in the backward pass `again` or not; 1
    reduce-scatters all gradients at the end, 2 and 3 each layer's at once (Rajbhandari et al.,
    2020).

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
    run, every = _Run(layers, devices, zero), tuple(range(len(layers)))
    run.record("start", ())
    if zero in (1, 2):
        run.gather("before the loss", every)
    for i in every:
        if zero == 3:
            run.gather("forward", (i,))
        run.record("forward: compute", (i,))
        if zero == 3 and again:
            run.release((i,))
    for i in reversed(every):
        if zero == 3 and again:
            run.gather("backward", (i,))
        run.differentiate(i)
        if zero == 3:
            run.release((i,))
        if zero >= 2:
            run.scatter("backward", (i,))
    run.release(every)
    if zero == 0:
        run.all_reduce(every)
    if zero == 1:
        run.scatter("after the backward pass", every)
    run.update(every)
    return run.frames


class _Run:
    """The state of one device, and the frames recorded so far."""

    def __init__(self, layers, devices, zero):
        self.layers, self.n, self.parts = layers, devices, devices if zero else 1
        self.gathered, self.gradients = [False] * len(layers), [""] * len(layers)
        self.sent, self.frames = 0, []

    def record(self, event, layers):
        pieces = {"": 0, "partial": 1, "whole": 1, "shard": 1 / self.n}
        shards = sum(self.layers) // self.parts
        gathered = sum(b for b, whole in zip(self.layers, self.gathered, strict=True) if whole)
        pairs = zip(self.layers, self.gradients, strict=True)
        gradients = sum(int(b * pieces[kind]) for b, kind in pairs)
        state = tuple(self.gathered), tuple(self.gradients)
        held = shards, gathered, gradients, 2 * shards
        self.frames.append(Frame(event, layers, *state, *held, self.sent))

    def gather(self, when, layers):
        for i in layers:
            self.gathered[i] = True
        self._send(layers, 1)
        self.record(f"{when}: all-gather", layers)

    def release(self, layers):
        for i in layers:
            self.gathered[i] = False

    def differentiate(self, i):
        self.gradients[i] = "partial"
        self.record("backward: compute", (i,))

    def scatter(self, when, layers):
        for i in layers:
            self.gradients[i] = "shard"
        self._send(layers, 1)
        self.record(f"{when}: reduce-scatter", layers)

    def all_reduce(self, layers):
        for i in layers:
            self.gradients[i] = "whole"
        self._send(layers, 2)
        self.record("after the backward pass: all-reduce", layers)

    def update(self, layers):
        for i in layers:
            self.gradients[i] = ""
        self.record("update", layers)

    def _send(self, layers, passes):
        self.sent += passes * sum(self.layers[i] for i in layers) * (self.n - 1) // self.n
