"""Batches whose rows, and perhaps columns, are cut over devices and microbatches."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from shardwise import tree as trees
from shardwise.objective.gradients import Division
from shardwise.objective.parts import check_rows, numbers

WHO = "fsdp.value_and_grad"


def pad(batch: dict, n: int, mask: str = "mask") -> dict:
    """`batch` with masked rows added, up to a multiple of `n` rows.

    Raises:
      ValueError: `batch` is not a dict with a mask, whose zeros make the added rows count nothing.
    """
    if not isinstance(batch, dict) or mask not in batch:
        raise ValueError(
            f"fsdp.pad: expected a dict with {mask!r}, by which the loss counts only real rows; "
            f"got {sorted(batch) if isinstance(batch, dict) else type(batch).__name__}."
        )
    missing = -len(batch[mask]) % n
    return jax.tree.map(lambda x: jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)), batch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divided(Division):
    """The division of batches by hand over axes of `mesh`, columns in this `order` of the sequence.

    Errors begin with `who`: what the user called.
    """

    mesh: jax.sharding.Mesh
    order: Callable[[int, int], Any] | None = None
    who: str = WHO

    def cut(self, batch: Any) -> tuple[Any, Any, tuple]:
        """(the batch, its columns in order; the numbers of rows and columns; the specs of both).

        Raises:
          ValueError: rows or columns that do not divide.
        """
        check_rows(batch, self._parts(self.rows) * self.microbatches, self.who)
        if not self.columns:
            return batch, numbers(batch), (P(self.rows), P(self.rows))
        length, parts = _sequence(batch, self.who), self._parts(self.columns)
        if length % parts:
            raise ValueError(
                f"{self.who}: a sequence of {length} does not split into {parts} parts, over "
                f"{self.columns}; pad it, with a mask of 0, to {-(-length // parts) * parts}."
            )
        order = np.arange(length) if self.order is None else self.order(length, parts)
        if (np.asarray(order) != np.arange(length)).any():
            batch = jax.tree.map(lambda x: x[:, order] if jnp.ndim(x) > 1 else x, batch)
        own = numbers(batch, order)

        def spec(x):
            return P(self.rows, self.columns) if jnp.ndim(x) > 1 else P(self.rows)

        return batch, own, (jax.tree.map(spec, batch), jax.tree.map(spec, own))

    def _parts(self, axes):
        return math.prod(self.mesh.shape[name] for name in axes)


def _sequence(batch, who):
    """The length of the batch's sequences, axis 1 of each array that has two or more."""
    lengths: dict[int, str] = {}
    for path, x in trees.leaves(batch):
        if jnp.ndim(x) > 1:
            lengths.setdefault(jnp.shape(x)[1], path or "the batch")
    if len(lengths) != 1:
        told = ", ".join(f"{path} has {n}" for n, path in lengths.items()) or "there is none"
        raise ValueError(
            f"{who}: the sequence is cut, axis 1 of each array of the batch that has two axes or "
            f"more, which has to be one length: {told}. Hand over what is no sequence as a further "
            f"argument."
        )
    return next(iter(lengths))
