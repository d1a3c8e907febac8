"""What lies on disk: the chunks of each array, and the bytes of the file that hold them."""

import itertools
from typing import NamedTuple

import orbax.checkpoint as ocp
import tensorstore

from shardwise.checkpoint.items import address, flat


class Chunks(NamedTuple):
    """How one array is stored.

    `places` maps the number of a chunk along each axis to (file, offset, bytes), the file's path
    relative to the item's directory. Chunks are compressed, those at an array's end padded.
    """

    shape: tuple
    chunk: tuple
    places: dict

    def touched(self, index):
        """The chunks that a block of the array touches; `index` is a slice for each axis."""
        layers = []
        for cut, size, width in zip(index, self.shape, self.chunk, strict=True):
            start, stop, _ = cut.indices(size)
            layers.append(range(start // width, -(-stop // width)))
        return list(itertools.product(*layers))


def stored(directory, step, item):
    """{path: Chunks} of an item's arrays, read from Orbax's metadata and TensorStore's index.

    TensorStore keeps arrays below a kilobyte inside its index: they are left out, and so are NumPy
    scalars. For local directories.
    """
    handlers = {item: ocp.PyTreeCheckpointHandler()}
    options = ocp.CheckpointManagerOptions(create=False, save_interval_steps=0)
    where = address(directory)
    with ocp.CheckpointManager(where, options=options, item_handlers=handlers) as manager:
        leaves = flat(manager.item_metadata(step)[item].tree)
        places = _places(str(manager.directory / str(step) / item))
    return {
        path: Chunks(tuple(leaf.shape), tuple(leaf.storage.chunk_shape), places[name])
        for path, leaf in leaves.items()
        if (name := path.replace("/", ".")) in places
    }


def _places(folder):
    files = tensorstore.KvStore.open({"driver": "file", "path": folder + "/"}).result()
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
