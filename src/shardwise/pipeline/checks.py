"""Checks by which a pipeline refuses its arguments before anything runs."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from shardwise import schedules
from shardwise.objective.tracing import Traced
from shardwise.schedules.published import takes


def options(who: str, mesh: Mesh, axis: str, microbatches: int) -> None:
    """Check the options of `value_and_grad` for which no loss is needed."""
    if axis not in mesh.shape:
        raise ValueError(f"{who}: the mesh has no axis {axis!r}; it has {dict(mesh.shape)}.")
    if microbatches < 1:
        raise ValueError(f"{who}: microbatches={microbatches}; expected 1 or more.")


def leaves(who: str, tree: Any, batch: Any, args: tuple, key: Any) -> None:
    """Check that parameters are floating-point arrays, and that all else is arrays."""
    if not jax.tree.leaves(batch):
        raise TypeError(
            f"{who}: the batch has no arrays ({batch!r}); its rows are what is cut into "
            f"microbatches. Hand what has no rows over as further arguments."
        )
    named = {"the parameters": tree, "the batch": batch, "the arguments": args, "key": key}
    for name, group in named.items():
        for keys, x in jax.tree_util.tree_flatten_with_path(group)[0]:
            path = f"{name}{jax.tree_util.keystr(keys)}"
            shaped = hasattr(x, "dtype") and hasattr(x, "shape")
            if not shaped and not isinstance(x, int | float):
                raise TypeError(
                    f"{who}: {path} is a {type(x).__name__}, not an array. Keep what is no array "
                    f"out of the tree, and put it back within the loss (nnx.split and nnx.merge; "
                    f"eqx.partition with eqx.is_array and eqx.combine)."
                )
            dtype = jnp.result_type(x)
            if group is tree and not jnp.issubdtype(dtype, jnp.inexact):
                raise TypeError(
                    f"{who}: {path} is {dtype}, which has no gradient; pass keys by key=, and "
                    f"counters in the batch or as further arguments."
                )


def count(who: str, loss: Traced, params: Any, microbatches: int) -> None:
    """Check that the count is known before the first of several backward passes."""
    if microbatches > 1 and loss.count_follows(params):
        raise ValueError(
            f"{who}: the loss's count depends on the parameters, or its trace cannot tell "
            f"(within a custom_vjp or custom_jvp). With {microbatches} microbatches it has to be "
            f"known before the first backward pass: use one microbatch, or a count from the batch "
            f"alone."
        )


def schedule(asked: Any, stages: int) -> schedules.Schedule:
    """The schedule that was asked for, by name or as lists; a ValueError if it is not for these."""
    who, given, ranks = asked.who, asked.schedule, asked.mesh.shape[asked.axis]
    if isinstance(given, str):
        if given not in schedules.SCHEDULES:
            raise ValueError(
                f"{who}: no schedule {given!r}; there are {', '.join(schedules.SCHEDULES)}."
            )
        if stages == 1:  # too many or too few, the schedule says
            _unmarked(who, given, ranks, asked.axis)
        try:
            return schedules.SCHEDULES[given](stages, ranks, asked.microbatches)
        except ValueError as error:
            raise ValueError(f"{who}: {error}") from error
    found = schedules.from_tasks(given)
    schedules.check(found)
    if (found.stages, found.devices, found.microbatches) != (stages, ranks, asked.microbatches):
        raise ValueError(
            f"{who}: the schedule is for {found.stages} stages, {found.devices} devices and "
            f"{found.microbatches} microbatches; the loss has {stages} stages (one more than calls "
            f"of marks.stage_boundary), the mesh {ranks} ranks along {asked.axis!r}, and "
            f"microbatches is {asked.microbatches}."
        )
    return found


def _unmarked(who, name, ranks, axis):
    """Check that a schedule takes a loss without a mark."""
    # With enough microbatches: some want as many as stages.
    least = (n for n in range(1, 2 * ranks + 1) if takes(name, n, ranks, 2 * n))
    if (wanted := next(least, 1)) > 1:
        raise ValueError(
            f"{who}: the loss has no stage boundary, so that all of it is one stage, and {name} on "
            f"{ranks} ranks along {axis!r} takes {wanted}. Write x = marks.stage_boundary(x) where "
            f"a stage ends, on all that it hands to the next, between layers and in no loop; "
            f"{wanted} stages need {wanted - 1} of these marks."
        )


def undivided(halves: Any, schedule: Any) -> None:
    """Warn where a schedule splits backward passes, and that of a stage cannot be split."""
    splits = any(task.kind == "I" for order in schedule.tasks for task in order)
    if splits and halves.undivided:
        warnings.warn(
            f"pipeline: stage {halves.stage.index}: {', '.join(halves.undivided)} yields both "
            f"what the stage before waits for and gradients of weights; all of it runs in I.",
            stacklevel=2,
        )
