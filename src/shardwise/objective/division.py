"""The division of a batch: microbatches in turn, rows and columns over devices, and their sums."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardwise import mesh as meshes
from shardwise.objective.parts import check_cut, check_rows, numbers, sizes


@dataclasses.dataclass(frozen=True)
class Division:
    """The division of a batch into `microbatches`, one after the other, of parts on devices.

    `rows` are the axes of `mesh` by hand that cut rows, `columns` those that cut the sequence, in
    this `order`; without a mesh no axis cuts anything by hand. As a function it is the meaning of
    `marks.total` in such a part. Errors begin with `who`: what the user called.
    """

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    microbatches: int = 1
    mesh: Mesh | None = None
    order: Callable[[int, int], Any] | None = None
    who: str = "value_and_grad"

    def __post_init__(self):
        if self.microbatches < 1:
            raise ValueError(f"{self.who}: microbatches={self.microbatches}; expected 1 or more.")

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes that cut rows or columns, over which the parts' sums are added up."""
        return (*self.columns, *self.rows)

    def cut(self, batch: Any) -> tuple[Any, Any, tuple]:
        """(the batch, its columns in order; the numbers of rows and columns; the specs of both)."""
        if self.mesh is None:
            if self.microbatches > 1:
                check_rows(batch, self.microbatches, self.who)
            return batch, numbers(batch), (P(), P())
        check_rows(batch, meshes.parts(self.mesh, self.rows) * self.microbatches, self.who)
        if not self.columns:
            return batch, numbers(batch), (P(self.rows), P(self.rows))
        length, parts = self._length(batch), meshes.parts(self.mesh, self.columns)
        check_cut(self.who, f"a sequence of {length}", length, parts, f"over {self.columns}")
        order = np.arange(length) if self.order is None else self.order(length, parts)
        if (np.asarray(order) != np.arange(length)).any():
            batch = jax.tree.map(lambda x: x[:, order] if jnp.ndim(x) > 1 else x, batch)
        places = numbers(batch, order)

        def spec(x):
            return P(self.rows, self.columns) if jnp.ndim(x) > 1 else P(self.rows)

        return batch, places, (jax.tree.map(spec, batch), jax.tree.map(spec, places))

    def _length(self, batch):
        """The length of the batch's sequences, axis 1 of each array that has two or more."""
        lengths = sizes(batch, 1)
        if len(lengths) != 1:
            told = ", ".join(f"{path} has {n}" for n, path in lengths.items()) or "there is none"
            raise ValueError(
                f"{self.who}: the sequence is cut, axis 1 of each array of the batch that has two "
                f"axes or more, which has to be one length: {told}. Hand over what is no sequence "
                f"as a further argument."
            )
        return next(iter(lengths))

    def together(self, x: Any) -> Any:
        """The sum of `x` over the parts on all devices."""
        return jax.lax.psum(x, self.axes) if self.axes else x

    def over_devices(self, leaves: Sequence[Any], ways: Sequence[str]) -> tuple:
        """(leaves that are whole on every device, those of rows, which stay cut), in shard_map."""
        if self.columns and "concatenate" in ways:
            raise ValueError(
                f"{self.who}: aux 'concatenate' joins rows, and of each row a device has a part of "
                f"the sequence alone, over {self.columns}. Return sums over tokens, or lay the "
                f"sequence out by the compiler."
            )
        sums = {"sum": jax.lax.psum, "mean": jax.lax.pmean, "max": jax.lax.pmax}
        pairs, axes = [*zip(leaves, ways, strict=True)], self.axes
        whole = [sums[w](x, axes) if axes else x for x, w in pairs if w != "concatenate"]
        return whole, [x for x, w in pairs if w == "concatenate"]

    def fold(self, key: Any) -> Any:
        """The key of this device's part, made of the batch's."""
        for name in self.axes if key is not None else ():
            key = jax.random.fold_in(key, jax.lax.axis_index(name))
        return key

    def __call__(self, x: Any, axes: tuple[str, ...]) -> Any:
        """The total of `x`; raises ValueError where no part ever sees the whole batch."""
        if "rows" not in axes:
            return jax.lax.psum(x, self.columns) if self.columns else x
        if self.microbatches > 1:
            raise ValueError(
                f"marks.total: the loss needs a sum over the rows of the whole batch, which is "
                f"taken in {self.microbatches} microbatches or blocks, one after the other: none "
                f"sees the others. Use one microbatch, or sums over each row (for experts: "
                f"over='rows'), or balance experts by a bias, from the loads that aux adds up."
            )
        return self.together(x)
