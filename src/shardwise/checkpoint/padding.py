"""How Orbax writes trees here: padding cut off and checksums written, before a step appears."""

import json
from typing import Any

import orbax.checkpoint as ocp
import tensorstore

from shardwise.checkpoint import digests
from shardwise.checkpoint.items import is_bucket, stored_name

METADATA = "shardwise"  # the key of ours among an item's own metadata, in Orbax's _METADATA


class Handler(ocp.StandardCheckpointHandler):
    """Orbax's own, but arrays get the true shapes that their item's metadata tells.

    Devices write their shards as they lie, with padding; what is beyond the true shape goes when
    all have written, and the step is renamed after that: no step with padding is ever complete.
    """

    async def async_save(self, directory, *args, **kwargs):
        futures = await super().async_save(directory, *args, **kwargs)
        # A path that is still to be created has the path inside.
        written = str(getattr(directory, "path", directory))
        return [ocp.future.ChainedFuture(futures or [], lambda: digests.write(written))]

    def finalize(self, directory):
        super().finalize(directory)
        trim(directory)

    @classmethod
    def typestr(cls) -> str:
        """Orbax's name, so that it reads our steps without us."""
        return ocp.StandardCheckpointHandler.typestr()


def registry() -> ocp.handlers.CheckpointHandlerRegistry:
    """What a CheckpointManager that saves needs to know of our kinds of items."""
    handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handlers.add(None, ocp.args.StandardSave, Handler)
    handlers.add(None, ocp.args.JsonSave, ocp.JsonCheckpointHandler)
    return handlers


def trim(item: Any) -> None:
    """Give the arrays of an item, a directory as Orbax has it, their true shapes."""
    base = str(item) if is_bucket(str(item)) else f"file://{item}"
    metadata = json.loads((item / "_METADATA").read_text())["custom_metadata"]
    for path, shape in metadata[METADATA]["shapes"].items():
        where = {"driver": "ocdbt", "base": f"{base}/", "path": f"{stored_name(path)}/"}
        array = tensorstore.open({"driver": "zarr", "kvstore": where}).result()
        array.resize(exclusive_max=[*shape, *array.shape[len(shape) :]], shrink_only=True).result()
