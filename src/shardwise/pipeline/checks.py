"""Checks by which a pipeline refuses its arguments before anything runs."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from shardwise import objective, schedules


def options(asked: Any) -> None:
    """Check the options of `value_and_grad` for which no loss is needed."""
    if asked.axis not in asked.mesh.shape:
        raise ValueError(
            f"{asked.who}: the mesh has no axis {asked.axis!r}; it has {dict(asked.mesh.shape)}."
        )
    if asked.microbatches < 1:
        raise ValueError(f"{asked.who}: microbatches={asked.microbatches}; expected 1 or more.")


def mesh_around(asked: Any) -> None:
    """Check that `jax.set_mesh` has set this mesh, of these axis types, or none."""
    around = jax.sharding.get_abstract_mesh()
    if not around.empty and around != asked.mesh.abstract_mesh:
        raise ValueError(
            f"{asked.who}: jax.set_mesh has set another mesh, {dict(around.shape)} of axis types "
            f"{around.axis_types}; set {dict(asked.mesh.shape)} as mesh.make makes it, or none. "
            f"For Explicit axes use layouts.Layout(stage=...), which takes them."
        )


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
            _array(who, path, x)
            dtype = jnp.result_type(x)
            if group is tree and not jnp.issubdtype(dtype, jnp.inexact):
                raise TypeError(
                    f"{who}: {path} is {dtype}, which has no gradient; pass keys by key=, and "
                    f"counters in the batch or as further arguments."
                )


def _array(who, path, x):
    if not (hasattr(x, "dtype") and hasattr(x, "shape")) and not isinstance(x, int | float):
        raise TypeError(
            f"{who}: {path} is a {type(x).__name__}, not an array. Keep what is no array out of "
            f"the tree, and put it back within the loss (nnx.split and nnx.merge; eqx.partition "
            f"with eqx.is_array and eqx.combine)."
        )


def rows(who: str, batch: Any, microbatches: int) -> None:
    """Check, for several microbatches, that arrays have equally many rows, a multiple of these."""
    if microbatches == 1:
        return
    found = {}
    for keys, x in jax.tree_util.tree_flatten_with_path(batch)[0]:
        path = jax.tree_util.keystr(keys, simple=True, separator="/") or "the batch"
        if not jnp.ndim(x):
            raise ValueError(
                f"{who}: {path} of the batch is a scalar, and has no rows to cut into "
                f"{microbatches} microbatches; hand it over as a further argument."
            )
        found.setdefault(jnp.shape(x)[0], []).append(path)
    if len(found) > 1:
        told = ", ".join(f"{path}: {count}" for count, paths in found.items() for path in paths)
        raise ValueError(
            f"{who}: the batch's arrays have different numbers of rows ({told}), and nothing "
            f"says which rows belong together in one of {microbatches} microbatches. Give each "
            f"row its own part of the longer arrays, as [rows, per row, ...], or use one "
            f"microbatch."
        )
    count, paths = next(iter(found.items()))
    if count % microbatches:
        raise ValueError(
            f"{who}: {count} rows ({', '.join(paths)}) do not split into {microbatches} "
            f"microbatches; pad the batch with masked rows."
        )


def count(who: str, loss: objective.Traced, params: Any, microbatches: int) -> None:
    """Check that the count is known before the first of several backward passes."""
    if microbatches > 1 and loss.count_follows(params):
        raise ValueError(
            f"{who}: the loss's count depends on the parameters, or its trace cannot tell "
            f"(within a custom_vjp or custom_jvp). With {microbatches} microbatches it has to be "
            f"known before the first backward pass: use one microbatch, or a count from the batch "
            f"alone."
        )


def schedule(who: str, name: str, stages: int, ranks: int, axis: str) -> None:
    """Check that a schedule has this name, and the loss a mark where it takes several stages."""
    if name not in schedules.SCHEDULES:
        raise ValueError(
            f"{who}: no schedule {name!r}; there are {', '.join(schedules.SCHEDULES)}."
        )
    if stages > 1:  # too many or too few, the schedule says
        return
    least = (n for n in range(1, 2 * ranks + 1) if _takes(name, n, ranks))
    if (wanted := next(least, 1)) > 1:
        raise ValueError(
            f"{who}: the loss has no stage boundary, so that all of it is one stage, and {name} on "
            f"{ranks} ranks along {axis!r} takes {wanted}. Write x = marks.stage_boundary(x) where "
            f"a stage ends, on all that it hands to the next, between layers and in no loop; "
            f"{wanted} stages need {wanted - 1} of these marks."
        )


def _takes(name, stages, ranks):
    enough = 2 * stages  # microbatches, of which some want as many as stages
    try:
        return schedules.SCHEDULES[name](stages, ranks, enough)
    except ValueError:
        return None


def undivided(stage: Any, halves: Any, schedule: Any) -> None:
    """Warn where a schedule splits backward passes, and that of a stage cannot be split."""
    splits = any(task.kind == "I" for order in schedule.tasks for task in order)
    if splits and halves.undivided:
        warnings.warn(
            f"pipeline: stage {stage.index}: {', '.join(halves.undivided)} yields both what the "
            f"stage before waits for and gradients of weights; all of it runs in I.",
            stacklevel=2,
        )


def concatenated(who: str, ways: list[str], tree: Any) -> None:
    """Check that auxiliary outputs to concatenate have rows."""
    for way, (keys, x) in zip(ways, jax.tree_util.tree_flatten_with_path(tree)[0], strict=True):
        if way == "concatenate" and not x.shape:
            raise ValueError(
                f"{who}: aux='concatenate' for the scalar aux{jax.tree_util.keystr(keys)}; "
                f"expected an array that has rows."
            )


def constraint(who: str, sharding: Any, mesh: Any, axis: str) -> None:
    """Check that a `with_sharding_constraint` of the loss names a rank's own axes alone."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else None
    names = [n for entry in spec or () for n in (entry if isinstance(entry, tuple) else (entry,))]
    known = [name for name in mesh.axis_names if name != axis]
    if spec is None or not {n for n in names if isinstance(n, str)} <= set(known):
        raise ValueError(
            f"{who}: the loss constrains an array to {sharding}; within a stage there are the "
            f"axes {known}. Constrain to a PartitionSpec of these."
        )


def no_rows(who: str, columns: tuple[str, ...]) -> None:
    """Refuse auxiliary outputs that are rows, where the sequence is cut."""
    raise ValueError(
        f"{who}: aux 'concatenate' joins rows, and of each row a device has a part of the sequence "
        f"alone, over {columns}. Return sums over tokens, or lay the sequence out by the compiler."
    )
