"""The interactive figure in which to restore: which bytes of which file a target device reads."""

import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from jax.sharding import Sharding

from shardwise_book.figures import palette
from shardwise_book.figures.interactive import (
    STYLE,
    Choice,
    Data,
    Interactive,
    controls,
    select,
    slider,
    status,
)

if TYPE_CHECKING:  # drawing needs no checkpoints
    from shardwise.checkpoint import Chunks

Layouts = Mapping[str, Mapping[str, Sharding]]
Saved = Mapping[str, Mapping[tuple[str, str], "Chunks"]]

_SHOWN = 3  # byte ranges in the words; a device may read many


def resharding_explorer(
    layouts: Layouts,
    saved: Saved,
    source: tuple[str, str],
    goal: tuple[str, str],
    itemsize: int = 4,
) -> Interactive:
    """Choose what a checkpoint was saved from, and onto what it is restored; see what is read.

    `layouts` maps the name of a mesh to {spec as text: NamedSharding}; `saved` maps the name of a
    limit on chunks to {(mesh, spec as text): `checkpoint.Chunks`}, one for each layout, all of one
    array of two axes and `itemsize` bytes an element. The figure first shows the layouts `source`
    and `goal`, each a (mesh, spec as text).
    """
    data = table(layouts, saved, source, goal, itemsize)
    still = _controls(data) + _pictures(data, data["start"])
    words = status(describe(data, data["start"]))
    return Interactive("resharding.js", data, STYLE + still + words)


def table(
    layouts: Layouts,
    saved: Saved,
    source: tuple[str, str],
    goal: tuple[str, str],
    itemsize: int = 4,
) -> Data:
    """Everything on offer, as plain numbers; resharding.js reads the same."""
    stored = next(iter(next(iter(saved.values())).values()))
    meshes = [
        {
            "label": label,
            "specs": list(specs),
            "blocks": [_blocks(sharding, stored.shape) for sharding in specs.values()],
        }
        for label, specs in layouts.items()
    ]
    found = [
        [[_stored(chunks[mesh, spec]) for spec in specs] for mesh, specs in layouts.items()]
        for chunks in saved.values()
    ]
    first, then = (
        [list(layouts).index(mesh), list(layouts[mesh]).index(spec)]
        for mesh, spec in (source, goal)
    )
    start = {"limit": 0, "from": first, "onto": then, "device": 0}
    common = {"shape": list(stored.shape), "itemsize": itemsize, "colours": palette.DEVICES}
    return common | {"limits": list(saved), "meshes": meshes, "saved": found, "start": start}


def look(data: Data, choice: Choice) -> Data:
    """What the chosen device holds and reads, as a dict; see resharding.js, which does the same."""
    stored = data["saved"][choice["limit"]][choice["from"][0]][choice["from"][1]]
    blocks = data["meshes"][choice["onto"][0]]["blocks"][choice["onto"][1]]
    reads = [touched(data["shape"], stored, block) for block in blocks]
    sizes = [sum(stored["places"][i][2] for i in chunks) for chunks in reads]
    top, bottom, left, right = block = blocks[choice["device"]]
    mine = reads[choice["device"]]
    return {
        "stored": stored,
        "block": block,
        "touched": mine,
        "held": (bottom - top) * (right - left) * data["itemsize"],
        "read": sizes[choice["device"]],
        "ranges": _ranges([stored["places"][i] for i in mine]),
        "all": sum(sizes),
    }


