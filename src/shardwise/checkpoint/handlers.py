"""The handler by which Orbax writes trees: with checksums of all chunks, before a step appears."""

import orbax.checkpoint as ocp

from shardwise.checkpoint import digests

METADATA = "shardwise"  # the key of ours among an item's own metadata, in Orbax's _METADATA


class Handler(ocp.StandardCheckpointHandler):
    """Orbax's handler of trees, which also writes checksums beside what each process writes."""

    async def async_save(self, directory, *args, **kwargs):
        futures = await super().async_save(directory, *args, **kwargs)
        # A path that is still to be created has the path inside.
        written = str(getattr(directory, "path", directory))
        return [ocp.future.ChainedFuture(futures or [], lambda: digests.write(written))]

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
