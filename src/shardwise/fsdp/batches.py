"""Batches whose rows are cut over devices and microbatches."""

from typing import Any

import jax
import jax.numpy as jnp

from shardwise import tree as trees


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


def check_rows(batch: Any, parts: int) -> None:
    """Raise where an array of the batch does not split into so many parts."""
    for path, x in trees.leaves(batch):
        if jnp.ndim(x) == 0:
            raise ValueError(
                f"fsdp.value_and_grad: {path or 'the batch'} is a scalar, and has no rows to cut "
                f"into {parts} parts (devices times microbatches); hand it to the loss as a "
                f"further argument."
            )
        if jnp.shape(x)[0] % parts:
            raise ValueError(
                f"fsdp.value_and_grad: {path or 'the batch'} of shape {jnp.shape(x)} does "
                f"not split into {parts} parts (devices times microbatches) along its rows; add "
                f"masked rows: fsdp.pad(batch, {parts}), and a loss that returns objective.Mean."
            )