def touched(shape: Sequence[int], stored: Data, block: Sequence[int]) -> list[int]:
    """The numbers of the chunks that a block touches, in row-major order."""
    (height, width), (top, bottom, left, right) = stored["chunk"], block
    across = math.ceil(shape[1] / width)
    rows = range(top // height, math.ceil(bottom / height))
    columns = range(left // width, math.ceil(right / width))
    return [i * across + j for i, j in itertools.product(rows, columns)]


def describe(data: Data, choice: Choice) -> str:
    """The result in words, as resharding.js writes them too; numbers carry names."""
    answer = look(data, choice)
    source, goal = (_name(data, choice[end]) for end in ("from", "onto"))
    top, bottom, left, right = answer["block"]
    files = answer["stored"]["files"]
    shown = [f"bytes {a:,} to {b:,} of {escape(files[f])}" for f, a, b in answer["ranges"][:_SHOWN]]
    if (more := len(answer["ranges"]) - _SHOWN) > 0:
        shown.append(f"and {more} more")
    high, wide = answer["stored"]["chunk"]
    return (
        f'Saved from {source}: <b data-name="chunks">{len(answer["stored"]["places"])}</b> '
        f'chunks of <b data-name="chunk">{high}×{wide}</b> elements. Restored onto {goal}: '
        f'device {choice["device"]} holds <b data-name="block">[{top}:{bottom}, {left}:{right}]</b>'
        f', <b data-name="held">{answer["held"]:,}</b> bytes, touches '
        f'<b data-name="touched">{len(answer["touched"])}</b> chunks and reads '
        f'<b data-name="read">{answer["read"]:,}</b> bytes as stored '
        f'(<span data-name="ranges">{"; ".join(shown)}</span>). The whole mesh reads '
        f'<b data-name="all">{answer["all"]:,}</b> bytes.'
    )


def array_picture(data: Data, choice: Choice) -> str:
    """The array with its chunks; those that are read filled, the block that is held outlined."""
    answer, (rows, columns) = look(data, choice), data["shape"]
    (height, width), colour = answer["stored"]["chunk"], data["colours"][choice["device"]]
    across = math.ceil(columns / width)
    boxes = []
    for i in range(len(answer["stored"]["places"])):
        fill = colour if i in answer["touched"] else "none"
        place = _box(30 + i % across * width, 30 + i // across * height, width, height)
        boxes.append(f'<rect class="chunk" {place} fill="{fill}" stroke="currentColor"></rect>')
    top, bottom, left, right = answer["block"]
    held = _box(30 + left, 30 + top, right - left, bottom - top)
    return (
        f'<text x="{30 + columns // 2}" y="20" text-anchor="middle">{columns} columns</text>'
        f'<text text-anchor="middle" transform="translate(20 {30 + rows // 2}) rotate(-90)">'
        f"{rows} rows</text>{''.join(boxes)}"
        f'<rect class="held" {held} fill="none" stroke="currentColor" stroke-width="5"></rect>'
    )


def file_picture(data: Data, choice: Choice) -> str:
    """Each file as a strip of bytes, chunk after chunk; those that are read filled."""
    answer, parts = look(data, choice), []
    stored, colour = answer["stored"], data["colours"][choice["device"]]
    for f, file in enumerate(stored["files"]):
        inside = [(i, place) for i, place in enumerate(stored["places"]) if place[0] == f]
        size = max(offset + length for _, (_, offset, length) in inside)
        y = 60 * f + 40
        parts.append(f'<text x="10" y="{y - 10}">{escape(file)}, {size:,} bytes</text>')
        for i, (_, offset, length) in inside:
            x, end = offset * 300 // size, (offset + length) * 300 // size
            fill = colour if i in answer["touched"] else "none"
            place = _box(10 + x, y, end - x, 26)
            parts.append(f'<rect class="bytes" {place} fill="{fill}" stroke="currentColor"></rect>')
    return "".join(parts)


def _pictures(data, choice):
    files = max(len(s["files"]) for limit in data["saved"] for mesh in limit for s in mesh)
    rows, columns = data["shape"]
    wide = max(columns + 60, 300)
    return (
        f'<div class="pictures"><svg id="@array" viewBox="0 0 {wide} {rows + 40}" '
        f'role="img" aria-label="The array, its chunks, and the block that the device holds">'
        f'{array_picture(data, choice)}</svg><svg id="@file" viewBox="0 0 330 {60 * files + 30}" '
        f'role="img" aria-label="The file, and the bytes that the device reads">'
        f"{file_picture(data, choice)}</svg></div>"
    )


def _controls(data):
    start, labels = data["start"], [mesh["label"] for mesh in data["meshes"]]
    (mesh, spec), (goal, onto) = start["from"], start["onto"]
    made = (
        select("mesh0", "Saved from mesh", labels, mesh)
        + select("spec0", "Saved spec", data["meshes"][mesh]["specs"], spec)
        + select("limit", "Chunks", data["limits"], start["limit"])
        + select("mesh1", "Restored onto mesh", labels, goal)
        + select("spec1", "Restored spec", data["meshes"][goal]["specs"], onto)
    )
    last = len(data["meshes"][goal]["blocks"][onto]) - 1
    return controls(made + slider("device", "Device", last, start["device"]), "choice")


def _blocks(sharding, shape):
    """[top, bottom, left, right] for each device, in the order of their ids."""
    indices = sharding.devices_indices_map(tuple(shape))
    ends = [
        [cut.indices(size)[:2] for cut, size in zip(indices[device], shape, strict=True)]
        for device in sorted(indices, key=lambda device: device.id)
    ]
    return [[*rows, *columns] for rows, columns in ends]


def _stored(chunks):
    files = sorted({file for file, _, _ in chunks.places.values()})
    return {
        "chunk": list(chunks.chunk),
        "files": [f"{file[: file.rindex('/') + 5]}…" for file in files],
        "places": [
            [files.index(file), offset, size]
            for _, (file, offset, size) in sorted(chunks.places.items())
        ],
    }


def _ranges(places):
    """[file, first byte, end] of the places, with neighbours joined."""
    joined = []
    for file, offset, size in sorted(places):
        if joined and joined[-1][0] == file and joined[-1][2] == offset:
            joined[-1][2] += size
        else:
            joined.append([file, offset, offset + size])
    return joined


def _name(data, layout):
    mesh = data["meshes"][layout[0]]
    name = f"{mesh['label']}, {mesh['specs'][layout[1]]}"
    return f"<code>{escape(name)}</code>"


def _box(x, y, width, height):
    return f'x="{x}" y="{y}" width="{width}" height="{height}"'
