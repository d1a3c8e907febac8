"""The loss of one microbatch, traced and cut; the schedule that its stages are run by."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from shardwise import marks, objective, schedules
from shardwise.objective.parts import meaning
from shardwise.pipeline import checks, cut


class Asked(NamedTuple):
    """The arguments that `value_and_grad` was called with."""

    loss: Callable
    mesh: Mesh
    schedule: str | schedules.Schedule | Sequence
    microbatches: int
    axis: str
    has_aux: bool
    aux: Any
    who: str


class Traced(NamedTuple):
    """The stages; the loss of several microbatches as `objective` sees it; shapes of its outputs.

    The last stage's outputs are the total, the count where the loss is a `Mean`, and the leaves of
    `aux`, which are joined in these `ways`. The data of stages are the leaves of the batch, of the
    row numbers, of the further arguments and the key.
    """

    stages: list[cut.Stage]
    schedule: schedules.Schedule
    loss: objective.Traced | None
    mean: objective.Mean
    aux: Any
    ways: list[str]

    @property
    def has_count(self) -> bool:
        """Whether the loss is a `Mean`."""
        return self.mean.count is not None

    @property
    def dtype(self) -> Any:
        """The dtype of the mean, as one device has it."""
        return jnp.result_type(*(x.dtype for x in jax.tree.leaves(self.mean)))


def traced_parts(
    asked: Asked,
    loss: Callable,
    groups: tuple,
    in_parts: bool,
    total: Callable,
    relocate: Callable,
) -> Traced:
    """`loss` of one part of the batch, of (params, batch, rows, args, key), traced and cut.

    `total` is what `marks.total` means, `relocate(sharding)` what a constraint of the loss becomes.

    Raises:
      ValueError, TypeError: as `value_and_grad`.
    """
    m, traced = asked.microbatches, None
    with marks.bind(total=total):
        if in_parts:
            traced = objective.trace(loss, *groups, asked.has_aux)
            checks.count(asked.who, traced, groups[0], m)
    bare = objective.normal(loss, asked.has_aux)

    def outputs(params, batch, rows, args, key):
        own = {} if key is None else {"key": key}
        with marks.bind(index=meaning(rows), total=total):
            return bare(params, batch, *args, **own)

    stages, (mean, aux) = cut.stages(outputs, *groups, relocate=relocate)
    if m == 1 and mean.count is not None:  # which may depend on the parameters
        stages[-1] = dataclasses.replace(stages[-1], seeds=(0, 1))
    ways = objective.ways(asked.aux, aux)
    checks.concatenated(asked.who, ways, aux)
    return Traced(stages, _schedule(asked, len(stages)), traced, mean, aux, ways)


def abstract(tree: Any) -> Any:
    """Shapes and dtypes as JAX sees them."""
    return jax.tree.map(_abstract, tree)


def _abstract(x):
    weak = getattr(x, "weak_type", not hasattr(x, "dtype"))
    dtype = getattr(x, "dtype", None) or jnp.result_type(x)
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(jnp.shape(x), dtype, weak_type=weak)


def _schedule(asked, stages):
    ranks = asked.mesh.shape[asked.axis]
    if isinstance(asked.schedule, str):
        checks.schedule(asked.who, asked.schedule, stages, ranks, asked.axis)
        try:
            return schedules.SCHEDULES[asked.schedule](stages, ranks, asked.microbatches)
        except ValueError as error:
            raise ValueError(f"{asked.who}: {error}") from error
    schedule = schedules.from_tasks(asked.schedule)
    schedules.check(schedule)
    given = (schedule.stages, schedule.devices, schedule.microbatches)
    if given != (stages, ranks, asked.microbatches):
        raise ValueError(
            f"{asked.who}: the schedule is for {given[0]} stages, {given[1]} devices and "
            f"{given[2]} microbatches; the loss has {stages} stages (one more than calls of "
            f"marks.stage_boundary), the mesh {ranks} ranks along {asked.axis!r}, and "
            f"microbatches is {asked.microbatches}."
        )
    return schedule
