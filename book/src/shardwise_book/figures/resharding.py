"""The explorer of restoring: which bytes of which file a target device reads."""

import functools
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

from jax.sharding import Sharding

from shardwise_book.figures import palette, svg
from shardwise_book.figures.interactive import RESULT, Control, Interactive, explorer, said
from shardwise_book.figures.mesh import blocks

if TYPE_CHECKING:  # drawing needs no checkpoints
    from shardwise.checkpoint import Chunks

Layouts = Mapping[str, Mapping[str, Sharding]]
Saved = Mapping[str, Mapping[tuple[str, str], "Chunks"]]
ITEMSIZE = 4  # float32
_SHOWN = 3  # byte ranges in the words; a device may read many


def resharding_explorer(
    layouts: Layouts,
    saved: Saved,
    source: tuple[str, str],
    goal: tuple[str, str],
) -> Interactive:
    """Choose what a checkpoint was saved from, and onto what it is restored; see what is read.

    `layouts` maps the name of a mesh to {spec as text: NamedSharding}; `saved` maps the name of a
    limit on chunks to {(mesh, spec as text): `checkpoint.Chunks`}, one for each layout, all of one
    float32 array of two axes. The figure first shows the layouts `source`
    and `goal`, each a (mesh, spec as text).
    """
    meshes = {name: name for name in layouts}
    rows, columns = shape = tuple(next(iter(saved.values()))[source].shape)

    @functools.cache
    def held(mesh, spec):
        return blocks(layouts[mesh][spec], shape)

    @functools.cache
    def reads(mesh0, spec0, limit, mesh1, spec1):
        """The numbers of the chunks that each device touches."""
        stored = saved[limit][mesh0, spec0]
        cuts = [(slice(t, b), slice(x, r)) for t, b, x, r in held(mesh1, spec1)]
        return [stored.touched(cut) for cut in cuts]

    def result(mesh0, spec0, limit, mesh1, spec1, device):
        stored, read = saved[limit][mesh0, spec0], reads(mesh0, spec0, limit, mesh1, spec1)
        high, wide = stored.chunk
        top, bottom, left, right = held(mesh1, spec1)[device]
        ranges = joined([stored.places[chunk] for chunk in read[device]])
        shown = [f"bytes {a:,} to {b:,} of {escape(_file(f))}" for f, a, b in ranges[:_SHOWN]]
        shown += [f"and {len(ranges) - _SHOWN} more"] if len(ranges) > _SHOWN else []
        size = [sum(stored.places[chunk][2] for chunk in chunks) for chunks in read]
        block = f"[{top}:{bottom}, {left}:{right}]"
        source, goal = (f"<code>{escape(f'{m}, {s}')}</code>"
                        for m, s in ((mesh0, spec0), (mesh1, spec1)))  # fmt: skip
        return (
            f"Saved from {source}: {said('chunks', len(stored.places))} chunks of "
            f"{said('chunk', f'{high}×{wide}')} elements. Restored onto {goal}: device {device} "
            f"holds {said('block', block)}, "
            f"{said('held', (bottom - top) * (right - left) * ITEMSIZE)} bytes, touches "
            f"{said('touched', len(read[device]))} chunks and reads {said('read', size[device])} "
            f"bytes as stored ({'; '.join(shown)}). The whole mesh reads {said('all', sum(size))} "
            f"bytes."
        )

    def array(mesh0, spec0, limit, mesh1, spec1, device):
        stored = saved[limit][mesh0, spec0]
        high, wide = stored.chunk
        touched = reads(mesh0, spec0, limit, mesh1, spec1)[device]
        places = {chunk: (chunk[1] * wide, chunk[0] * high, wide, high) for chunk in stored.places}
        top, bottom, left, right = held(mesh1, spec1)[device]
        frame = [(left, top, right - left, bottom - top)]
        return _boxes(places, touched, device) + svg.path(frame, more='stroke-width="5"')

    def file(mesh0, spec0, limit, mesh1, spec1, device):
        stored = saved[limit][mesh0, spec0]
        touched = reads(mesh0, spec0, limit, mesh1, spec1)[device]
        drawn, places = "", {}
        for number, name in enumerate(sorted({name for name, *_ in stored.places.values()})):
            inside = {chunk: at for chunk, (found, *at) in stored.places.items() if found == name}
            size = max(offset + length for offset, length in inside.values())
            drawn += svg.text(
                10, 60 * number + 30, f"{_file(name)}, {size:,} bytes", more='stroke="none"'
            )
            for chunk, (offset, length) in inside.items():
                x, end = offset * 300 // size, (offset + length) * 300 // size
                places[chunk] = 10 + x, 60 * number + 40, end - x, 26
        return drawn + _boxes(places, touched, device)

    controls = {
        "mesh0": Control("Saved from mesh", meshes),
        "spec0": Control("Saved spec", lambda mesh0: {spec: spec for spec in layouts[mesh0]}),
        "limit": Control("Chunks", {limit: limit for limit in saved}),
        "mesh1": Control("Restored onto mesh", meshes),
        "spec1": Control("Restored spec", lambda mesh1: {spec: spec for spec in layouts[mesh1]}),
        "device": Control("Device", lambda mesh1, spec1: range(len(held(mesh1, spec1))), "range"),
    }
    start = {}
    for end, (mesh, spec) in enumerate((source, goal)):
        start[f"mesh{end}"] = list(layouts).index(mesh)
        start[f"spec{end}"] = list(layouts[mesh]).index(spec)
    files = max(
        len({f for f, *_ in s.places.values()})
        for all_of in saved.values()
        for s in all_of.values()
    )
    sides = svg.text(30 + columns / 2, 20, f"{columns} columns", "middle")
    turned = f'transform="translate(20 {30 + rows / 2:g}) rotate(-90)"'
    sides += svg.text(0, 0, f"{rows} rows", "middle", turned)
    inside = f'{sides}<g id="@array" {svg.EDGE} transform="translate(30 30)"></g>'
    alt = "The array, its chunks, and the block that the device holds"
    wide = max(columns + 60, 300)
    layout = (
        f'<div class="pictures">{svg.picture("", wide, rows + 40, alt, inside)}'
        + svg.picture("", 330, 60 * files + 30, "The files, and the bytes that the device reads",
              f'<g id="@file" {svg.EDGE}></g>')
        + f"</div>{RESULT}"
    )  # fmt: skip
    return explorer(controls, layout, {"result": result, "array": array, "file": file}, start)


def joined(places: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """(file, first byte, end) of (file, first byte, bytes), with neighbours joined."""
    found: list[tuple[str, int, int]] = []
    for file, offset, size in sorted(places):
        if found and found[-1][0] == file and found[-1][2] == offset:
            found[-1] = file, found[-1][1], offset + size
        else:
            found.append((file, offset, offset + size))
    return found


def _file(name):
    """A file of Orbax has a long name, of which the beginning tells enough."""
    return f"{name[: name.rindex('/') + 5]}…"


def _boxes(places, filled, device):
    """Each chunk's box, and those that are read filled with the device's colour."""
    read = svg.path((places[chunk] for chunk in filled), palette.device(device), "")
    return read + svg.path(places.values(), more="")
