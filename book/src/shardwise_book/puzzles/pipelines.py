"""Puzzles on pipelines: an order in little memory, and where stages end."""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from shardwise import mesh, objective, pipeline, schedules
from shardwise.pipeline import cut
from shardwise_book.puzzles.running import in_one, normal, require_close
from shardwise_book.puzzles.verdict import NotYet, Verdict, Wrong, puzzle

WIDTHS = (64, 128, 128, 32, 128, 16, 128, 128, 64)  # of the arrays between the eight matrices


@puzzle("write the tasks of each device, as in `F0 I0 W0`.")
def order(lists: Sequence[str]) -> Verdict:
    """Three devices of one stage each, four microbatches, one tick a task: 17 ticks, two live.

    A list for each device, such as "F0 I0 W0 F1 ...".
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
    return f"makespan {makespan}, bubble {run.bubble:.1%}, live {run.peak_live}."


def _task(stage, word):
    if word[:1] not in schedules.KINDS or not word[1:].isdigit():
        raise Wrong(f"{word!r} is no task; write F, I or W and a microbatch, such as F0.")
    return schedules.Task(stage, word[0], int(word[1:]))


@puzzle("mark where a stage ends, by `marks.stage_boundary(x)`.")
def boundaries(forward: Callable[[list[jax.Array], jax.Array], jax.Array]) -> Verdict:
    """Eight layers x → tanh(x @ w), cut in three: at most half of the parameters in a stage.

    Judged by the bytes that cross the boundaries, forward and back, for one row.
    """

    def loss(weights, batch):
        return objective.Mean(jnp.sum(forward(weights, batch["x"]) ** 2), len(batch["x"]) * 1.0)

    sizes = list(itertools.pairwise(WIDTHS))
    weights = [normal(i, *size) / np.sqrt(size[0]) for i, size in enumerate(sizes)]
    batch = {"x": normal(9, 24, WIDTHS[0])}
    stages, _ = cut.stages(loss, weights, {"x": batch["x"][:4]})
    _check_stages(stages, weights)
    expected = in_one(jax.value_and_grad(_on_one_device))(weights, batch)
    run = jax.jit(pipeline.value_and_grad(loss, mesh.make(stage=3), "1f1b", 6))
    mean, slope = run(weights, batch)
    require_close(mean, np.asarray(expected[0]), "the loss")
    require_close(slope, expected[1], "the gradient")
    out = [x for s in stages if not s.last for x in s.outputs]
    crossing = sum(x.size * x.dtype.itemsize for x in out) // 4  # for one row, one way
    if crossing > 4 * (32 + 16):
        raise Wrong(
            f"equal to one device, {2 * crossing:,} bytes a row; {2 * 4 * 48:,} are enough."
        )
    return f"three stages equal to one device, and {2 * crossing:,} bytes a row cross."


def _check_stages(stages, weights):
    if len(stages) == 1:
        raise NotYet
    if len(stages) != 3:
        raise Wrong(f"{len(stages)} stages; two marks make three.")
    whole = sum(w.size for w in weights)
    for stage in stages:
        share = sum(x.size for x in stage.params) / whole
        if share > 0.5:
            raise Wrong(f"stage {stage.index} has {share:.0%} of the parameters; at most half.")


def _on_one_device(weights, batch):
    x = batch["x"]
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2) / len(x)
