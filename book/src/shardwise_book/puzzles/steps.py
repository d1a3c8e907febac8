"""Puzzles on the parts of a step: what is kept, sums over microbatches, pipelines."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from shardwise import measure, mesh, objective, pipeline, schedules
from shardwise.pipeline import cut
from shardwise_book.puzzles import judging
from shardwise_book.puzzles.judging import NotYet, Verdict, Wrong, puzzle

LAYERS = 64


@puzzle("return what the last layer yields.")
def segments(chain: Callable[[jax.Array, jax.Array], jax.Array]) -> Verdict:
    """Check a chain of 64 layers, x → tanh(x @ w), that keeps at most 40 activations.

    `chain(weights, x)` takes float32 [64, d, d] and [rows, d], and returns what the last layer
    yields. With the backward pass it may compute as much as four forward passes.
    """

    def plain(weights, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    for rows, width in ((256, 16), (512, 32)):
        weights = judging.normal(rows, LAYERS, width, width) / np.sqrt(width)
        x = judging.normal(width, rows, width)
        slope = [jax.grad(lambda w, x, f=f: jnp.sum(f(w, x) ** 2)) for f in (chain, plain)]
        program = judging.compiled(slope[0], weights, x)
        beside = judging.compiled(slope[1], weights, x)
        judging.require_close(program(weights, x), beside(weights, x), "the gradient")
        temporaries = [measure.bytes_per_device(p).temporaries for p in (program, beside)]
        kept, usual = (size / x.nbytes for size in temporaries)
        passes = measure.flops(program) / (2 * LAYERS * width * width * rows)
        judging.require_at_most(round(kept, 1), 40, "activations' bytes of temporaries")
        judging.require_at_most(round(passes, 2), 4.1, "forward passes' worth of FLOPs")
    arrays = f"{kept:.0f} activations, where the plain scan has {usual:.0f}"
    return f"temporaries of {arrays}, and the FLOPs of {passes:.0f} forward passes."


def squares(weights: dict[str, jax.Array], batch: dict[str, jax.Array]) -> objective.Mean:
    """The loss of a small model: squared errors, totalled over the rows that the mask counts."""
    found = jnp.tanh(batch["x"] @ weights["up"]) @ weights["down"]
    each = jnp.sum((found - batch["y"]) ** 2, axis=1)
    return objective.Mean(jnp.sum(each * batch["mask"]), jnp.sum(batch["mask"]))


@puzzle("return the mean over all rows, and its gradient.")
def accumulated(step: Callable[[Any, Any], tuple[jax.Array, Any]]) -> Verdict:
    """Check one device's part of a step in microbatches, for which devices communicate once.

    `step(weights, batch)` has a device's rows, cut over eight devices along "x", and returns the
    mean of `squares` over all rows, and its gradient. It runs under `check_vma=False`.
    """
    weights = {"up": judging.normal(0, 8, 128), "down": judging.normal(1, 128, 8)}
    for rows in (512, 1024):
        batch = {"x": judging.normal(2, rows, 8), "y": judging.normal(3, rows, 8)}
        batch["mask"] = (np.arange(rows) % 64 < np.arange(rows) // 16 % 50).astype(np.float32)
        expected = judging.in_one(objective.value_and_grad(squares))(weights, batch)
        program = _spread(step, weights, batch)
        mean, slope = program(weights, batch)
        judging.require_close(mean, expected[0], "the mean")
        judging.require_close(slope, expected[1], "the gradient")
        enough = 2 * (sum(w.nbytes for w in weights.values()) + 8) * 7 / 8
        sent = judging.require_sent(program, enough)
        both = program, _spread(_at_once, weights, batch)
        needed, at_once = (measure.bytes_per_device(one).temporaries for one in both)
        judging.require_at_most(needed, 0.6 * at_once, f"bytes of temporaries on {rows} rows")
    share = needed / at_once
    return f"{sent:,.0f} ring bytes, and {share:.2f} of the temporaries of all rows at once."


def _spread(step, weights, batch):
    specs = dict(in_specs=(P(), P("x")), out_specs=P(), check=False)
    return judging.on_each(step, mesh.make(x=8), weights, batch, **specs)


def _at_once(weights, batch):
    part = jax.value_and_grad(lambda w: tuple(squares(w, batch)), has_aux=True)(weights)
    (total, count), slope = jax.lax.psum(part, "x")
    return total / count, jax.tree.map(lambda g: g / count, slope)


# Of the arrays between the eight matrices. The narrowest is not in the cheapest cut: beside 32 no
# array narrower than 96 leaves every stage at most half of the parameters.
WIDTHS = (64, 96, 48, 96, 64, 96, 32, 64, 64)
LEAST = 4 * (48 + 64)


@puzzle("write the tasks of each device, as in `F0 I0 W0`.")
def order(lists: Sequence[str]) -> Verdict:
    """Check the order of tasks on three devices that takes 17 ticks, with two microbatches live.

    `lists` has the tasks of each device as text, such as "F0 I0 W0 F1 ...". There are four
    microbatches and a stage on each device, and a task takes a tick.
    """
    tasks = [[_task(stage, word) for word in text.split()] for stage, text in enumerate(lists)]
    if len(tasks) != 3:
        raise Wrong(f"{len(tasks)} lists; there are three devices.")
    try:
        run = schedules.timeline(tasks)
    except ValueError as error:
        raise Wrong(str(error)) from error
    table = run.schedule
    if (table.stages, table.microbatches) != (3, 4) or not all(run.peak_weights_pending):
        raise Wrong("expected F, I and W of microbatches 0 to 3 on every device.")
    live, makespan = max(run.peak_live), run.makespan
    if live > 2:
        raise Wrong(f"makespan {makespan}, but {live} microbatches live on a device; two may be.")
    if makespan > 17:
        raise Wrong(f"it runs, two are live, and the makespan is {makespan}; 17 is possible.")
    all_ticks = len(tasks) * makespan
    idle = all_ticks - sum(map(len, tasks))
    return (
        f"makespan {makespan}, bubble {run.bubble:.1%} ({idle} of {all_ticks} ticks), live "
        f"{run.peak_live}."
    )


def _task(stage, word):
    if word[:1] not in schedules.table.KINDS or not word[1:].isdigit():
        raise Wrong(f"{word!r} is no task; write F, I or W and a microbatch, such as F0.")
    return schedules.Task(stage, word[0], int(word[1:]))


@puzzle("mark where a stage ends, by `marks.stage_boundary(x)`.")
def boundaries(forward: Callable[[list[jax.Array], jax.Array], jax.Array]) -> Verdict:
    """Check the two marks that cut eight layers, x → tanh(x @ w), into three stages.

    `forward(weights, x)` has a list of eight matrices, calls `marks.stage_boundary` twice, and
    returns what the last layer yields. A stage may have half of the parameters at most; it is
    judged by the bytes that cross the boundaries, forward and back, for one row.
    """

    def loss(weights, batch):
        return objective.Mean(jnp.sum(forward(weights, batch["x"]) ** 2), len(batch["x"]) * 1.0)

    sizes = list(itertools.pairwise(WIDTHS))
    weights = [judging.normal(i, *size) / np.sqrt(size[0]) for i, size in enumerate(sizes)]
    batch = {"x": judging.normal(9, 24, WIDTHS[0])}
    stages, _ = cut.stages(loss, weights, {"x": batch["x"][:4]})
    if len(stages) == 1:
        raise NotYet
    if len(stages) != 3:
        raise Wrong(f"{len(stages)} stages; two marks make three.")
    for stage in stages:
        share = sum(x.size for x in stage.params) / sum(w.size for w in weights)
        if share > 0.5:
            raise Wrong(f"stage {stage.index} has {share:.0%} of the parameters; at most half.")

    def plain(weights):
        x = functools.reduce(lambda x, w: jnp.tanh(x @ w), weights, batch["x"])
        return jnp.sum(x**2) / len(x)

    expected = judging.in_one(jax.value_and_grad(plain))(weights)
    run = jax.jit(pipeline.value_and_grad(loss, mesh.make(stage=3), "1f1b", 6))
    mean, slope = run(weights, batch)
    judging.require_close(mean, expected[0], "the loss")
    judging.require_close(slope, expected[1], "the gradient")
    out = [x for s in stages if not s.last for x in s.outputs]
    crossing = sum(x.size * x.dtype.itemsize for x in out) // 4  # for one row, one way
    if crossing > LEAST:
        raise Wrong(f"equal to one device, {2 * crossing:,} bytes a row; {2 * LEAST:,} are enough.")
    return f"equal to one device, and {2 * crossing:,} bytes a row cross, half of them back."
