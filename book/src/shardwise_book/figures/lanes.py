"""The lanes of compute and network: how much of a step compute waits for messages."""

import math
from collections.abc import Mapping, Sequence

from shardwise_book.figures import palette, svg
from shardwise_book.figures.interactive import Control, Interactive, explorer, said
from shardwise_book.figures.overlap import overlap

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
      layer_bytes: of one layer's weights, in the dtype in which they are sent, and of its gradient.
      layer_flops: of one layer's forward pass, for one token; a backward pass has `backward` times
        as many (2; 3 with rematerialisation).
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
    picture = svg.picture("lanes", 380, _FOOT + 54, alt, rem=36)
    layout = f'<div class="pictures">{picture}</div>'
    first = {"tokens": len(tokens) // 2, "ahead": 1} | dict(start or {})
    return explorer(controls, layout, run, result, longest, _lanes, start=first, unit=unit)


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
