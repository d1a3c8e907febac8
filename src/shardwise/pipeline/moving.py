"""Parameters on their way between where they lie and where a schedule's stages read them.

Between steps each device has a part of an array along one of its axes, `cut`; None: all of it.
Inside a shard_map over `axis`, `there` makes of what the device holds what its stages read; `back`,
its transpose, of the gradients of that those of what it holds.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Rows = tuple[int, int] | None
Place = tuple[int, int, Rows]  # a carrier's number, the place there, the rows of that to take


@dataclasses.dataclass(frozen=True, eq=False)
class Carrier:
    """Pieces of one shape, parameters or rows of them, of which each is read by one stage alone.

    Pieces with fewer rows than others travel with zeros after them. `table` [devices, places] has
    the number of the piece that a device has at each of its places, or -1. Without one, the one
    piece is a parameter that several stages read: all have all of it.
    """

    axis: str
    n: int
    pieces: tuple[tuple[int, Rows], ...]
    table: np.ndarray | None
    cut: int | None

    @property
    def leaf(self) -> int:
        """A parameter of the pieces."""
        return self.pieces[0][0]

    @property
    def places(self) -> int:
        """The number of places on each device."""
        return 1 if self.table is None else self.table.shape[1]

    def there(self, held: Mapping | Sequence) -> list[jax.Array]:
        """The pieces at the device's places; what stands where there is none is not read."""
        if self.table is None:
            x, whole = held[self.leaf], dict(axis=self.cut, tiled=True)
            return [x if self.cut is None else jax.lax.all_gather(x, self.axis, **whole)]
        if self._by_rows:
            found = self._exchanged(held[self.leaf])
            return [found[c * self.size : (c + 1) * self.size] for c in range(self.places)]
        parts = [held[i] if ends is None else self._rows(held[i], ends) for i, ends in self.pieces]
        if (self.table < 0).any() or self.cut is not None:
            parts.append(jnp.zeros_like(parts[0]))  # the one of number -1
        if self.cut is None:
            mine = jnp.asarray(self.table % len(parts))[jax.lax.axis_index(self.axis)]
            return [jax.lax.select_n(k, *parts) for k in mine]
        sent = jnp.stack([parts[k] for k in self.table.ravel()])
        return list(jax.lax.all_to_all(sent, self.axis, 0, self.cut + 1, tiled=True))

    def sent(self, leaves: Sequence[Any], itemsize: int, back: bool = False) -> float:
        """The bytes that a device sends; `leaves` are the shapes of whole parameters."""
        ends, shape = self.pieces[0][1], leaves[self.leaf].shape
        if self._by_rows:
            away = sum(len(taken[0]) for pairs, taken, _ in self._hops(shape[0] // self.n) if pairs)
            return away * math.prod(shape[1:]) * itemsize
        one = math.prod(shape if ends is None else shape[1:])
        if self.cut is not None:
            count = self.places * (1 if ends is None else self.size)
        else:  # gradients alone, of all devices
            count = 2 * back * sum(1 if own is None else own[1] - own[0] for _, own in self.pieces)
        return count * one * itemsize * (self.n - 1) / self.n

    @property
    def _by_rows(self):
        """Whether the array is cut along the rows of which pieces are some."""
        return self.cut == 0 and self.pieces[0][1] is not None

    @property
    def size(self) -> int:
        """The rows of a place, of pieces that are rows."""
        return max(last - first for _, (first, last) in self.pieces)

    @property
    def rows(self) -> Rows:
        """Rows of a parameter, as many as a place has; None for whole parameters."""
        return None if self.pieces[0][1] is None else (0, self.size)

    def _rows(self, x, ends):
        found = x[slice(*ends)]
        return jnp.pad(found, [(0, self.size - len(found))] + [(0, 0)] * (x.ndim - 1))

    def _exchanged(self, x):
        """[places * size, ...]: the rows of pieces, of `x` on all devices."""
        hops, rows = list(self._hops(len(x))), self.size * self.places
        (pairs, taken, put), *more = hops
        if rows == len(x) and not (more or pairs) and (taken == put).all():
            return x  # all are where they are read
        me, found = jax.lax.axis_index(self.axis), jnp.zeros((rows, *x.shape[1:]), x.dtype)
        for pairs, taken, put in hops:
            moved = x[jnp.asarray(taken)[me]]
            moved = jax.lax.ppermute(moved, self.axis, pairs) if pairs else moved
            at = found.at[jnp.asarray(put)[me]]
            found = at.set(moved, mode="drop", unique_indices=True)
        return found

    def _hops(self, rows: int) -> Iterator[tuple]:
        """Of each distance: (pairs, none for 0; rows taken on each device; where they are put).

        `rows` are those that each device holds.
        """
        n, moves = self.n, []  # each: the device that holds a row, where; that reads it, where
        for (device, c), k in np.ndenumerate(self.table):
            for to, row in enumerate(range(*self.pieces[k][1]) if k >= 0 else ()):
                moves.append((row // rows, row % rows, device, c * self.size + to))
        moves = np.array(moves)
        distance = (moves[:, 2] - moves[:, 0]) % n
        for hop in sorted(set(distance.tolist())):
            own = [moves[(distance == hop) & (moves[:, 0] == d)] for d in range(n)]
            most = max(map(len, own))
            taken = np.zeros((n, most), np.int32)
            put = np.tile(self.size * self.places + np.arange(most, dtype=np.int32), (n, 1))
            for d, found in enumerate(own):  # the rest is put beyond the end, and dropped
                taken[d, : len(found)], put[(d + hop) % n, : len(found)] = found[:, 1], found[:, 3]
            yield [(d, (d + hop) % n) for d in range(n) if len(own[d])] if hop else [], taken, put


def back(ways: Sequence[Carrier], sums: Sequence[list], held: Sequence[Any]) -> list[jax.Array]:
    """The gradients of what the device holds, of those of what `there` made of it on each way."""
    found: dict[int, jax.Array] = {}
    for way, grads in zip(ways, sums, strict=True):
        like = {i: jax.ShapeDtypeStruct(held[i].shape, grads[0].dtype) for i, _ in way.pieces}
        (own,) = jax.linear_transpose(way.there, like)(list(grads))
        found |= {i: found[i] + g if i in found else g for i, g in own.items()}
    for axis, i in {(way.axis, i): None for way in ways if way.cut is None for i, _ in way.pieces}:
        found[i] = jax.lax.psum(found[i], axis)
    return [found[i] for i in range(len(held))]


def carriers(
    axis: str,
    device_of: Sequence[int],
    read: Sequence[Mapping[int, Rows]],
    leaves: Sequence[Any],
    held: Sequence[int | None],
    shares: Any,
) -> tuple[list[Carrier], list[list[Place]]]:
    """(the carriers; for each stage, where each of its parameters is).

    `read[s]` has the parameters that stage s reads, and of each the rows. Pieces travel together if
    their shapes (but for the number of rows) and what `shares` has `alike` are the same. A
    parameter whose rows devices share (`shares.rows`) is never taken apart: a task takes its rows
    of all.
    """
    n, found, where = max(device_of) + 1, [], {}
    readers = collections.Counter(i for own in read for i in own)
    groups: dict[Any, list[tuple[int, int]]] = {}
    for s, own in enumerate(read):
        for i, ends in own.items():
            key, x = i, leaves[i]
            if not (readers[i] > 1 if ends is None else shares.rows(i)):
                shape = x.shape[ends is not None :]
                one = i if ends is not None and held[i] == 0 else None
                key = shape, x.dtype, held[i], ends is None, one, shares.alike(i)
            groups.setdefault(key, []).append((s, i))
    for number, (key, members) in enumerate(groups.items()):
        leaf = members[0][1]
        if key == leaf:
            found.append(Carrier(axis, n, ((leaf, None),), None, held[leaf]))
            where |= {(s, i): (number, 0, read[s][i]) for s, i in members}
            continue
        table, taken = np.full((n, len(members)), -1, np.int32), [0] * n
        pieces = tuple((i, read[s][i]) for s, i in members)
        for k, (s, _) in enumerate(members):
            table[device_of[s], taken[device_of[s]]] = k
            taken[device_of[s]] += 1
        found.append(Carrier(axis, n, pieces, table[:, : max(taken)], held[leaf]))
        for k, (s, i) in enumerate(members):
            ends, ((_, place),) = pieces[k][1], np.argwhere(table == k)
            rows = None if ends is None else ends[1] - ends[0]
            own = None if ends is None or rows == found[-1].size else (0, rows)
            where[s, i] = number, int(place), own
    return found, [[where[s, i] for i in own] for s, own in enumerate(read)]
