"""Slots that programs share: arrays of one shape and dtype lie in the same buffers."""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Key = tuple[tuple[int, ...], Any]


class Packing:
    """Buffers that hold any one of several lists of arrays, and how each list lies in them."""

    def __init__(self, lists: Iterable[Sequence[Any]]):
        most: collections.Counter = collections.Counter()
        for arrays in lists:
            most |= collections.Counter(map(_key, arrays))
        self.keys: list[Key] = [k for k in sorted(most, key=str) for _ in range(most[k])]

    @property
    def nbytes(self) -> int:
        """The bytes of one list's buffers."""
        return self.bytes_of([1] * len(self.keys))

    def bytes_of(self, numbers: Sequence[int]) -> int:
        """The bytes of so many slots of each buffer."""
        slots = jax.eval_shape(lambda: self.slots(numbers))
        return sum(x.size * x.dtype.itemsize for x in slots)

    def blank(self) -> list[jax.Array]:
        """Zeros, one for each buffer."""
        return [jnp.zeros(shape, dtype) for shape, dtype in self.keys]

    def slots(self, numbers: Sequence[int]) -> list[jax.Array]:
        """Zeros, so many slots of each buffer."""
        pairs = zip(numbers, self.keys, strict=True)
        return [jnp.zeros((n, *shape), dtype) for n, (shape, dtype) in pairs]

    def pack(self, arrays: Sequence[Any]) -> list[jax.Array]:
        """One array for each buffer; zeros where the list has none."""
        buffers = self.blank()
        for at, x in zip(self.places(arrays), arrays, strict=True):
            buffers[at] = x
        return buffers

    def write(self, slots: Sequence[Any], slot: Any, arrays: Sequence[Any]) -> list[Any]:
        """Slots, [slots, ...] for each buffer, in one of which the list's arrays lie now."""
        found = list(slots)
        for at, x in zip(self.places(arrays), arrays, strict=True):
            found[at] = jax.lax.dynamic_update_index_in_dim(found[at], x, slot, 0)
        return found

    def read(self, slots: Sequence[Any], slot: Any, like: Sequence[Any]) -> list[Any]:
        """The arrays of a list of these shapes in one of the slots."""
        return [
            jax.lax.dynamic_index_in_dim(slots[at], slot, 0, keepdims=False)
            for at in self.places(like)
        ]

    def places(self, arrays: Sequence[Any]) -> list[int]:
        """The numbers of the buffers in which a list's arrays lie."""
        left = list(enumerate(self.keys))
        found = []
        for x in arrays:
            entry = next(entry for entry in left if entry[1] == _key(x))
            left.remove(entry)
            found.append(entry[0])
        return found


def _key(x):
    return tuple(x.shape), jnp.dtype(x.dtype) if not jnp.issubdtype(
        x.dtype, jax.dtypes.extended
    ) else x.dtype
