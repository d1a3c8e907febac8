"""The explorer of restoring: which bytes of which file a target device reads."""

import itertools
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

from jax.sharding import Sharding

from shardwise_book.figures import svg
from shardwise_book.figures.interactive import RESULT, Control, Interactive, explorer, said
from shardwise_book.figures.pieces import ITEMSIZE, pieces

if TYPE_CHECKING:  # drawing needs no checkpoints
    from shardwise.checkpoint import Chunks

Layouts = Mapping[str, Mapping[str, Sharding]]
Saved = Mapping[str, Mapping[tuple[str, str], "Chunks"]]
_SHOWN = 3  # byte ranges in the words; a device may read many


def resharding_explorer(
    layouts: Layouts, saved: Saved, source: tuple[str, str], goal: tuple[str, str]
) -> Interactive:
    """Choose what a checkpoint was saved from, and onto what it is restored; see what is read.

    `layouts` maps the name of a mesh to {spec as text: NamedSharding}; `saved` maps the name of a
    limit on chunks to {(mesh, spec as text): `checkpoint.Chunks`}, one for each layout, all of one
    float32 array of two axes. The figure first shows the layouts `source` and `goal`, each a (mesh,
    spec as text).
    """
    rows, columns = shape = tuple(next(iter(saved.values()))[source].shape)

    def reads(stored, held):
        """The numbers of the chunks that each device touches."""
        return [stored.touched((slice(t, b), slice(x, r))) for t, b, x, r in held]

    def source_words(mesh0, spec0, stored):
        high, wide = stored.chunk
        return (
            f"Saved from <code>{escape(f'{mesh0}, {spec0}')}</code>: "
            f"{said('chunks', len(stored.places))} chunks of {said('chunk', f'{high}×{wide}')} "
            f"elements."
        )

    def goal_words(mesh1, spec1, held, device):
        return (
            f"Restored onto <code>{escape(f'{mesh1}, {spec1}')}</code>: device {device} holds "
            f"{said('block', held[device].words)}, {said('held', held[device].size * ITEMSIZE)} "
            f"bytes,"
        )

    def read_words(stored, reads, device):
        ranges = joined([stored.places[chunk] for chunk in reads[device]])
        shown = [f"bytes {a:,} to {b:,} of {escape(_file(f))}" for f, a, b in ranges[:_SHOWN]]
        shown += [f"and {len(ranges) - _SHOWN} more"] if len(ranges) > _SHOWN else []
        size = [sum(stored.places[chunk][2] for chunk in chunks) for chunks in reads]
        return (
            f"touches {said('touched', len(reads[device]))} chunks and reads "
            f"{said('read', size[device])} bytes as stored ({'; '.join(shown)}). The whole mesh "
            f"reads {said('all', sum(size))} bytes."
        )

    def in_array(stored):
        """The box of each chunk."""
        high, wide = stored.chunk
        return {at: (at[1] * wide, at[0] * high, wide, high) for at in stored.places}

    def in_files(stored):
        """That of each chunk in its file, which is a strip of its chunks, in their order."""
        found = {}
        for number, inside in enumerate(_strips(stored).values()):
            edges = [10 + 300 * i // len(inside) for i in range(len(inside) + 1)]
            for chunk, (x, end) in zip(inside, itertools.pairwise(edges), strict=True):
                found[chunk] = x, 60 * number + 40, end - x, 26
        return found

    def filled(boxes, reads, device):
        return svg.path((boxes[chunk] for chunk in reads[device]), svg.device(device), "")

    def files(stored, in_files):
        for number, (name, inside) in enumerate(_strips(stored).items()):
            _, first, size = stored.places[inside[-1]]
            yield svg.text(10, 60 * number + 30, f"{_file(name)}, {first + size:,} bytes")
        yield svg.path(in_files.values())

    controls = {
        "mesh0": Control("Saved from mesh", list(layouts)),
        "spec0": Control("Saved spec", lambda mesh0: list(layouts[mesh0])),
        "limit": Control("Chunks", list(saved)),
        "mesh1": Control("Restored onto mesh", list(layouts)),
        "spec1": Control("Restored spec", lambda mesh1: list(layouts[mesh1])),
        "device": Control("Device", lambda held: range(len(held)), "range"),
    }
    start = {}
    for end, (mesh, spec) in enumerate((source, goal)):
        start[f"mesh{end}"] = list(layouts).index(mesh)
        start[f"spec{end}"] = list(layouts[mesh]).index(spec)
    strips = max(len(_strips(one)) for listed in saved.values() for one in listed.values())
    sides = svg.text(30 + columns / 2, 20, f"{columns} columns", "middle")
    turned = f'transform="translate(20 {30 + rows / 2:g}) rotate(-90)"'
    sides += svg.text(0, 0, f"{rows} rows", "middle", turned)
    groups = "".join(f'<g id="@{name}"></g>' for name in ("read", "chunks", "frame"))
    inside = f'{sides}<g transform="translate(30 30)">{groups}</g>'
    alt = "The array, its chunks, and the block that the device holds"
    array = svg.picture("", max(columns + 60, 300), rows + 40, alt, inside)
    inside = '<g id="@read_bytes"></g><g id="@files"></g>'
    alt = "The files, and the bytes that the device reads"
    strip = svg.picture("", 330, 60 * strips + 30, alt, inside)
    words = " ".join(f'<span id="@{name}_words"></span>' for name in ("source", "goal", "read"))
    layout = f'<div class="pictures">{array}{strip}</div>{RESULT.replace("></", f">{words}</")}'
    bold = svg.EDGE + ' stroke-width="5"'
    made = {
        "stored": lambda mesh0, spec0, limit: saved[limit][mesh0, spec0],
        "held": lambda mesh1, spec1: pieces(layouts[mesh1][spec1], shape),
        "read": lambda in_array, reads, device: filled(in_array, reads, device),
        "read_bytes": lambda in_files, reads, device: filled(in_files, reads, device),
        "chunks": lambda in_array: svg.path(in_array.values()),
        "frame": lambda held, device: svg.box(*held[device].box(), more=bold),
    }
    functions = reads, in_array, in_files, source_words, goal_words, read_words, files
    return explorer(controls, layout, *functions, start=start, **made)


def joined(places: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """(file, first byte, end) of (file, first byte, bytes), with neighbours joined."""
    found: list[tuple[str, int, int]] = []
    for file, offset, size in sorted(places):
        if found and found[-1][0] == file and found[-1][2] == offset:
            found[-1] = file, found[-1][1], offset + size
        else:
            found.append((file, offset, offset + size))
    return found


def _strips(stored):
    """{file: its chunks}, all in their order."""
    found = {}
    for chunk, (file, *_) in sorted(stored.places.items(), key=lambda one: one[1]):
        found.setdefault(file, []).append(chunk)
    return found


def _file(name):
    """A file of Orbax has a long name, of which the beginning tells enough."""
    return f"{name[: name.rindex('/') + 5]}…"
