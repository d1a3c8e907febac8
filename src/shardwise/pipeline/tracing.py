"""The loss of one microbatch, traced and cut; the schedule that its stages are run by."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import cut, marks, objective, schedules
from shardwise.objective.microbatches import meaning
from shardwise.pipeline import checks
from shardwise.pipeline.placing import stage_meshes


@dataclasses.dataclass(frozen=True)
class Asked:
    """The arguments that `value_and_grad` was called with."""

    loss: Callable
    mesh: Mesh
    schedule: str | schedules.Schedule | Sequence
    microbatches: int
    axis: str
    rows: P
    names: dict[str, P]
    has_aux: bool
    aux: Any
    gather: str
    manual: Any = None
    who: str = checks.WHO


class Traced(NamedTuple):
    """The stages; the loss of several microbatches as `objective` sees it; shapes of its outputs.

    The last stage's outputs are the total, the count where the loss is a `Mean`, and the leaves of
    `aux`, which are joined in these `ways`. The data of stages are the leaves of the batch, of the
    row numbers, of the further arguments and the key. `local` is of a trace by hand
    (`pipeline.manual`).
    """

    stages: list[cut.Stage]
    schedule: schedules.Schedule
    loss: objective.Traced | None
    mean: objective.Mean
    aux: Any
    ways: list[str]
    local: Any = None

    @property
    def has_count(self) -> bool:
        """Whether the loss is a `Mean`."""
        return self.mean.count is not None

    @property
    def dtype(self) -> Any:
        """The dtype of the mean, as one device has it."""
        return jnp.result_type(*(x.dtype for x in jax.tree.leaves(self.mean)))


def trace(asked: Asked, tree: Any, batch: Any, args: tuple, key: Any) -> Traced:
    """The loss traced and cut, for abstract or real arguments of these shapes.

    Raises:
      ValueError, TypeError: as `value_and_grad`.
    """
    m = asked.microbatches
    checks.rows(asked.who, batch, m)
    tree, batch, args, key = abstract((tree, batch, args, key))
    part = jax.tree.map(lambda x: _resized(x, 1, m), (batch, row_numbers(batch)))
    more = jax.tree.map(lambda x: _resized(x, 2, m), (batch, row_numbers(batch)))
    rank = stage_meshes(asked.mesh, asked.axis, [0])[0]
    with _as_rank(rank):
        return traced_parts(
            asked,
            asked.loss,
            (tree, *part, args, key),
            in_parts=m > 1,  # one part is the whole, and exact for every loss
            total=objective.Totals(m),
            constrain=_constrain(asked, rank.abstract_mesh),
            relocate=_relocate(asked, rank.abstract_mesh),
            more=(*more, args, key) if any(asked.rows) else None,
        )


def traced_parts(
    asked: Asked,
    loss: Callable,
    groups: tuple,
    in_parts: bool,
    total: Callable,
    fold: Callable = lambda key: key,
    **options: Any,
) -> Traced:
    """`loss` of one part of the batch, of (params, batch, rows, args, key), traced and cut.

    `total` is what `marks.total` means, `fold` makes of the key that of the part, where draws go by
    shape; `options` are those of `cut.stages`.
    """
    m, traced = asked.microbatches, None
    with marks.bind(total=total):
        if in_parts:
            traced = objective.trace(loss, *groups, asked.has_aux)
            checks.count(asked.who, traced, groups[0], m)
    bare = objective.normal(loss, asked.has_aux)
    folded = traced is not None and not traced.by_place

    def outputs(params, batch, rows, args, key):
        own = {} if key is None else {"key": fold(key) if folded else key}
        with marks.bind(index=meaning(rows), total=total):
            return bare(params, batch, *args, **own)

    stages, (mean, aux) = cut.stages(outputs, *groups, **options)
    if m == 1 and mean.count is not None:  # which may depend on the parameters
        stages[-1] = dataclasses.replace(stages[-1], seeds=(0, 1))
    ways = objective.ways(asked.aux, aux)
    checks.concatenated(asked.who, ways, aux)
    return Traced(stages, _schedule(asked, len(stages)), traced, mean, aux, ways)


def abstract(tree: Any) -> Any:
    """Shapes and dtypes as JAX sees them."""
    return jax.tree.map(_abstract, tree)


def row_numbers(batch: Any) -> dict[str, Any]:
    """The row numbers of `objective.numbers`, on the host."""
    return {name: np.asarray(x) for name, x in objective.numbers(batch).items()}


def _abstract(x):
    weak = getattr(x, "weak_type", not hasattr(x, "dtype"))
    dtype = getattr(x, "dtype", None) or jnp.result_type(x)
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(jnp.shape(x), dtype, weak_type=weak)


def _resized(x, times, m):
    """The shape of `x` with the rows of one of `m` parts, `times` as many."""
    shape = (times * (x.shape[0] // m), *x.shape[1:]) if x.shape else ()
    return jax.ShapeDtypeStruct(shape, x.dtype)


@contextlib.contextmanager
def _as_rank(rank):
    """Put one rank's mesh in the place of that of `jax.set_mesh`: a stage has no other devices."""
    if jax.sharding.get_abstract_mesh().empty:
        yield
    else:
        with jax.set_mesh(rank):
            yield


def _constrain(asked, mesh):
    def constrain(x, name):
        spec = asked.names.get(name)
        if spec is None:
            return x
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, sharding), x)

    return constrain


def _relocate(asked, mesh):
    def relocate(sharding):
        checks.constraint(asked.who, sharding, mesh, asked.axis)
        return NamedSharding(mesh, sharding.spec)

    return relocate


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
