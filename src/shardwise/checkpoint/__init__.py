"""Checkpoints that restore onto any mesh, written and read by Orbax's CheckpointManager.

A state is a dict of items, such as `{"params": ..., "opt_state": ..., "rng": key, "data": ...}`,
each of which can be read on its own. Arrays are stored by the paths and in the shapes that the
model gave them, whatever layout wrote them, in Orbax's format, which its own tools read. Beside
them lie a checksum of each chunk, and the lock of the one program that saves there. A path on a
bucket (`gs://...`) goes to Orbax as it is, without lock and checksums; only local disks were tried.
"""

from shardwise.checkpoint.chunks import Chunks
from shardwise.checkpoint.restoring import latest, restore, stored
from shardwise.checkpoint.saving import save, wait

__all__ = ["Chunks", "latest", "restore", "save", "stored", "wait"]
