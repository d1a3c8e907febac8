"""Parameters on their way between where they lie and where a schedule's stages read them."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Moving:
    """The way of one parameter, inside a shard_map over `axis` of `n` devices, and back.

    Between steps each device has a part of it along the array's axis `cut`; None: all of it. In a
    step a device has the rows of its own stages, or all: `order` has the rows as devices want them
    one after the other, None for all on each. Row i of the array is layer i, whatever the order.
    """

    axis: str
    n: int
    cut: int | None
    order: np.ndarray | None = None

    def there(self, x: jax.Array) -> jax.Array:
        """What the device's stages read, of what it holds."""
        if self.order is None:
            gathered = functools.partial(jax.lax.all_gather, axis=self.cut, tiled=True)
            return x if self.cut is None else gathered(x, self.axis)
        if self.cut is None:
            return x[jnp.asarray(self._wanted)[jax.lax.axis_index(self.axis)]]
        if self.cut == 0:
            return self._exchanged(x, self._held, self._wanted)
        return jax.lax.all_to_all(x[self.order], self.axis, 0, self.cut, tiled=True)

    def back(self, g: jax.Array) -> jax.Array:
        """The gradient of what the device holds, of those of what the devices read."""
        if self.order is None:
            if self.cut is None:
                return jax.lax.psum(g, self.axis)
            return jax.lax.psum_scatter(g, self.axis, scatter_dimension=self.cut, tiled=True)
        if self.cut is None:
            mine = jnp.asarray(self._wanted)[jax.lax.axis_index(self.axis)]
            whole = jnp.zeros((len(self.order), *g.shape[1:]), g.dtype).at[mine].set(g)
            return jax.lax.psum(whole, self.axis)
        if self.cut == 0:
            return self._exchanged(g, self._wanted, self._held)
        found = jax.lax.all_to_all(g, self.axis, self.cut, 0, tiled=True)
        return found[np.argsort(self.order)]

    def sent(self, x: Any, itemsize: int) -> int:
        """The bytes that a device sends, at most, to have what it reads of `x`, which is whole."""
        if self.cut is None:
            return 0
        if self.order is None or self.cut:
            size = x.size * itemsize // self.n
            return size * (self.n - 1) // (self.n if self.order is not None else 1)
        rows = sum(put.shape[1] for pairs, _, put in self._hops(self._held, self._wanted) if pairs)
        return rows * (x.size // len(self.order)) * itemsize

    def sent_back(self, x: Any, itemsize: int) -> int:
        """The bytes that a device sends, at most, of a gradient."""
        if self.cut is None:
            return 2 * x.size * itemsize * (self.n - 1) // self.n
        return self.sent(x, itemsize)

    @property
    def _held(self):
        return np.arange(len(self.order)).reshape(self.n, -1)

    @property
    def _wanted(self):
        return np.asarray(self.order).reshape(self.n, -1)

    def _exchanged(self, x, held, wanted):
        """The rows `wanted` of each device, [n, rows], of those that devices hold."""
        if (held == wanted).all():
            return x
        me, found = jax.lax.axis_index(self.axis), jnp.zeros_like(x)
        for pairs, taken, put in self._hops(held, wanted):
            rows = x[jnp.asarray(taken)[me]]
            rows = jax.lax.ppermute(rows, self.axis, pairs) if pairs else rows
            found = found.at[jnp.asarray(put)[me]].set(rows, mode="drop")
        return found

    def _hops(self, held, wanted) -> Iterator[tuple]:
        """Of each distance: (pairs, none for 0; places that are taken, and put to, [n, rows])."""
        n, rows = held.shape
        place = {row: at for at, row in np.ndenumerate(held)}
        for distance in range(n):
            moves: list[list] = [[] for _ in range(n)]
            for (device, to), row in np.ndenumerate(wanted):
                origin, at = place[row]
                if (device - origin) % n == distance:
                    moves[origin].append((at, to))
            most = max(map(len, moves))
            if not most:
                continue
            taken, put = np.zeros((n, most), np.int32), np.full((n, most), rows, np.int32)
            for origin, found in enumerate(moves):
                for k, (at, to) in enumerate(found):
                    taken[origin, k], put[(origin + distance) % n, k] = at, to
            pairs = [(d, (d + distance) % n) for d in range(n) if moves[d]]
            yield (pairs if distance else []), taken, put
