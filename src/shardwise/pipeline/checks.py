"""Checks by which a pipeline refuses its arguments before anything runs."""

from typing import Any

import jax

from shardwise import schedules

_UNMARKED = (
    " The loss has no stage boundary, so that all of it is one stage. Write x = "
    "marks.stage_boundary(x) where a stage ends, on all that it hands to the next, between layers "
    "and in no loop; k of these marks make k + 1 stages."
)


def arrays(who: str, tree: Any, batch: Any, args: tuple, key: Any) -> None:
    """Raise TypeError where these are not all arrays."""
    named = {"the parameters": tree, "the batch": batch, "the arguments": args, "key": key}
    for keys, x in jax.tree_util.tree_flatten_with_path(named)[0]:
        shaped = hasattr(x, "dtype") and hasattr(x, "shape")
        if not shaped and not isinstance(x, int | float):
            raise TypeError(
                f"{who}: {keys[0].key}{jax.tree_util.keystr(keys[1:])} is a {type(x).__name__}, "
                f"not an array. Keep what is no array out of the tree, and put it back within the "
                f"loss (nnx.split and nnx.merge; eqx.partition with eqx.is_array and eqx.combine)."
            )


def schedule(asked: Any, stages: int) -> schedules.Schedule:
    """The schedule that was asked for, by name or as lists; a ValueError if it is not for these."""
    who, given, ranks = asked.who, asked.schedule, asked.mesh.shape[asked.axis]
    if isinstance(given, str):
        if given not in schedules.SCHEDULES:
            raise ValueError(
                f"{who}: no schedule {given!r}; there are {', '.join(schedules.SCHEDULES)}."
            )
        try:
            return schedules.SCHEDULES[given](stages, ranks, asked.microbatches)
        except ValueError as error:
            told = f"{error} (the mesh has {ranks} ranks along {asked.axis!r})"
            raise ValueError(f"{who}: {told}{_UNMARKED if stages == 1 else ''}") from error
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
