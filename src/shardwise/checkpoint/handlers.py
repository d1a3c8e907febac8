"""How Orbax writes trees here: with a checksum of each chunk, before a step appears."""

import orbax.checkpoint as ocp

from shardwise.checkpoint import digests

METADATA = "shardwise"  # the key of ours among an item's own metadata, in Orbax's _METADATA


class Handler(ocp.StandardCheckpointHandler):
    """Orbax's own, and checksums are written beside what each process writes."""

    async def async_save(self, directory, *args, **kwargs):
        futures = await super().async_save(directory, *args, **kwargs)
        # A path that is still to be created has the path inside.
        written = str(getattr(directory, "path", directory))
        return [ocp.future.ChainedFuture(futures or [], lambda: digests.write(written))]

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
