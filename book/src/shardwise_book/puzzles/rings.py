"""Puzzles on collectives: one by `ppermute`, one in a fixed order, and the transpose of another."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from shardwise import measure, mesh
from shardwise_book.puzzles import running
from shardwise_book.puzzles.verdict import Verdict, Wrong, puzzle


@puzzle("return the sum of the block that belongs to this device.")
def scatter(function: Callable[[jax.Array], jax.Array]) -> Verdict:
    """A reduce-scatter along "x" by `ppermute`, in log₂ n steps: blocks [n, ...] to one [...]."""
    for n in (2, 4, 8):
        line, partial = mesh.make(x=n), running.whole_numbers(n, n * n, 4, 8)
        program = running.on_each(function, line, partial, check=False)
        running.require_equal(program(partial), _sums(partial, n), f" on {n} devices")
        moved = measure.collectives(program)
        if others := set(moved) - {"collective-permute"}:
            raise Wrong(f"right values, by {', '.join(others)}; send them by `ppermute` alone.")
        steps = n.bit_length() - 1
        running.require_at_most(
            moved.ring_bytes, partial.nbytes // n * (n - 1) // n, f"bytes on {n} devices"
        )
        running.require_at_most(moved.dynamic, steps, f"permutes on {n} devices")
    return f"{steps} permutes on {n} devices, and {moved.ring_bytes:,} bytes, those of the ring."


def _sums(partial, n):
    blocks = partial.reshape(n, n, *partial.shape[1:]).sum(axis=0)
    return blocks.reshape(-1, *partial.shape[2:])


@puzzle("return this device's part of the sum.")
def one_order(function: Callable[[jax.Array], jax.Array]) -> Verdict:
    """A reduce-scatter of eight arrays along "x", [8/n, w] to [w/n], with one result for all n."""
    arrays = running.normal(0, 8, 256) * 10.0 ** np.arange(-3, 5).astype(np.float32)[:, None]
    sums = arrays
    while len(sums) > 1:
        sums = sums[0::2] + sums[1::2]
    for n in (1, 2, 4, 8):
        program = running.on_each(function, mesh.make(x=n), arrays, check=False)
        running.require_equal(program(arrays), sums[0], f" on {n} devices")
        sent = measure.collectives(program).ring_bytes
        enough = sums.nbytes * (n - 1) // n
        running.require_at_most(sent, enough, f"bytes on {n} devices")
    return f"the same bits on 1, 2, 4 and 8 devices, for a reduce-scatter's {sent:,.0f} bytes."


def halo(x: jax.Array) -> jax.Array:
    """[rows, width] with the last row of the device before on top: [rows + 1, width]."""
    n = jax.lax.axis_size("x")
    above = jax.lax.ppermute(x[-1:], "x", [(d, (d + 1) % n) for d in range(n)])
    return jnp.concatenate([above, x])


@puzzle("return what each device's rows receive.")
def transpose(function: Callable[[jax.Array], jax.Array]) -> Verdict:
    """The transpose of `halo`, [rows + 1, width] to [rows, width], for the bytes of `halo`."""
    for n, rows in ((2, 3), (4, 2), (8, 5)):
        line = mesh.make(x=n)
        x, y = (
            running.whole_numbers(n, n * rows, 6),
            running.whole_numbers(n + 1, n * (rows + 1), 6),
        )
        forward, backward = running.on_each(halo, line, x), running.on_each(function, line, y)
        found = np.asarray(backward(y))
        if found.shape == x.shape:
            left, right = np.vdot(forward(x), y), np.vdot(x, found)
            if left != right:
                raise Wrong(f"on {n} devices ⟨Ax, y⟩ is {left:g} and ⟨x, Aᵀy⟩ is {right:g}.")
        whole = jax.shard_map(halo, mesh=line, in_specs=P("x"), out_specs=P("x"))
        by_jax = running.in_one(lambda y, f=whole, x=x: jax.linear_transpose(f, x)(y)[0])
        running.require_equal(found, by_jax(y), f" on {n} devices")
        sent = measure.collectives(backward).ring_bytes
        running.require_at_most(
            sent, measure.collectives(forward).ring_bytes, f"ring bytes on {n} devices"
        )
    return f"⟨Ax, y⟩ = ⟨x, Aᵀy⟩ on 2, 4 and 8 devices, and {sent} bytes sent: one row."
