"""When compute and network run in one training step, and the explorer of both as lanes.

Data parallelism and FSDP, layer by layer: how much of a step compute waits for messages.
"""

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardwise_book.figures import palette, svg
from shardwise_book.figures.interactive import Control, Interactive, explorer, said

LAYERS = 4
NAMES = {"data": "Data parallelism", "fsdp": "FSDP"}
AHEAD = {
    "data": ["at the end", "layer by layer"],
    "fsdp": ["0 layers ahead", "1 layer ahead", "2 layers ahead"],
}
COLOURS = {
    "forward": palette.DEVICES[1],
    "backward": palette.DEVICES[4],
    "gather": palette.DEVICES[5],
    "reduce": palette.DEVICES[2],
}
PASSES = {"forward": "forward", "backward": "backward", "": "compute waits"}
KINDS = {
    "data": PASSES | {"reduce": "all-reduce"},
    "fsdp": PASSES | {"gather": "all-gather", "reduce": "reduce-scatter"},
}
_LEFT, _WIDE, _ROW = 56, 312, 10  # of the picture, in its own units
_FOOT = 74 + _ROW * LAYERS  # where the lanes end; below stand the time of the step and the key
_WAITS = svg.EDGE + ' stroke-dasharray="3 2"'


class Task(NamedTuple):
    """A pass or a message."""

    kind: str
    layer: int
    start: float
    end: float


