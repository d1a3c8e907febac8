"""The lanes of compute and network as boxes; lanes.js writes them as `picture` does."""

import math
from typing import Any

from shardwise_book.figures import palette
from shardwise_book.figures.interactive import Data
from shardwise_book.figures.overlap import Overlap

LEFT, WIDTH, ROW = 56, 312, 10  # of the picture, in its own units
COLOURS = {
    "forward": palette.DEVICES[1],
    "backward": palette.DEVICES[4],
    "gather": palette.DEVICES[5],
    "reduce": palette.DEVICES[2],
}
# A kind of box: its top, its height, what moves it down a layer, its style, its number's colour.
KINDS: dict[str, list[Any]] = {
    kind: [4 if "ward" in kind else 36, 26, 0, f'fill="{colour}"', palette.ink(colour)]
    for kind, colour in COLOURS.items()
} | {
    "wait": [4.5, 25, 0, 'fill="none" stroke="currentColor" stroke-dasharray="3 2"', ""],
    "whole": [70, 7, ROW, 'fill="currentColor" opacity=".55"', ""],
}


def foot(layers: int) -> int:
    """Where the lanes end; below stand the time of the step and the key."""
    return 74 + ROW * layers


def geometry(run: Overlap, longest: float) -> Data:
    """The boxes of a run, four numbers each: place, width, kind, layer; `longest` is the width."""
    scale, free = WIDTH / longest, 0.0
    found = [(task.start, task.end, task.kind, task.layer) for task in run.passes + run.messages]
    for task in run.passes:
        found.append((free, task.start, "wait", 0))
        free = task.end
    found.append((free, run.step, "wait", 0))
    if run.strategy == "data":
        found += [(0.0, run.step, "whole", layer) for layer in range(len(run.passes) // 2)]
    else:
        uses = zip(run.messages, run.passes, strict=False)
        found += [(gather.start, used.end, "whole", used.layer) for gather, used in uses]
    numbers = []
    for start, end, kind, layer in found:
        wide = scale * (end - start)
        if wide > 0.05:
            gap = min(1, wide / 6)  # what tells neighbours of one kind apart
            place = round(LEFT + scale * start, 1)
            numbers += [place, round(wide - gap, 1), list(KINDS).index(kind), layer]
    return {"boxes": numbers, "end": round(LEFT + scale * run.step, 1)}


def picture(data: Data, strategy: Data, frame: Data) -> str:
    """The lanes as the inside of an SVG."""
    places = range(0, len(frame["boxes"]), 4)
    boxes = (_box(data["kinds"], *frame["boxes"][i : i + 4]) for i in places)
    end, foot = number(frame["end"]), data["foot"]
    return (
        f'{strategy["words"]}{"".join(boxes)}<path d="M{end} 0V{foot}" stroke="currentColor">'
        f'</path><text x="{end}" y="{foot + 12}" text-anchor="end">{frame["said"][2]}</text>'
    )


def _box(kinds, x, wide, kind, layer):
    top, tall, down, style, ink = kinds[kind]
    place = f'x="{number(x)}" y="{number(top + down * layer)}"'
    made = f'<rect {place} width="{number(wide)}" height="{tall}" {style}></rect>'
    if not ink or wide < 9:
        return made
    middle = f'x="{number(x + wide / 2)}" y="{top + 17}" text-anchor="middle"'
    return f'{made}<text {middle} fill="{ink}">{layer}</text>'


def words(layers: int, reduce: str) -> str:
    """The names of the lanes, and the key: the same for every choice of a strategy."""
    lanes = (("compute", 21), ("network", 53), ("weights", 79), ("whole", 91))
    named = {"forward": "forward", "backward": "backward", "wait": "compute waits"}
    if reduce == "reduce-scatter":
        named["gather"] = "all-gather"
    named["reduce"] = reduce
    parts = [f'<text x="0" y="{y}">{name}</text>' for name, y in lanes]
    for place, (kind, name) in enumerate(named.items()):
        x, y = LEFT + 104 * (place % 3), foot(layers) + 22 + 17 * (place // 3)
        style = KINDS[kind][3]
        parts.append(f'<rect x="{x}" y="{y}" width="11" height="11" {style}></rect>')
        parts.append(f'<text x="{x + 16}" y="{y + 10}">{name}</text>')
    return "".join(parts)


def number(value: float) -> str:
    """Two decimals, halves upwards, as JavaScript writes them."""
    return f"{math.floor(value * 100 + 0.5) / 100:.2f}".rstrip("0").rstrip(".")
