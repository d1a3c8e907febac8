"""Checksums of what lies on disk, chunk by chunk, so that whoever reads a part can check it.

The layout that restores does not matter: a process checks the chunks that its devices touch, each
of which was written by one process. Chunks below a kilobyte lie in TensorStore's index, which
carries checksums of its own. On a bucket there are none.
"""

import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from shardwise.checkpoint.items import is_bucket, stored_name
from shardwise.checkpoint.stored import Chunks, chunks_of, places

_FOLDER = "digests"


def write(item: str) -> None:
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


def read(label: str, item: str) -> Written | None:
    """The `Written` of an item, a directory; None if it has no checksums.

    Raises:
      ValueError: the index or the checksums cannot be read.
    """
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


def check(
    label: str, item: str, written: Written, leaves: dict[str, Any], metadata: dict[str, Any]
) -> None:
    """Read the chunks that this process's devices touch, and compare their checksums.

    `leaves` and `metadata` have an abstract array and Orbax's words on it for each path.

    Raises:
      ValueError: a chunk is not what was written.
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
