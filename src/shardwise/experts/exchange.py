"""Meanings of `marks.experts` inside a manual region: values with a hash, as JAX's caches need."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardwise import marks
from shardwise.experts import dispatch, ragged_exchange


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A meaning of `marks.experts`: its form, the axis that cuts experts, the sequence's axis."""

    form: str
    axis: str | None
    sequence: str | None = None

    def __call__(
        self,
        x: jax.Array,
        chosen: jax.Array,
        weights: jax.Array,
        apply: Callable,
        stacked: Any,
        experts: int,
        capacity: float | None = None,
        index: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """(y, kept) of `marks.experts`; raises ValueError for experts that do not fit the axis."""
        n = 1 if self.axis is None else jax.lax.axis_size(self.axis)
        dispatch.check(x, chosen, weights, stacked, experts, n, self.axis or "")
        slot, size, kept = None, None, jnp.ones(chosen.shape, bool)
        if capacity is not None:
            slot, size, kept = self._slots(chosen, experts, capacity, index)
        if self.form == "ragged":
            wanted = jnp.where(kept, chosen, experts)
            y = self._in_slices(x, wanted, weights, apply, stacked, size)
        elif self.form == "all_to_all" and size is not None:
            y = self._sent(x, chosen, weights, apply, stacked, slot, size)
        else:
            y = self._gathered(x, chosen, weights, apply, stacked, slot, size)
        return y, kept

    def _slots(self, chosen, experts, capacity, index):
        """(slot of each choice in this device's buffers, their size, whether it is kept)."""
        b, s, k = chosen.shape
        parts = 1 if self.sequence is None else jax.lax.axis_size(self.sequence)
        allowed = dispatch.slots(capacity, s * parts, k, experts)
        if self.sequence is None:
            place = dispatch.queued(chosen, experts, index)
            return place, allowed, place < allowed
        index = marks.index("sequence", s)[None] if index is None else index
        index = jnp.broadcast_to(index, (b, s))
        whole = [_gathered(v, self.sequence, 1) for v in (chosen, index)]
        start = jax.lax.axis_index(self.sequence) * s
        place = dispatch.queued(whole[0], experts, whole[1])
        kept = jax.lax.dynamic_slice_in_dim(place, start, s, axis=1) < allowed
        here = dispatch.queued(jnp.where(kept, chosen, experts), experts)
        return here, min(allowed, s), kept

    def _sent(self, x, chosen, weights, apply, stacked, slot, size):
        """The experts' outputs by buffers [experts, rows·size, e], sent block by block and back."""
        n = dispatch.leading(stacked) * jax.lax.axis_size(self.axis)
        buffers = dispatch.packed(x, chosen, slot, n, size)
        arrived = jax.lax.all_to_all(buffers, self.axis, 0, 1, tiled=True)
        made = apply(stacked, arrived)
        buffers = jax.lax.all_to_all(made, self.axis, 1, 0, tiled=True)
        return dispatch.combined(buffers, chosen, slot, weights)

    def _in_slices(self, x, chosen, weights, apply, stacked, size):
        """The experts' outputs by slices: choices sorted by expert, to their devices, and back."""
        (b, s, k), held = chosen.shape, dispatch.leading(stacked)
        n, me = jax.lax.axis_size(self.axis), jax.lax.axis_index(self.axis)
        order, sizes = dispatch.by_expert(chosen, n * held)
        counts = jax.lax.all_gather(sizes, self.axis)  # [devices, experts]
        most = ragged_exchange.most_rows(b, s, k, held, size)
        way = ragged_exchange.Way(self.axis, order.size, most)
        arrived = ragged_exchange.exchange(way, x.reshape(b * s, -1)[order // k], counts)
        groups = jnp.sum(counts, axis=0).reshape(n, held)[me]
        found = ragged_exchange.exchange(way.back(), apply(stacked, arrived, groups), counts)
        return dispatch.weighted(dispatch.in_place(found, order, chosen.shape), weights)

    def _gathered(self, x, chosen, weights, apply, stacked, slot, size):
        """The experts' outputs by gathering all tokens of the axis, and scattering the sums."""
        if self.axis is not None:
            first = jax.lax.axis_index(self.axis) * dispatch.leading(stacked)
            x, chosen, weights = (_gathered(v, self.axis, 0) for v in (x, chosen, weights))
            slot = None if slot is None else _gathered(slot, self.axis, 0)
            here = (chosen >= first) & (chosen < first + dispatch.leading(stacked))
            chosen = jnp.where(here, chosen - first, -1)
        if size is None:
            y = dispatch.weighted(dispatch.grouped(x, chosen, apply, stacked), weights)
        else:
            buffers = dispatch.packed(x, chosen, slot, dispatch.leading(stacked), size)
            y = dispatch.combined(apply(stacked, buffers), chosen, slot, weights)
        if self.axis is None:
            return y
        return jax.lax.psum_scatter(y, self.axis, scatter_dimension=0, tiled=True)


def all_to_all(axis: str, sequence: str | None = None) -> Exchange:
    """The Exchange of tokens to their experts over `axis`, in buffers of the capacity, and back.

    Without a capacity a buffer has to be as large as the worst case, in which all tokens go to one
    device: what an all-gather sends. Then this is `gather`; `ragged` sends less on TPUs and GPUs.
    """
    return Exchange("all_to_all", axis, sequence)


def ragged(axis: str, sequence: str | None = None) -> Exchange:
    """The Exchange of as many rows over `axis` as tokens chose experts, and back; for no capacity.

    With n devices and k experts a token that is n/k times less than `gather` sends, for an even
    router. What arrives stands in a buffer for the worst case, however little it is: for
    rows·tokens·min(k, experts held) from each device. With a capacity it is smaller, and choices
    that are dropped are not sent.

    On TPUs and GPUs rows travel by `jax.lax.ragged_all_to_all`. XLA:CPU has none: there each device
    sends each other a block as large as the worst case, to the same effect. The programs for TPUs
    were compiled by Google's compiler; they have not been run on one.
    """
    return Exchange("ragged", axis, sequence)


def gather(axis: str, sequence: str | None = None) -> Exchange:
    """The Exchange that gathers all tokens of `axis`, runs each device's experts on those that
    chose them, and reduce-scatters the sums: for a capacity·k above the number of devices, and for
    none.
    """
    return Exchange("gather", axis, sequence)


def local(sequence: str | None = None) -> Exchange:
    """The Exchange where every device has all experts, and the axis `sequence` cuts the sequence:
    nothing but the choices travels, and with a capacity who is dropped is decided from the whole
    row.
    """
    return Exchange("local", None, sequence)


def _gathered(x, axis, along):
    return jax.lax.all_gather(x, axis, axis=along, tiled=True)
