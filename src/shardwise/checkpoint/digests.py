"""Checksums of what lies on disk, chunk by chunk, so that whoever reads a part can check it.

The layout that restores does not matter: a process checks the chunks that its devices touch, each
of which was written by one process. Chunks below a kilobyte lie in TensorStore's index, which
carries checksums of its own. On a bucket there are none.
"""

import json
import zlib
from pathlib import Path
from typing import Any

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


def check(label: str, item: str, leaves: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Read the chunks that this process's devices touch, and compare them.

    `leaves` and `metadata` have an abstract array and Orbax's words on it for each path. A step
    that was written without checksums passes.

    Raises:
      ValueError: a chunk is not what was written.
    """
    if is_bucket(item) or not (Path(item) / _FOLDER).exists():
        return
    written = _written(label, Path(item) / _FOLDER)
    there = places(item)
    for path, leaf in leaves.items():
        name = stored_name(path)
        if name not in there:
            continue
        stored = chunks_of(metadata[path], there[name])
        for chunk in sorted(_touched(stored, leaf)):
            number = ".".join(map(str, chunk))
            if _crc(Path(item), stored.places[chunk]) != written.get(name, {}).get(number):
                raise ValueError(
                    f"{label} is damaged: of {Path(item).name}, chunk {chunk} of {path} is not "
                    f"what was saved, by its checksum. Restore another step."
                )


def _written(label, folder):
    found = {}
    for file in folder.iterdir():
        try:
            each = json.loads(file.read_text())
        except ValueError as error:
            raise ValueError(f"{label} is damaged: {file} is not JSON. {error}") from error
        for name, digests in each.items():
            found.setdefault(name, {}).update(digests)
    return found


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
