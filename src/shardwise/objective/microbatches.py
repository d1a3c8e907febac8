"""The rule for the rows of each microbatch, and the numbers of these rows in the whole batch."""

from typing import Any

import jax
import jax.numpy as jnp

SEQUENCE = "sequence"


def split(batch: Any, m: int) -> Any:
    """Each array [rows, ...] of the batch as [m, rows/m, ...]: part j has the rows r, r % m == j.

    A batch whose rows are cut over devices stays cut so in every part.

    Raises:
      ValueError: `m` is below 1; for m > 1, an array without rows, rows that are no multiple of m,
        or arrays of different numbers of rows, of which no rule says what belongs together.
    """
    if m < 1:
        raise ValueError(f"microbatches={m}; expected 1 or more.")
    if m > 1:
        _check(batch, m)
    return jax.tree.map(lambda x: _parts(jnp.asarray(x), m), batch)


def joined(parts: jax.Array) -> jax.Array:
    """The inverse of `split` for one array: [m, rows/m, ...] in the order of the whole batch."""
    m, rows = parts.shape[:2]
    return jnp.swapaxes(parts, 0, 1).reshape(m * rows, *parts.shape[2:])


def numbers(batch: Any, order: Any = None) -> dict[str, jax.Array]:
    """The row numbers [rows] for each number of rows that arrays of the batch have.

    They travel beside the batch, are divided as it is, and answer `marks.index("rows", ...)`.
    Where the sequence is cut too, `order` [sequence] has the place of each entry in the whole
    sequence: as "sequence" [rows, sequence], it answers `marks.index("sequence", ...)`.
    """
    sizes = {jnp.shape(x)[0] for x in jax.tree.leaves(batch) if jnp.ndim(x)}
    found = {str(size): jnp.arange(size, dtype=jnp.int32) for size in sorted(sizes)}
    if order is not None:
        places = jnp.asarray(order, jnp.int32)
        found[SEQUENCE] = jnp.broadcast_to(places, (min(sizes), *places.shape))
    return found


def meaning(rows: dict[str, jax.Array]) -> Any:
    """The meaning of `marks.index` in a part whose rows have these numbers."""

    places = rows.get(SEQUENCE)
    rows = {name: x for name, x in rows.items() if name != SEQUENCE}

    def index(axis, size):
        if axis != "rows":
            return jnp.arange(size, dtype=jnp.int32) if places is None else _columns(places, size)
        found = [x for x in rows.values() if x.shape[0] == size]
        if not found:
            held = sorted(x.shape[0] for x in rows.values())
            raise ValueError(
                f"marks.index('rows', {size}): no array of this part of the batch has {size} rows; "
                f"there are arrays of {held}. Ask for as many rows as the model's input has."
            )
        return found[0]

    return index


def _columns(places, size):
    if places.shape[1] != size:
        raise ValueError(
            f"marks.index('sequence', {size}): the sequence is cut, and this part has "
            f"{places.shape[1]} of its entries. Ask for as many as the model's input has."
        )
    return places[0]


def _parts(x, m):
    if m == 1:
        return x[None]
    return jnp.swapaxes(x.reshape(x.shape[0] // m, m, *x.shape[1:]), 0, 1)


def _check(batch, m):
    rows = {}
    for keys, x in jax.tree_util.tree_flatten_with_path(batch)[0]:
        path = jax.tree_util.keystr(keys, simple=True, separator="/") or "the batch"
        if not jnp.ndim(x):
            raise ValueError(
                f"microbatches={m}: {path} of the batch is a scalar and has no rows; hand it to "
                f"the loss as a further argument."
            )
        rows.setdefault(jnp.shape(x)[0], path)
    if len(rows) > 1:
        told = ", ".join(f"{path} {count}" for count, path in rows.items())
        raise ValueError(
            f"microbatches={m}: the batch's arrays have different numbers of rows ({told}), and "
            f"nothing says which belong together. Give each row its own part of the longer ones, "
            f"as [rows, per row, ...], or use one microbatch."
        )
    for count, path in rows.items():
        if count % m:
            raise ValueError(
                f"a batch of {count} rows ({path}) does not split into {m} microbatches; pad it "
                f"with masked rows to a multiple."
            )
