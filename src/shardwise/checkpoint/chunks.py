"""Chunks of arrays on disk, and their checksums, so that whoever reads a part can check it.

The layout that restores does not matter: a process checks the chunks that its devices touch, each
of which was written by one process. Chunks below a kilobyte lie in TensorStore's index, which
carries checksums of its own. On a bucket there are none.
"""

import itertools
import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
import tensorstore

from shardwise.checkpoint.items import address, flat, is_bucket, stored_name
from shardwise.checkpoint.steps import reader

METADATA = "shardwise"  # the key of ours among an item's own metadata, in Orbax's _METADATA
_FOLDER = "digests"


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


def write_sums(item: str) -> None:
    """Write the checksums of the chunks that this process wrote of an item, a directory."""
    if is_bucket(item):
        return
    process = jax.process_index()
    mine = Path(item) / f"ocdbt.process_{process}"
    if not mine.exists():
        return
    found = {
        name: {".".join(map(str, chunk)): _crc(mine, place) for chunk, place in chunks.items()}
        for name, chunks in places(mine).items()
    }
    (Path(item) / _FOLDER).mkdir(exist_ok=True)
    (Path(item) / _FOLDER / f"{process}.json").write_text(json.dumps(found))


class Written(NamedTuple):
    """The places of an item's chunks by its index, and their checksums, by names on disk."""

    places: dict[str, dict[tuple[int, ...], tuple[str, int, int]]]
    sums: dict[str, dict[str, int]]


def read_sums(label: str, item: str) -> Written | None:
    """The `Written` of an item, a directory; None if it has no checksums."""
    if is_bucket(item) or not (Path(item) / _FOLDER).exists():
        return None
    sums = {}
    try:
        for file in (Path(item) / _FOLDER).iterdir():
            for name, each in json.loads(file.read_text()).items():
                sums.setdefault(name, {}).update(each)
        return Written(places(item), sums)
    except ValueError as error:
        raise ValueError(
            f"{label} is damaged: item {Path(item).name!r} has no readable index. Restore another "
            f"step. {error}"
        ) from error


def check_sums(
    label: str, item: str, written: Written, leaves: dict[str, Any], metadata: dict[str, Any]
) -> None:
    """Read the chunks that this process's devices touch, and compare their checksums.

    `leaves` and `metadata` have an abstract array and Orbax's words on it for each path.
    """
    wanted = []
    for path, leaf in leaves.items():
        if there := written.places.get(stored_name(path)):
            chunks = _touched(chunks_of(metadata[path], there), leaf)
            wanted += [(path, chunk, there[chunk]) for chunk in sorted(chunks)]
    with ThreadPoolExecutor() as threads:
        found = threads.map(lambda each: _crc(Path(item), each[2]), wanted)
        for (path, chunk, _), digest in zip(wanted, found, strict=True):
            if digest != written.sums.get(stored_name(path), {}).get(".".join(map(str, chunk))):
                raise ValueError(
                    f"{label} is damaged: of {Path(item).name}, chunk {chunk} of {path} is not "
                    f"what was saved, by its checksum. Restore another step."
                )


def _touched(stored: Chunks, leaf):
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return stored.places.keys()
    more = [slice(None)] * (len(stored.shape) - len(leaf.shape))  # the bits of typed keys
    blocks = sharding.addressable_devices_indices_map(leaf.shape).values()
    touched = {chunk for block in blocks for chunk in stored.touched((*block, *more))}
    return touched & stored.places.keys()


def _crc(folder, place):
    file, offset, size = place
    with open(folder / file, "rb") as data:
        data.seek(offset)
        return zlib.crc32(data.read(size))


class Handler(ocp.StandardCheckpointHandler):
    """Orbax's handler of trees, which also writes checksums beside what each process writes."""

    async def async_save(self, directory, *args, **kwargs):
        futures = await super().async_save(directory, *args, **kwargs)
        # A path that is still to be created has the path inside.
        written = str(getattr(directory, "path", directory))
        return [ocp.future.ChainedFuture(futures or [], lambda: write_sums(written))]

    @classmethod
    def typestr(cls) -> str:
        """Orbax's own handler's name, so that Orbax reads our steps without this package."""
        return ocp.StandardCheckpointHandler.typestr()


def registry() -> ocp.handlers.CheckpointHandlerRegistry:
    """The handlers of our kinds of items, for a CheckpointManager that saves."""
    handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handlers.add(None, ocp.args.StandardSave, Handler)
    handlers.add(None, ocp.args.JsonSave, ocp.JsonCheckpointHandler)
    return handlers
