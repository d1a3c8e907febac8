"""The chunks of each array on disk, and the bytes of the file that hold them."""

import itertools
import os
from pathlib import Path
from typing import Any, NamedTuple

import tensorstore

from shardwise.checkpoint.items import address, flat, stored_name
from shardwise.checkpoint.steps import reader


class Chunks(NamedTuple):
    """The chunks in which one array is stored.

    `places` maps the number of a chunk along each axis to (file, offset, bytes), the file's path
    relative to the item's directory. Chunks are compressed, those at an array's end padded. One
    that comes to less than a kilobyte lies in TensorStore's index itself, and has no place.
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    places: dict[tuple[int, ...], tuple[str, int, int]]

    def touched(self, index: tuple[slice, ...]) -> list[tuple[int, ...]]:
        """The chunks that a block of the array touches; `index` is a slice for each axis."""
        layers = []
        for cut, size, width in zip(index, self.shape, self.chunk, strict=True):
            start, stop, _ = cut.indices(size)
            layers.append(range(start // width, -(-stop // width)))
        return list(itertools.product(*layers))


def stored(directory: str | os.PathLike, step: int, item: str) -> dict[str, Chunks]:
    """{path: Chunks} of an item's arrays, from Orbax's metadata and TensorStore's index.

    For local directories.
    """
    where = address(directory)
    # Of an item without a handler Orbax warns that it could not be restored.
    others = [path.name for path in Path(where, str(step)).glob("*/")]
    with reader(where, dict.fromkeys(others, False) | {item: True}) as manager:
        leaves = flat(manager.item_metadata(step)[item].tree)
        there = places(str(manager.directory / str(step) / item))
    return {
        path: chunks_of(leaf, there.get(stored_name(path), {}))
        for path, leaf in leaves.items()
        if getattr(leaf, "storage", None) is not None
    }


def chunks_of(metadata: Any, places: dict) -> Chunks:
    """`Chunks` of an array from Orbax's words on it."""
    return Chunks(tuple(metadata.shape), tuple(metadata.storage.chunk_shape), places)


def places(folder: str | Path) -> dict[str, dict[tuple[int, ...], tuple[str, int, int]]]:
    """{name on disk: {chunk: its place}} of all arrays in one of TensorStore's databases."""
    files = tensorstore.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()
    versions = tensorstore.ocdbt.dump(files).result()["versions"]
    found, nodes = {}, [versions[-1]["root"]["location"]]
    while nodes:
        for entry in tensorstore.ocdbt.dump(files, nodes.pop()).result()["entries"]:
            if "location" in entry:
                nodes.append(entry["location"])
            elif "indirect_value" in entry:
                name, chunk = entry["key"].decode().rsplit("/", 1)
                where = tuple(map(int, chunk.split(".")))
                found.setdefault(name, {})[where] = _place(entry["indirect_value"])
    return found


def _place(location):
    """(file, offset, bytes) of a location such as "value:ocdbt.process_0/:d/1f5c:4106:2058"."""
    _, base, name, offset, size = location.split(":")
    return base + name, int(offset), int(size)
