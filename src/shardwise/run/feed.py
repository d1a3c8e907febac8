"""The batches of a run: rows of a dataset, or whole batches of an iterator.

Both kinds have `go(first, last)`, the batches of these steps over the devices; `whole`, a recent
step's as NumPy arrays; `some` rows of the first, and their `fingerprint`; and `state`, the position
after a step, to `restore` where it is not None.
"""

import functools
import zlib
from collections.abc import Iterator
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise.layouts import Layout

_READ = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)


class Feed:
    """The batches of a dataset: step k (from 1) has the rows (k-1)·batch to k·batch, in order, and
    each process reads those that its own devices need. No position has to be saved.
    """

    def __init__(self, dataset: grain.MapDataset, batch: int, layout: Layout):
        self._dataset, self._batch, self._sharding = dataset, batch, sharding(layout, batch)
        found = self._sharding.addressable_devices_indices_map((batch,)).values()
        self._mine = np.unique([np.arange(batch)[index] for index in found]).tolist()

    @functools.cached_property
    def some(self) -> Any:
        return self._read(1, range(4))

    def whole(self, step: int) -> Any:
        return self._read(step, range(self._batch))

    def fingerprint(self) -> int:
        return zlib.crc32(b"".join(x.tobytes() for x in jax.tree.leaves(self.some)))

    def go(self, first: int, last: int) -> Iterator[Any]:
        steps = grain.MapDataset.range(first, last + 1)
        read = steps.map(lambda step: self._read(int(step), self._mine)).to_iter_dataset(_READ)
        return (_placed(x, self._batch, self._sharding) for x in read)

    def state(self, step: int) -> None:
        return None

    def _read(self, step, rows):
        found = [self._dataset[(step - 1) * self._batch + row] for row in rows]
        if any(row is None for row in found):
            raise ValueError(
                f"run.train: of the rows of step {step} a filter has left some out, and a step has "
                f"the rows of its places: filter before the places are given, or hand over an "
                f"iterator of batches."
            )
        return jax.tree.map(lambda *each: np.stack(each), *found)


class Stream:
    """Whole batches from an iterator that knows its position; every process reads all of each."""

    def __init__(self, batches: Any, batch: int, layout: Layout):
        self._batches = iter(batches)
        if not all(hasattr(self._batches, name) for name in ("get_state", "set_state")):
            raise TypeError(
                f"run.train: batches is a {type(batches).__name__} without get_state and "
                f"set_state, so that a run could not go on from where it was; hand over a "
                f"grain.MapDataset of rows, or a Grain iterator of batches."
            )
        start = self._batches.get_state()
        self.some = next(self._batches)
        self.restore(start)
        self._held = {}  # step: its batch, and the position after it
        self._batch, self._sharding = batch, sharding(layout, batch)
        found = {len(x) for x in jax.tree.leaves(self.some)}
        if found != {batch}:
            raise ValueError(
                f"run.train: the batches have {sorted(found)} rows, and settings.batch says "
                f"{batch}; make them equal."
            )

    def whole(self, step: int) -> Any:
        return self._held[step][0]

    def fingerprint(self) -> None:
        return None  # what has been read does not come again

    def go(self, first: int, last: int) -> Iterator[Any]:
        for step in range(first, last + 1):
            self._held.setdefault(step - 1, (None, self._batches.get_state()))
            batch = next(self._batches)
            self._held[step] = batch, self._batches.get_state()
            self._held.pop(step - 4, None)  # a bad step is known a step later
            yield _placed(batch, self._batch, self._sharding)

    def state(self, step: int) -> Any:
        return self._held[step][1]

    def restore(self, state: Any) -> None:
        self._batches.set_state(state)


def feed(batches: Any, batch: int, layout: Layout) -> Feed | Stream:
    """The batches of a run, from a `grain.MapDataset` of rows or an iterator of whole batches."""
    return (Feed if isinstance(batches, grain.MapDataset) else Stream)(batches, batch, layout)


def sharding(layout: Layout, batch: int) -> NamedSharding:
    """The NamedSharding of rows, cut contiguously; a ValueError where they do not divide."""
    parts = layout.exact or layout.parts(layout.rows) * layout.microbatches
    if batch % parts:
        what = "blocks" if layout.exact else f"parts, {layout.microbatches} on each device"
        raise ValueError(
            f"run: a batch of {batch} rows does not split into {parts} {what}; take "
            f"{-(-batch // parts) * parts}, say."
        )
    return NamedSharding(layout.auto, P(layout.rows or None))


def _placed(local, batch, sharding):
    """The global arrays of a batch, of which `local` has this process's rows, or all."""
    place = jax.make_array_from_process_local_data
    return jax.tree.map(lambda x: place(sharding, x, (batch, *x.shape[1:])), local)
