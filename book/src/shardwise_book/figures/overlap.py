"""When compute and network run in one training step: data parallelism and FSDP, layer by layer."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

STRATEGIES = ("data", "fsdp")


class Task(NamedTuple):
    """`kind` is "forward", "backward", "gather" or "reduce"; times are in seconds."""

    kind: str
    layer: int
    start: float
    end: float


class Overlap(NamedTuple):
    """One step of a device: its passes through layers, and its messages, in order of time.

    `messages` lists the gathers in the order of the passes that need them, then the reductions.
    """

    strategy: str
    passes: tuple[Task, ...]
    messages: tuple[Task, ...]

    @property
    def step(self) -> float:
        """Seconds from the first start to the last end; the optimizer's update is not counted."""
        return max(task.end for task in self.passes + self.messages)

    @property
    def compute(self) -> float:
        """Seconds in which the device computes."""
        return sum(task.end - task.start for task in self.passes)

    @property
    def network(self) -> float:
        """Seconds in which its link is busy."""
        return sum(task.end - task.start for task in self.messages)

    @property
    def exposed(self) -> float:
        """Seconds in which compute waits for the network."""
        return self.step - self.compute

    @property
    def whole(self) -> int:
        """The most layers whose weights lie whole on the device at once, those arriving too."""
        if self.strategy == "data":
            return len(self.passes) // 2
        pairs = zip(self.messages, self.passes, strict=False)
        return _most([(gather.start, used.end) for gather, used in pairs])

    @property
    def gradients(self) -> int:
        """The most layers whose gradients lie whole on the device at once."""
        layers = len(self.passes) // 2
        if self.strategy == "data":
            return layers
        pairs = zip(self.passes[layers:], self.messages[-layers:], strict=True)
        return _most([(made.start, sent.end) for made, sent in pairs])


def overlap(
    strategy: str,
    ahead: int,
    layers: int,
    forward: float,
    backward: float,
    reduce: float,
    gather: float = 0.0,
) -> Overlap:
    """One training step, if one pass and one message can run at a time, and neither is cut short.

    Seconds are given for one layer: of its two passes, of reducing its gradient, and of gathering
    its weights. "data" all-reduces a layer's gradient when its backward pass has ended (`ahead` of
    1 or more), or all of them when the whole backward pass has (0). "fsdp" gathers a layer's
    weights for each of its passes and frees them after it, `ahead` layers before they are needed,
    and reduce-scatters a gradient when it is known. Messages are sent in the order in which they
    become possible, gathers before reductions (Li et al., 2020; Zhao et al., 2023).

    Raises:
      ValueError: an unknown strategy, or fewer than one layer, or less than 0 ahead.
    """
    if strategy not in STRATEGIES or layers < 1 or ahead < 0:
        raise ValueError(
            f"figures.overlap: strategy={strategy!r}, layers={layers}, ahead={ahead}; expected "
            f"one of {', '.join(STRATEGIES)}, at least 1 layer, and 0 or more ahead."
        )
    line = _Line(strategy == "fsdp", ahead, layers, {"forward": forward, "backward": backward})
    seconds = {"gather": gather, "reduce": reduce}
    line.compute()
    free = 0.0
    while line.ready:
        since, _, kind, place = heapq.heappop(line.ready)
        start = max(free, since)
        free = start + seconds[kind]
        line.sent[kind, place] = Task(kind, line.order[place][1], start, free)
        line.compute()
    ordered = sorted(line.sent.items())  # "gather" before "reduce", each in the order of passes
    return Overlap(strategy, tuple(line.passes), tuple(task for _, task in ordered))


class _Line:
    """The passes of a step in their order, those that have run, and the messages they allow."""

    def __init__(self, gathers, ahead, layers, seconds):
        up = range(layers)
        self.order = [("forward", i) for i in up] + [("backward", i) for i in reversed(up)]
        self.gathers, self.ahead, self.seconds = gathers, ahead, seconds
        self.passes, self.sent, self.ready = [], {}, []
        for place in range(min(ahead + 1, 2 * layers) if gathers else 0):
            self._allow(0.0, "gather", place)

    def compute(self):
        """Run every pass whose weights have arrived."""
        while (place := len(self.passes)) < len(self.order):
            if self.gathers and ("gather", place) not in self.sent:
                return
            arrived = self.sent["gather", place].end if self.gathers else 0.0
            start = max(self.passes[-1].end if self.passes else 0.0, arrived)
            kind, layer = self.order[place]
            self.passes.append(Task(kind, layer, start, start + self.seconds[kind]))
            self._after(place)

    def _after(self, place):
        """What may be sent once a pass has ended and freed its weights."""
        end, last = self.passes[place].end, len(self.order) - 1
        if self.gathers and place + self.ahead + 1 <= last:
            self._allow(end, "gather", place + self.ahead + 1)
        at_once = self.gathers or self.ahead > 0
        if self.order[place][0] == "backward" and at_once:
            self._allow(end, "reduce", place)
        if place == last and not at_once:
            for earlier in range(len(self.order) // 2, last + 1):
                self._allow(end, "reduce", earlier)

    def _allow(self, since, kind, place):
        heapq.heappush(self.ready, (since, kind != "gather", kind, place))


def _most(spans: Sequence[tuple[float, float]]) -> int:
    """How many spans overlap at most; what ends makes room first."""
    events = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    live, peak = 0, 0
    for _, change in events:
        live += change
        peak = max(peak, live)
    return peak
