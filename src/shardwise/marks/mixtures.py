"""The dispatch to experts as a mark."""

from collections.abc import Callable
from typing import Any

import jax

from shardwise.marks.binding import meaning_of


def experts(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    apply: Callable,
    stacked: Any,
    experts: int,
    capacity: float | None = None,
    index: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(y [b, s, e], kept bool [b, s, k]): tokens x [b, s, e] through the experts that they chose.

    `chosen` int [b, s, k] are numbers below `experts`, no two of a token alike (buffers have room
    for no more), `weights` [b, s, k] those of the sum over a token's choices; `stacked` is a pytree
    with a leading axis of experts. `apply(stacked, xs)` is called with xs [experts, c, e], and
    `apply(stacked, xs, sizes)` with xs [rows, e] in groups of sizes [experts], as
    `jax.lax.ragged_dot` takes them; each returns what it makes of every row.

    With a `capacity` an expert has capacity·s·k/experts slots for each row of the batch, in the
    order of tokens (of `index` [b, s], where memory has another); a choice without a slot adds
    nothing to y, and `kept` says so. None drops nothing. Who is dropped depends on the row alone:
    it is the same on every mesh, and in every microbatch.

    A meaning receives the same, with the experts' weights that one device has.
    """
    meaning = meaning_of("experts")
    if meaning is None:
        # Imported here: that room knows marks, and these know of it no more than this.
        from shardwise.experts import on_one_device as meaning
    return meaning(x, chosen, weights, apply, stacked, experts, capacity, index)
