"""When compute and network run in one training step: data parallelism and FSDP, layer by layer."""

import heapq
import itertools
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
    def held(self) -> list[tuple[float, float, int]]:
        """(start, end, layer) of weights that lie whole on the device, arriving ones too."""
        if self.strategy == "data":
            return [(0.0, self.step, layer) for layer in range(len(self.passes) // 2)]
        pairs = zip(self.messages, self.passes, strict=False)
        return [(gather.start, used.end, used.layer) for gather, used in pairs]

    @property
    def whole(self) -> int:
        """The most layers whose weights lie whole on the device at once."""
        return _most([span[:2] for span in self.held])

    @property
    def gradients(self) -> int:
        """The most layers whose gradients lie whole on the device at once."""
        layers = len(self.passes) // 2
        pairs = zip(self.passes[layers:], self.messages[-layers:], strict=True)
        spans = [(made.start, sent.end) for made, sent in pairs]
        return layers if self.strategy == "data" else _most(spans)


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
    fsdp, count, order = strategy == "fsdp", 2 * layers, [*range(layers), *reversed(range(layers))]
    passes: list[Task] = []
    sent: dict[tuple[bool, int], Task] = {}  # by whether it is a reduction, and place in `order`
    ready = [(0.0, False, place) for place in range(min(ahead + 1, count))] if fsdp else []
    free = now = 0.0  # the link, and the device
    while ready or len(passes) < count:
        place = len(passes)
        if place < count and (not fsdp or (False, place) in sent):  # its weights have arrived
            start = max(now, sent[False, place].end) if fsdp else now
            kind, seconds = ("forward", forward) if place < layers else ("backward", backward)
            now = start + seconds
            passes.append(Task(kind, order[place], start, now))
            if fsdp and place + ahead + 1 < count:  # there is room for another layer
                heapq.heappush(ready, (now, False, place + ahead + 1))
            if kind == "backward":
                since = now if fsdp or ahead else layers * (forward + backward)
                heapq.heappush(ready, (since, True, place))
        else:
            since, reduces, place = heapq.heappop(ready)
            start = max(free, since)
            kind, seconds = ("reduce", reduce) if reduces else ("gather", gather)
            free = start + seconds
            sent[reduces, place] = Task(kind, order[place], start, free)
    ordered = [sent[key] for key in sorted(sent)]  # gathers first, each in the order of passes
    return Overlap(strategy, tuple(passes), tuple(ordered))


def _most(spans: Sequence[tuple[float, float]]) -> int:
    """How many spans overlap at most; what ends makes room first."""
    events = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    return max(itertools.accumulate(change for _, change in events))