class Overlap(NamedTuple):
    """What `overlap` says of a step."""

    strategy: str
    passes: tuple[Task, ...]
    messages: tuple[Task, ...]

    @property
    def step(self) -> float:
        return max(task.end for task in self.passes + self.messages)

    @property
    def compute(self) -> float:
        return sum(task.end - task.start for task in self.passes)

    @property
    def network(self) -> float:
        return sum(task.end - task.start for task in self.messages)

    @property
    def exposed(self) -> float:
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
    """The times of one training step in which one pass and one message can run at a time.

    What comes back has `.passes` in order of time, and `.messages`, gathers in the order of the
    passes that need them before reductions, with a `.kind` ("forward", "backward", "gather",
    "reduce"), `.layer`, `.start` and `.end` each; and in seconds `.step`, the whole without the
    optimizer's update, `.compute` and `.network`, the time that either is busy, and `.exposed`,
    that in which compute waits.

    Seconds are given for one layer: of its two passes, of reducing its gradient, and of gathering
    its weights. "data" all-reduces a layer's gradient when its backward pass has ended (`ahead` of
    1 or more), or all of them when the whole backward pass has (0). "fsdp" gathers a layer's
    weights for each of its passes and frees them after it, `ahead` layers before they are needed,
    and reduce-scatters a gradient when it is known. Messages are sent in the order in which they
    become possible, gathers before reductions (Li et al., 2020; Zhao et al., 2023).

    Raises:
      ValueError: an unknown strategy, or fewer than one layer, or less than 0 ahead.
    """
    if strategy not in NAMES or layers < 1 or ahead < 0:
        raise ValueError(
            f"figures.overlap: strategy={strategy!r}, layers={layers}, ahead={ahead}; expected "
            f"one of {', '.join(NAMES)}, at least 1 layer, and 0 or more ahead."
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


def lanes_explorer(
    strategy: str,
    layer_bytes: float,
    layer_flops: float,
    *,
    flops_per_s: float,
    bandwidths: Mapping[str, float],
    devices: int,
    tokens: Sequence[int],
    backward: float = 2.0,
    start: Mapping[str, int] | None = None,
) -> Interactive:
    """Choose tokens, bandwidth and what overlaps; see where compute waits, and what lies whole.

    Latency, embedding, head and the optimizer's update are left out; see `figures.overlap`.

    Args:
      strategy: "data" or "fsdp".
      layer_bytes: the bytes of one layer's weights, as they are sent; its gradient has as many.
      layer_flops: the FLOPs of one layer's forward pass, for one token; a backward pass has
        `backward` times as many (2; 3 with rematerialisation).
      flops_per_s: what a device computes.
      bandwidths: the links on offer, each with the bytes/s that a device sends over it.
      devices: n; a ring sends (n − 1)/n of a gather or a scatter, and of an all-reduce twice that.
      tokens: the numbers of tokens on each device on offer.
      start: number of the option shown first, for "tokens", "bandwidth" or "ahead".
    """
    sent = layer_bytes * (devices - 1) / devices
    slowest = max(tokens) * layer_flops / flops_per_s
    unit = ("ms", 1e3) if slowest > 1e-3 else ("µs", 1e6)

    def run(tokens, bandwidth, ahead):
        forward, gather = tokens * layer_flops / flops_per_s, sent / bandwidth
        reduce = 2 * gather if strategy == "data" else gather
        return overlap(strategy, ahead, LAYERS, forward, backward * forward, reduce, gather)

    def result(run):
        times = run.compute, run.network, run.step, run.exposed
        compute, network, step, waits = (_time(seconds, unit) for seconds in times)
        held = (run.whole + run.gradients) * layer_bytes
        size = said("held", f"{held / 1e6:,.0f} MB" if held >= 1e7 else f"{held / 1e3:,.0f} kB")
        whole = (
            f"Weights and gradients of all {LAYERS} layers lie whole on the device at any time, "
            f"{size}."
            if strategy == "data"
            else f"At most {said('whole', run.whole)} of {LAYERS} layers have their weights whole "
            f"on the device, arriving ones too, and {run.gradients} their gradients: {size} beside "
            f"the shards."
        )
        return (
            f"{said('name', NAMES[strategy])}: compute {said('compute', compute)}, network "
            f"{said('network', network)}, a step {said('step', step)}. Compute waits "
            f"{said('exposed', f'{waits} ({run.exposed / run.step:.0%})')} of it. {whole}"
        )

    def longest(tokens, bandwidth):
        return max(run(tokens, bandwidth, i).step for i in range(len(AHEAD[strategy])))

    controls = {
        "tokens": Control("Tokens on each device", {f"{n:,}": n for n in tokens}),
        "bandwidth": Control("Bandwidth", bandwidths),
        "ahead": Control("Overlap", {words: i for i, words in enumerate(AHEAD[strategy])}),
    }
    alt = "One training step over time: what the device computes, what its link sends, and which "
    alt += "layers lie whole"
    layout = f'<div class="pictures">{svg.picture("lanes", 380, _FOOT + 54, alt, rem=36)}</div>'
    first = {"tokens": len(tokens) // 2, "ahead": 1} | dict(start or {})
    made = run, result, longest, _lanes
    return explorer(controls, layout, *made, start=first, fixed={"unit": unit})


def _time(seconds, unit):
    """Three digits, of which at most three are decimals."""
    value = round(seconds * unit[1], 6)
    digits = 2 - math.floor(math.log10(value)) if value else 0
    return f"{value:,.{min(3, max(0, digits))}f} {unit[0]}"


def _lanes(run, longest, unit):
    """The lanes of one step, a line at its end, and what the colours mean."""
    scale = _WIDE / longest

    def draw(start, end, top, high, fill="none", more="", label=None):
        wide = scale * (end - start)
        if wide > 0.05:
            x, gap = _LEFT + scale * start, min(1, wide / 6)  # tells neighbours of a kind apart
            yield svg.box(round(x, 1), top, round(wide - gap, 1), high, fill, more)
            if label is not None and wide >= 10:
                ink = f'fill="{palette.ink(fill)}"'
                yield svg.text(round(x + wide / 2, 1), top + 17, label, "middle", ink)

    for name, y in ("compute", 21), ("network", 53), ("weights", 79), ("whole", 91):
        yield svg.text(0, y, name)
    for task in (*run.passes, *run.messages):
        top = 4 if task in run.passes else 36
        yield from draw(task.start, task.end, top, 26, COLOURS[task.kind], "", task.layer)
    ends = [0.0, *(task.end for task in run.passes)]
    starts = [*(task.start for task in run.passes), run.step]
    for free, start in zip(ends, starts, strict=True):
        yield from draw(free, start, 4.5, 25, more=_WAITS)
    for start, end, layer in run.held:
        yield from draw(start, end, 70 + _ROW * layer, 7, "currentColor", 'opacity=".55"')
    end = round(_LEFT + scale * run.step, 1)
    yield svg.line(f"M{end:g} 0V{_FOOT}") + svg.text(end, _FOOT + 12, _time(run.step, unit), "end")
    for place, (kind, name) in enumerate(KINDS[run.strategy].items()):
        x, y = _LEFT + 104 * (place % 3), _FOOT + 22 + 17 * (place // 3)
        yield svg.box(x, y, 11, 11, COLOURS.get(kind, "none"), "" if kind else _WAITS)
        yield svg.text(x + 16, y + 10, name)
