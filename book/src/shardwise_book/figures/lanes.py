"""The lanes of compute and network: how much of a step compute waits for messages."""

import functools
import math
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
from shardwise_book.figures.overlap import STRATEGIES, Overlap, overlap

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
_LEFT, _WIDE, _ROW = 56, 312, 10  # of the picture, in its own units
_WAITS = EDGE + ' stroke-dasharray="3 2"'


def lanes_explorer(
    layer_bytes: float,
    layer_flops: float,
    *,
    flops_per_s: float,
    bandwidths: Mapping[str, float],
    devices: int,
    tokens: Sequence[int],
    layers: int = 4,
    strategies: Sequence[str] = STRATEGIES,
    gradient_bytes: float | None = None,
    backward: float = 2.0,
    start: Mapping[str, int] | None = None,
) -> Interactive:
    """Choose tokens, bandwidth and what overlaps; see where compute waits, and what lies whole.

    Latency, embedding, head and the optimizer's update are left out; see `figures.overlap`.

    Args:
      layer_bytes: of one layer's weights, in the dtype in which they are sent; its gradient has
        `gradient_bytes`, by default as many.
      layer_flops: of one layer's forward pass, for one token; a backward pass has `backward` times
        as many (2; 3 with rematerialisation).
      flops_per_s: what a device computes.
      bandwidths: the links on offer, each with the bytes/s that a device sends over it.
      devices: n; a ring sends (n − 1)/n of a gather or a scatter, and of an all-reduce twice that.
      tokens: the numbers of tokens on each device on offer.
      strategies: "data", "fsdp", or both; the first is shown first.
      start: number of the option shown first, for "strategy", "tokens", "bandwidth" or "ahead".
    """
    gradient_bytes, ring = gradient_bytes or layer_bytes, (devices - 1) / devices
    slowest = max(tokens) * layer_flops / flops_per_s
    unit = ("ms", 1e3) if slowest > 1e-3 else ("µs", 1e6)

    @functools.cache
    def run(strategy, tokens, bandwidth, ahead):
        forward = tokens * layer_flops / flops_per_s
        reduce = gradient_bytes * ring * (2 if strategy == "data" else 1) / bandwidth
        times = forward, backward * forward, reduce, layer_bytes * ring / bandwidth
        return overlap(strategy, ahead, layers, *times)

    def result(strategy, tokens, bandwidth, ahead):
        found = run(strategy, tokens, bandwidth, ahead)
        held = found.whole * layer_bytes + found.gradients * gradient_bytes
        return describe(found, held, unit)

    def lanes(strategy, tokens, bandwidth, ahead):
        found = run(strategy, tokens, bandwidth, ahead)
        every = (run(strategy, tokens, bandwidth, i) for i in range(len(AHEAD[strategy])))
        return _picture(found, max(one.step for one in every), _time(found.step, unit))

    start = {"tokens": len(tokens) // 2, "ahead": 1} | dict(start or {})
    offered = {
        "strategy": ("Strategy", {NAMES[strategy]: strategy for strategy in strategies}),
        "tokens": ("Tokens on each device", {f"{n:,}": n for n in tokens}),
        "bandwidth": ("Bandwidth", bandwidths),
        "ahead": ("Overlap", lambda strategy: {w: i for i, w in enumerate(AHEAD[strategy])}),
    }
    controls = {n: Control(*one, start.get(n, 0)) for n, one in offered.items()}
    alt = "One training step over time: what the device computes, what its link sends, and which "
    alt += "layers lie whole"
    layout = f'<div class="pictures">{svg("lanes", 380, _foot(layers) + 54, alt, rem=36)}</div>'
    return explorer(controls, layout + RESULT, {"result": result, "lanes": lanes})


def describe(run: Overlap, held: float, unit: tuple[str, float]) -> str:
    """The result in words; numbers carry names."""
    compute, network, step, waits = (
        _time(seconds, unit) for seconds in (run.compute, run.network, run.step, run.exposed)
    )
    size, layers = said("held", _bytes(held)), len(run.passes) // 2
    whole = (
        f"Weights and gradients of all {layers} layers lie whole on the device at any time, {size}."
        if run.strategy == "data"
        else f"At most {said('whole', run.whole)} of {layers} layers have their weights whole on "
        f"the device, arriving ones too, and {run.gradients} their gradients: {size} beside the "
        f"shards."
    )
    return (
        f"{said('name', NAMES[run.strategy])}: compute {said('compute', compute)}, network "
        f"{said('network', network)}, a step {said('step', step)}. Compute waits "
        f"{said('exposed', f'{waits} ({run.exposed / run.step:.0%})')} of it. {whole}"
    )


def _time(seconds, unit):
    """Three digits, of which at most three are decimals."""
    value = round(seconds * unit[1], 6)
    digits = 2 - math.floor(math.log10(value)) if value else 0
    return f"{value:,.{min(3, max(0, digits))}f} {unit[0]}"


def _bytes(size):
    return f"{size / 1e6:,.0f} MB" if size >= 1e7 else f"{size / 1e3:,.0f} kB"


def _foot(layers):
    """Where the lanes end; below stand the time of the step and the key."""
    return 74 + _ROW * layers


def _picture(run: Overlap, longest: float, took: str) -> str:
    scale, layers = _WIDE / longest, len(run.passes) // 2
    drawn = [
        text(0, y, n) for n, y in (("compute", 21), ("network", 53), ("weights", 79), ("whole", 91))
    ]

    def draw(start, end, top, high, fill="none", more="", label=None):
        wide = scale * (end - start)
        if wide <= 0.05:
            return
        x, gap = _LEFT + scale * start, min(1, wide / 6)  # what tells neighbours of a kind apart
        drawn.append(box(round(x, 1), top, round(wide - gap, 1), high, fill, more))
        if label is not None and wide >= 10:
            ink = f'fill="{palette.ink(fill)}"'
            drawn.append(text(round(x + wide / 2, 1), top + 17, label, "middle", ink))

    for task in (*run.passes, *run.messages):
        top = 4 if task in run.passes else 36
        draw(task.start, task.end, top, 26, COLOURS[task.kind], "", task.layer)
    ends = [0.0, *(task.end for task in run.passes)]
    starts = [*(task.start for task in run.passes), run.step]
    for free, start in zip(ends, starts, strict=True):
        draw(free, start, 4.5, 25, more=_WAITS)
    whole = [(0.0, run.step, layer) for layer in range(layers)]
    if run.strategy == "fsdp":
        uses = zip(run.messages, run.passes, strict=False)
        whole = [(gather.start, used.end, used.layer) for gather, used in uses]
    for start, end, layer in whole:
        draw(start, end, 70 + _ROW * layer, 7, "currentColor", 'opacity=".55"')
    end, foot = round(_LEFT + scale * run.step, 1), _foot(layers)
    drawn.append(f'<path d="M{end:g} 0V{foot}" {EDGE}/>' + text(end, foot + 12, took, "end"))
    return "".join(drawn) + _key(run.strategy, foot)


def _key(strategy, foot):
    kinds = {"forward": "forward", "backward": "backward", "": "compute waits"}
    kinds |= {"gather": "all-gather"} if strategy == "fsdp" else {}
    kinds["reduce"] = "reduce-scatter" if strategy == "fsdp" else "all-reduce"
    drawn = ""
    for place, (kind, name) in enumerate(kinds.items()):
        x, y = _LEFT + 104 * (place % 3), foot + 22 + 17 * (place // 3)
        drawn += box(x, y, 11, 11, COLOURS.get(kind, "none"), "" if kind else _WAITS)
        drawn += text(x + 16, y + 10, name)
    return drawn
