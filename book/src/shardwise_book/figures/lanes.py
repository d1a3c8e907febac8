"""The interactive lanes of compute and network: how much of a step compute waits for messages."""

import math
from collections.abc import Mapping, Sequence

from shardwise_book.figures import lanes_drawing as drawing
from shardwise_book.figures.interactive import (
    STYLE,
    Choice,
    Data,
    Interactive,
    controls,
    select,
    status,
)
from shardwise_book.figures.overlap import STRATEGIES, Overlap, overlap

OFFERED = {
    "data": {
        "name": "Data parallelism",
        "ahead": ["at the end", "layer by layer"],
        "reduce": "all-reduce",
        "held": "Weights and gradients of all {6} layers lie whole on the device at any time, "
        '<b data-name="held">{7}</b>.',
    },
    "fsdp": {
        "name": "FSDP",
        "ahead": [f"{n} layer{'s' * (n != 1)} ahead" for n in range(3)],
        "reduce": "reduce-scatter",
        "held": 'At most <b data-name="whole">{5}</b> of {6} layers have their weights whole on '
        "the device, arriving ones too, and {8} their gradients: "
        '<b data-name="held">{7}</b> beside the shards.',
    },
}
SAYS = (
    '<b data-name="name">{0}</b>: compute <b data-name="compute">{1}</b>, network '
    '<b data-name="network">{2}</b>, a step <b data-name="step">{3}</b>. Compute waits '
    '<b data-name="exposed">{4}</b> of it. '
)
OWN_STYLE = "<style>.shardwise-figure svg.lanes { max-width: 36rem; font-size: 11px; }</style>"


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
    sizes = {"gather": layer_bytes, "reduce": gradient_bytes or layer_bytes}
    forward = [t * layer_flops / flops_per_s for t in tokens]
    times = [{"forward": t, "backward": backward * t} for t in forward]
    ring = (devices - 1) / devices
    unit = ("ms", 1e3) if max(forward) > 1e-3 else ("µs", 1e6)
    offered = []
    for strategy in strategies:
        share = 2 * ring if strategy == "data" else ring
        sent = {kind: share * size for kind, size in sizes.items()}
        runs = [
            [_frames(strategy, layers, t, _over(sent, w), sizes, unit) for w in bandwidths.values()]
            for t in times
        ]
        entry = OFFERED[strategy]
        words = drawing.words(layers, entry["reduce"])
        offered.append({**entry, "says": SAYS + entry["held"], "words": words, "runs": runs})
    shown = {"strategy": 0, "tokens": len(tokens) // 2, "bandwidth": 0, "ahead": 1}
    data = {
        "strategies": offered,
        "tokens": [f"{t:,}" for t in tokens],
        "bandwidths": list(bandwidths),
        "layers": layers,
        "kinds": list(drawing.KINDS.values()),
        "foot": drawing.foot(layers),
        "start": shown | dict(start or {}),
    }
    said = status(describe(data, data["start"]))
    return Interactive("lanes.js", data, STYLE + OWN_STYLE + _controls(data) + _still(data) + said)


def _over(sent, bandwidth):
    return {kind: size / bandwidth for kind, size in sent.items()}


def _frames(strategy, layers, passes, messages, sizes, unit):
    """The runs that differ in what overlaps, all on one scale."""
    runs = [
        overlap(strategy, ahead, layers, **passes, **messages)
        for ahead in range(len(OFFERED[strategy]["ahead"]))
    ]
    longest = max(run.step for run in runs)
    return [{"said": _said(run, sizes, unit), **drawing.geometry(run, longest)} for run in runs]


def _said(run: Overlap, sizes, unit):
    layers = len(run.passes) // 2
    held = run.whole * sizes["gather"] + run.gradients * sizes["reduce"]
    waits = f"{_time(run.exposed, unit)} ({run.exposed / run.step:.0%})"
    times = [_time(seconds, unit) for seconds in (run.compute, run.network, run.step)]
    return [*times, waits, run.whole, layers, _bytes(held), run.gradients]


def _time(seconds, unit):
    """Three digits, of which at most three are decimals."""
    value = round(seconds * unit[1], 6)
    digits = 2 - math.floor(math.log10(value)) if value else 0
    return f"{value:,.{min(3, max(0, digits))}f} {unit[0]}"


def _bytes(size):
    return f"{size / 1e6:,.0f} MB" if size >= 1e7 else f"{size / 1e3:,.0f} kB"


def look(data: Data, choice: Choice) -> tuple[Data, Data]:
    """The strategy of a choice, and the frame that it shows."""
    strategy = data["strategies"][choice["strategy"]]
    return strategy, strategy["runs"][choice["tokens"]][choice["bandwidth"]][choice["ahead"]]


def describe(data: Data, choice: Choice) -> str:
    """The result in words; numbers carry names."""
    strategy, frame = look(data, choice)
    return strategy["says"].format(strategy["name"], *frame["said"])


def picture(data: Data, choice: Choice) -> str:
    """The lanes as the inside of an SVG."""
    strategy, frame = look(data, choice)
    return drawing.picture(data, strategy, frame)


def _still(data):
    height = data["foot"] + 54
    return (
        f'<div class="pictures"><svg id="@lanes" class="lanes" viewBox="0 0 380 {height}" '
        f'role="img" aria-label="One training step over time: what the device computes, what its '
        f'link sends, and which layers lie whole">{picture(data, data["start"])}</svg></div>'
    )


def _controls(data):
    names = [strategy["name"] for strategy in data["strategies"]]
    options = {
        "strategy": ("Strategy", names),
        "tokens": ("Tokens on each device", data["tokens"]),
        "bandwidth": ("Bandwidth", data["bandwidths"]),
        "ahead": ("Overlap", data["strategies"][data["start"]["strategy"]]["ahead"]),
    }
    if len(names) == 1:
        del options["strategy"]
    made = (select(key, *options[key], data["start"][key]) for key in options)
    return controls("".join(made), "choice")
