"""Parameters on their way between where they lie and where a schedule's stages read them.

Between steps each device has a part of an array along one of its axes, `cut`; None: all of it.
Inside a shard_map over `axis`, `there` makes of what the device holds what its stages read, and
`back` of the gradients of that those of what it holds.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Rows = tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class Shared:
    """A parameter that several stages read: each device has all of it for a step."""

    axis: str
    n: int
    leaf: int
    cut: int | None

    def there(self, held: Sequence[jax.Array]) -> list[jax.Array]:
        """The array, whole."""
        x = held[self.leaf]
        whole = (
            x if self.cut is None else jax.lax.all_gather(x, self.axis, axis=self.cut, tiled=True)
        )
        return [whole]

    def back(self, grads: Sequence[jax.Array], held: Sequence[Any]) -> dict[int, jax.Array]:
        """{the parameter: its gradient, summed over the stages}."""
        if self.cut is None:
            return {self.leaf: jax.lax.psum(grads[0], self.axis)}
        options = dict(scatter_dimension=self.cut, tiled=True)
        return {self.leaf: jax.lax.psum_scatter(grads[0], self.axis, **options)}

    def sent(self, leaves: Sequence[Any], itemsize: int, back: bool = False) -> int:
        """The bytes that a device sends; `leaves` are the shapes of whole parameters."""
        size = leaves[self.leaf].size * itemsize
        return size * (2 * back if self.cut is None else 1) * (self.n - 1) // self.n


@dataclasses.dataclass(frozen=True, eq=False)
class Own:
    """Pieces of one shape, parameters or rows of them, of which each is read by one stage alone.

    `table` [devices, places] has the number of the piece that a device has at each of its places,
    or -1. Row i of a stacked array is layer i, wherever a schedule has that layer.
    """

    axis: str
    n: int
    pieces: tuple[tuple[int, Rows], ...]
    table: np.ndarray
    cut: int | None

    def there(self, held: Sequence[jax.Array]) -> list[jax.Array]:
        """The pieces at the device's places; what stands where there is none is not read."""
        if self.cut is None:
            return list(jnp.stack([_rows(held[i], ends) for i, ends in self.pieces])[self._mine])
        if self._by_rows:
            found = self._exchanged(held[self._leaf], self._moves(held), self._size * self._places)
            return [found[c * self._size : (c + 1) * self._size] for c in range(self._places)]
        parts = [_rows(held[i], ends) for i, ends in self.pieces]
        parts.append(jnp.zeros_like(parts[0]))  # the one of number -1
        sent = jnp.stack([jnp.stack([parts[k] for k in row]) for row in self.table])
        arrived = jax.lax.all_to_all(sent, self.axis, 0, 0)
        return [_joined(arrived[:, c], self.cut) for c in range(self._places)]

    def back(self, grads: Sequence[jax.Array], held: Sequence[Any]) -> dict[int, jax.Array]:
        """{parameter: the gradient of what the device holds, 0 in rows that are other pieces'}."""
        if self.cut is None:
            sums = jnp.zeros((len(self.pieces) + 1, *grads[0].shape), grads[0].dtype)
            sums = jax.lax.psum(sums.at[self._mine].set(jnp.stack(grads))[:-1], self.axis)
            return self._summed(list(sums), held)
        if self._by_rows:
            moves = self._moves(held)[:, [2, 3, 0, 1]]
            found = self._exchanged(jnp.concatenate(grads), moves, held[self._leaf].shape[0])
            return {self._leaf: found}
        sent = jnp.stack([_divided(g, self.n, self.cut) for g in grads], 1)
        arrived = jax.lax.all_to_all(sent, self.axis, 0, 0)
        places = {k: place for place, k in np.ndenumerate(self.table)}
        return self._summed([arrived[places[k]] for k in range(len(self.pieces))], held)

    def sent(self, leaves: Sequence[Any], itemsize: int, back: bool = False) -> int:
        """The bytes that a device sends; `leaves` are the shapes of whole parameters."""
        leaf, ends = self.pieces[0]
        size = math.prod(leaves[leaf].shape[bool(ends) :]) * (ends[1] - ends[0] if ends else 1)
        if self.cut is None:
            return 2 * back * len(self.pieces) * size * itemsize * (self.n - 1) // self.n
        if not self._by_rows:
            return self._places * size * itemsize * (self.n - 1) // self.n
        rows = leaves[leaf].shape[0] // self.n
        moves = self._moves({leaf: np.empty((rows, 0))})
        away = sum(len(taken[0]) for pairs, taken, _ in _hops(moves, self.n) if pairs)
        return away * (size // self._size) * itemsize

    @property
    def _places(self):
        return self.table.shape[1]

    @property
    def _mine(self):
        """The numbers of the device's pieces."""
        return jnp.asarray(self.table)[jax.lax.axis_index(self.axis)]

    @property
    def _by_rows(self):
        """Whether the array is cut along the rows of which pieces are some."""
        return self.cut == 0 and self.pieces[0][1] is not None

    @property
    def _leaf(self):
        return self.pieces[0][0]

    @property
    def _size(self):
        return self.pieces[0][1][1] - self.pieces[0][1][0]

    def _moves(self, held):
        """int [rows, 4]: the device that holds a row and where, the one that reads it and where."""
        rows, found = held[self._leaf].shape[0], []
        for (device, c), k in np.ndenumerate(self.table):
            for to, row in enumerate(range(*self.pieces[k][1]) if k >= 0 else ()):
                found.append((row // rows, row % rows, device, c * self._size + to))
        return np.array(found)

    def _exchanged(self, x, moves, rows):
        """[rows, ...]: the rows of `x` on all devices, where `moves` puts them."""
        if rows == len(x) and (moves[:, :2] == moves[:, 2:]).all() and len(moves) == rows * self.n:
            return x
        me, found = jax.lax.axis_index(self.axis), jnp.zeros((rows, *x.shape[1:]), x.dtype)
        for pairs, taken, put in _hops(moves, self.n):
            moved = x[jnp.asarray(taken)[me]]
            moved = jax.lax.ppermute(moved, self.axis, pairs) if pairs else moved
            found = found.at[jnp.asarray(put)[me]].set(moved, mode="drop")
        return found

    def _summed(self, pieces, held):
        """{parameter: the sum of its pieces, each at its rows}."""
        found: dict[int, jax.Array] = {}
        for (leaf, ends), g in zip(self.pieces, pieces, strict=True):
            if ends is not None:
                whole = jnp.zeros((held[leaf].shape[0], *g.shape[1:]), g.dtype)
                g = found.get(leaf, whole).at[slice(*ends)].set(g)
            found[leaf] = g
        return found


def carriers(
    axis: str,
    device_of: Sequence[int],
    read: Sequence[Mapping[int, Rows]],
    leaves: Sequence[Any],
    held: Sequence[int | None],
    alike: Sequence[Any],
    whole: Sequence[bool],
) -> tuple[list, dict[tuple[int, int], tuple[int, int | None]]]:
    """(the `Shared` and `Own`; {(stage, parameter): its carrier, the place there or None}).

    `read[s]` has the parameters that stage s reads, and of each the rows. Pieces travel together if
    their shapes and what is `alike` are the same. One that is `whole` is never taken apart.
    """
    n = max(device_of) + 1
    readers = {i: [s for s, own in enumerate(read) if i in own] for own in read for i in own}
    found, groups, where = [], {}, {}
    for s, i in ((s, i) for s, own in enumerate(read) for i in own):
        ends, x = read[s][i], leaves[i]
        if (ends is None and len(readers[i]) > 1) or (ends is not None and whole[i]):
            key = i
            members = groups.setdefault(key, [])
            where[s, i] = key, None
            continue
        shape = x.shape if ends is None else (ends[1] - ends[0], *x.shape[1:])
        one = i if ends is not None and held[i] == 0 else None
        key = shape, x.dtype, held[i], ends is None, one, alike[i]
        members = groups.setdefault(key, [])
        where[s, i] = key, sum(device_of[other] == device_of[s] for other, _ in members)
        members.append((s, i))
    for key, members in groups.items():
        if not members:
            found.append(Shared(axis, n, key, held[key]))
            continue
        places = max(where[m][1] for m in members) + 1
        table = np.full((n, places), -1)
        for number, (s, i) in enumerate(members):
            table[device_of[s], where[s, i][1]] = number
        pieces = tuple((i, read[s][i]) for s, i in members)
        found.append(Own(axis, n, pieces, table, key[2]))
    numbers = {key: number for number, key in enumerate(groups)}
    return found, {at: (numbers[key], place) for at, (key, place) in where.items()}


def _rows(x, ends):
    return x if ends is None else x[slice(*ends)]


def _joined(parts, cut):
    """The array of its parts [devices, ...] along `cut`."""
    shape = parts.shape[1:]
    whole = (*shape[:cut], shape[cut] * len(parts), *shape[cut + 1 :])
    return jnp.moveaxis(parts, 0, cut).reshape(whole)


def _divided(x, n, cut):
    """[devices, ...]: the parts of an array along `cut`."""
    shape = (*x.shape[:cut], n, x.shape[cut] // n, *x.shape[cut + 1 :])
    return jnp.moveaxis(x.reshape(shape), cut, 0)


def _hops(moves: np.ndarray, n: int) -> Iterator[tuple]:
    """Of each distance: (pairs, none for 0; rows taken on each device; where they are put)."""
    distance = (moves[:, 2] - moves[:, 0]) % n
    for hop in sorted(set(distance.tolist())):
        own = [moves[(distance == hop) & (moves[:, 0] == d)] for d in range(n)]
        most = max(map(len, own))
        taken = np.zeros((n, most), np.int32)
        put = np.full((n, most), np.iinfo(np.int32).max, np.int32)  # dropped
        for d, found in enumerate(own):
            taken[d, : len(found)], put[(d + hop) % n, : len(found)] = found[:, 1], found[:, 3]
        yield [(d, (d + hop) % n) for d in range(n) if len(own[d])] if hop else [], taken, put
