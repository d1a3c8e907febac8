"""Chunks of arrays on disk, and the checksums by which each process checks those that it reads.

Chunks below a kilobyte lie in TensorStore's index, which has checksums of its own.
"""

import itertools
import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
import tensorstore

from shardwise.checkpoint.items import flat, stored_name

METADATA = "shardwise"  # the key of ours among an item's own metadata, in Orbax's _METADATA
_FOLDER = "digests"


class Chunks(NamedTuple):
    """The chunks in which one array is stored: its `shape`, a `chunk`'s, and their `places`.

    `places` maps a chunk's numbers along all axes, a tuple, to (file, offset, bytes) in the item's
    directory. Chunks are compressed, those at an array's end padded; one whose bytes are below a
    kilobyte lies in the index, and has no place.
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    places: dict[tuple[int, ...], tuple[str, int, int]]

    def touched(self, index: tuple[slice, ...]) -> list[tuple[int, ...]]:
        """A list of the chunks that `array[index]` lies in, each by its numbers, as in `places`.

        `index` is a tuple of slices of step 1, for all axes or the first ones.
        """
        whole, layers = slice(None), []
        cuts = itertools.zip_longest(index, self.shape, self.chunk, fillvalue=whole)
        for cut, size, width in cuts:
            start, stop, _ = cut.indices(size)
            layers.append(range(start // width, -(-stop // width)))
        return list(itertools.product(*layers))


def chunks_of(metadata, places):
    """{path: Chunks} of the arrays that Orbax's metadata names."""
    return {
        path: Chunks(
            tuple(leaf.shape), tuple(leaf.storage.chunk_shape), places.get(stored_name(path), {})
        )
        for path, leaf in flat(metadata).items()
        if getattr(leaf, "storage", None) is not None
    }


def places(folder):
    """{name on disk: {chunk: its place}} in one of TensorStore's databases."""
    files = tensorstore.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()
    versions = tensorstore.ocdbt.dump(files).result()["versions"]
    found, nodes = {}, [versions[-1]["root"]["location"]]
    while nodes:
        for entry in tensorstore.ocdbt.dump(files, nodes.pop()).result()["entries"]:
            if "location" in entry:
                nodes.append(entry["location"])
            elif "indirect_value" in entry:  # such as "value:ocdbt.process_0/:d/1f5c:4106:2058"
                _, base, file, offset, size = entry["indirect_value"].split(":")
                name, chunk = entry["key"].decode().rsplit("/", 1)
                where = tuple(map(int, chunk.split(".")))
                found.setdefault(name, {})[where] = base + file, int(offset), int(size)
    return found


def write_sums(item: str) -> None:
    """Write the checksums of the chunks of an item, a directory, that this process wrote."""
    mine = Path(item, f"ocdbt.process_{jax.process_index()}")
    if not mine.exists():
        return
    found = {
        name: {_text(chunk): _crc(mine, place) for chunk, place in chunks.items()}
        for name, chunks in places(mine).items()
    }
    file = Path(item, _FOLDER, f"{jax.process_index()}.json")
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(found))


def read_sums(label: str, item: str) -> dict[str, dict[tuple[int, ...], tuple]]:
    """{name on disk: {chunk: (its place, its checksum)}}; empty where no checksums were written."""
    folder, sums = Path(item, _FOLDER), {}
    if not folder.exists():
        return {}
    try:
        for file in folder.iterdir():
            for name, each in json.loads(file.read_text()).items():
                sums.setdefault(name, {}).update(each)
        return {
            name: {c: (place, sums.get(name, {}).get(_text(c))) for c, place in chunks.items()}
            for name, chunks in places(item).items()
        }
    except ValueError as error:
        told = f"item {Path(item).name!r} has no readable index. Restore another step. {error}"
        raise ValueError(f"{label} is damaged: {told}") from error


def check_sums(label: str, item: str, stored: dict[str, Chunks], leaves: dict[str, Any]) -> None:
    """Compare the chunks that this process's devices touch of `leaves` with their checksums."""
    wanted = {}
    for path in sorted(leaves.keys() & stored.keys()):
        leaf, blocks, places = leaves[path], [()], stored[path].places
        if (sharding := getattr(leaf, "sharding", None)) is not None:
            blocks = sharding.addressable_devices_indices_map(leaf.shape).values()
        touched = {chunk for block in blocks for chunk in stored[path].touched(block)}
        wanted |= {(path, chunk): places[chunk] for chunk in sorted(touched & places.keys())}
    with ThreadPoolExecutor() as threads:
        found = threads.map(lambda each: _crc(item, each[0]), wanted.values())
        for ((path, chunk), (_, saved)), digest in zip(wanted.items(), found, strict=True):
            if digest != saved:
                raise damaged(label, f"of {Path(item).name}, chunk {chunk} of {path}")


def damaged(label: str, what: str) -> ValueError:
    """The error of `what` was read and is not what was saved."""
    told = "is not what was saved, by its checksum. Restore another step."
    return ValueError(f"{label} is damaged: {what} {told}")


def _crc(folder, place):
    file, offset, size = place
    with open(Path(folder, file), "rb") as data:
        data.seek(offset)
        return zlib.crc32(data.read(size))


def _text(chunk):
    return ".".join(map(str, chunk))


class Handler(ocp.StandardCheckpointHandler):
    """Orbax's handler of trees, which also writes checksums beside what each process writes."""

    typestr = ocp.StandardCheckpointHandler.typestr  # so that Orbax alone reads our steps

    async def async_save(self, directory, *args, **kwargs):
        futures = await super().async_save(directory, *args, **kwargs)
        # A path that is still to be created has the path inside.
        written = str(getattr(directory, "path", directory))
        return [ocp.future.ChainedFuture(futures or [], lambda: write_sums(written))]
