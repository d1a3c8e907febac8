"""Puzzles on what is kept for the backward pass, and on sums over microbatches and devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from shardwise import measure, mesh, objective
from shardwise_book.puzzles import running
from shardwise_book.puzzles.verdict import Verdict, puzzle

LAYERS = 64


@puzzle("return what the last layer yields.")
def segments(chain: Callable[[jax.Array, jax.Array], jax.Array]) -> Verdict:
    """64 layers x → tanh(x @ w): at most 40 activations in memory, and four forward passes of work.

    `chain(weights, x)` takes float32 [64, d, d] and [rows, d].
    """

    def plain(weights, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    for rows, width in ((256, 16), (512, 32)):
        weights, x = (
            running.normal(rows, LAYERS, width, width) / np.sqrt(width),
            running.normal(width, rows, width),
        )
        slope = [jax.grad(lambda w, x, f=f: jnp.sum(f(w, x) ** 2)) for f in (chain, plain)]
        program = running.compiled(slope[0], weights, x)
        running.require_close(
            program(weights, x), running.in_one(slope[1])(weights, x), "the gradient"
        )
        kept = measure.bytes_per_device(program).temporaries / x.nbytes
        passes = measure.flops(program) / (2 * LAYERS * width * width * rows)
        running.require_at_most(round(kept, 1), 40, "activations' bytes of temporaries")
        running.require_at_most(round(passes, 2), 4.1, "forward passes' worth of FLOPs")
    return f"{kept:.0f} activations in memory for {LAYERS} layers, and {passes:.0f} passes of work."


def squares(weights: dict[str, jax.Array], batch: dict[str, jax.Array]) -> objective.Mean:
    """The loss of a small model: squared errors, totalled over the rows that the mask counts."""
    found = jnp.tanh(batch["x"] @ weights["up"]) @ weights["down"]
    each = jnp.sum((found - batch["y"]) ** 2, axis=1)
    return objective.Mean(jnp.sum(each * batch["mask"]), jnp.sum(batch["mask"]))


@puzzle("return the mean over all rows, and its gradient.")
def accumulated(step: Callable[[Any, Any], tuple[jax.Array, Any]]) -> Verdict:
    """One device's `step(weights, batch)`, rows cut along "x": mean and gradient, summed once.

    Runs under `check_vma=False`, on eight devices, in microbatches.
    """
    weights = {"up": running.normal(0, 8, 128), "down": running.normal(1, 128, 8)}
    for rows in (512, 1024):
        batch = {"x": running.normal(2, rows, 8), "y": running.normal(3, rows, 8)}
        batch["mask"] = (np.arange(rows) % 64 < np.arange(rows) // 16 % 50).astype(np.float32)
        expected = running.in_one(objective.value_and_grad(squares))(weights, batch)
        program = _spread(step, weights, batch)
        mean, slope = program(weights, batch)
        running.require_close(mean, expected[0], "the mean")
        running.require_close(slope, expected[1], "the gradient")
        sent = measure.collectives(program).ring_bytes
        enough = 2 * (sum(w.nbytes for w in weights.values()) + 8) * 7 / 8
        running.require_at_most(sent, enough, "ring bytes")
        needed, at_once = (
            measure.bytes_per_device(p).temporaries
            for p in (program, _spread(_at_once, weights, batch))
        )
        running.require_at_most(needed, 0.6 * at_once, f"bytes of temporaries on {rows} rows")
    return f"one sum, {sent:,.0f} ring bytes, and {needed / at_once:.2f} of the memory of one part."


def _spread(step, weights, batch):
    specs = dict(in_specs=(P(), P("x")), out_specs=P(), check=False)
    return running.on_each(step, mesh.make(x=8), weights, batch, **specs)


def _at_once(weights, batch):
    (total, count), slope = jax.value_and_grad(
        lambda w: tuple(squares(w, batch)), has_aux=True
    )(weights)  # fmt: skip
    total, count, slope = jax.lax.psum((total, count, slope), "x")
    return total / count, jax.tree.map(lambda g: g / count, slope)
