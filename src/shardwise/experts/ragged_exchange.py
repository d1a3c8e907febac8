"""Rows to the devices of their experts in slices of any size, and back: `ragged_all_to_all`.

A device has rows sorted by expert, and each device knows how many every other has for each expert:
that is a slice. What arrives stands in groups, one for each expert held, and within a group by
sender; so it needs no second sorting.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Slices(NamedTuple):
    """The operands of `jax.lax.ragged_all_to_all`, int32 [experts] each, an entry for each slice:
    receivers (for `recv_sizes`, senders) follow each other, each with as many as it has experts.
    """

    input_offsets: jax.Array
    send_sizes: jax.Array
    output_offsets: jax.Array
    recv_sizes: jax.Array


def most_rows(rows: int, tokens: int, per_token: int, held: int, slots: int | None = None) -> int:
    """The most choices of rows·tokens tokens that can fall on a device, with `held` experts, each
    of which a token chooses once, and, with a capacity, `slots` of an expert for each row.
    """
    found = rows * tokens * min(per_token, held)
    return found if slots is None else min(found, rows * held * slots)


def slices(counts: jax.Array, me: jax.Array | int, home: bool) -> Slices:
    """The `Slices` of device `me`; device i has counts[i, e] rows for expert e, int32 [n, experts].

    `home` is the way back, of which entries are slices of the experts held, by owner.
    """
    n, experts = counts.shape
    before = jnp.cumsum(counts, axis=1) - counts  # where slices begin on the rows' own devices,
    groups = jnp.sum(counts, axis=0).reshape(n, experts // n)
    first = (jnp.cumsum(groups, axis=1) - groups).reshape(1, experts)
    placed = first + jnp.cumsum(counts, axis=0) - counts  # and on those of their experts

    def arriving(x):
        return x.reshape(n, n, experts // n)[:, me].reshape(experts)

    if home:
        return Slices(arriving(placed), arriving(counts), arriving(before), counts[me])
    return Slices(before[me], counts[me], placed[me], arriving(counts))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def exchange(axis, own, most, home, rows, counts):
    """Rows [own, e], sorted by expert, as [n·most, e] in groups; `home`, the inverse, back to them.

    A device has `own` rows, of which `most` at most go to one device. What no row is sent to is 0.
    The gradient is the exchange in the other direction: JAX's own would ask again, by two more
    all-to-alls, for offsets that `counts` tells.
    """
    n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    room = jnp.zeros_like(rows, shape=(own if home else n * most, rows.shape[1]))
    given = rows, room, *slices(counts, me, home)
    ragged = functools.partial(jax.lax.ragged_all_to_all, axis_name=axis)
    blocks = functools.partial(in_blocks, axis=axis, most=most)
    return jax.lax.platform_dependent(*given, cpu=blocks, default=ragged)


def _backward(axis, own, most, home, counts, gradient):
    return exchange(axis, own, most, not home, gradient, counts), None


exchange.defvjp(lambda *given: (exchange(*given), given[-1]), _backward)


def in_blocks(rows, room, input_offsets, send_sizes, output_offsets, recv_sizes, axis, most):
    """The result of `jax.lax.ragged_all_to_all`, by an all-to-all of blocks [n, most, e].

    No two devices exchange more than `most` rows, those of all their slices together.
    """
    n = jax.lax.axis_size(axis)
    places = jax.vmap(functools.partial(_places, most=most))
    leaving = places(input_offsets.reshape(n, -1), send_sizes.reshape(n, -1))
    blocks = rows.at[leaving].get(mode="fill", fill_value=0)
    blocks = jax.lax.all_to_all(blocks, axis, 0, 0, tiled=True)
    offsets = jax.lax.all_to_all(output_offsets, axis, 0, 0, tiled=True)
    arriving = places(offsets.reshape(n, -1), recv_sizes.reshape(n, -1))
    return room.at[arriving].set(blocks, mode="drop")


def _places(offsets, sizes, most):
    """The places of a block's rows, int32 [most], slice after slice; far beyond for no row."""
    ends, row = jnp.cumsum(sizes), jnp.arange(most, dtype=sizes.dtype)
    entry = jnp.sum(ends[None] <= row[:, None], axis=1)
    found = (offsets - ends + sizes).at[entry].get(mode="clip") + row
    return jnp.where(row < ends[-1], found, jnp.iinfo(sizes.dtype).max)
