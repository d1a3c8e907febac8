"""Loss and gradient by a schedule of tasks on stages."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardwise import schedules
from shardwise.mesh import outside
from shardwise.pipeline import checks
from shardwise.pipeline.manual import Manual, trace_by_hand
from shardwise.pipeline.placing import Pipelined, stage_meshes
from shardwise.pipeline.planning import Plan
from shardwise.pipeline.tracing import Asked, Traced, abstract, trace


def value_and_grad(
    loss: Callable,
    mesh: Mesh,
    schedule: str | schedules.Schedule | Sequence,
    microbatches: int,
    axis: str = "stage",
    rows: P = P(),
    names: dict[str, P] | None = None,
    has_aux: bool = False,
    aux: Any = "sum",
    gather: str = "task",
    manual: Manual | None = None,
    who: str = checks.WHO,
) -> "ValueAndGrad":
    """A function of `(params, batch, *args, key=None)`: the whole batch's loss, and its gradient.

    `loss(params, batch, *args)` is written for one device, with `marks.stage_boundary` where a
    stage ends. It takes `key=` too where one is given, and returns an `objective.Mean` or a scalar,
    a mean over rows; with `has_aux`, that and a tree: see `shardwise.objective`, also for keys.
    Microbatch j of m holds the rows r of the batch with r % m == j. `params` is what
    `pipeline.place` returns, and so is the gradient.

    Tasks are dispatched, not waited for: while a device runs one, its next one is on its way. The
    function's method `timed`, with the same arguments, waits for each, and returns its results and
    {task: (start, end)} in seconds; the first run compiles. The threads do not see JAX's context
    managers: set `jax.config` instead. Effects (`jax.debug.print`) happen once for each microbatch.

    Args:
      schedule: a name in `schedules.SCHEDULES`, a `Schedule`, or lists of tasks written by hand.
      axis: the mesh axis along which stages are placed; each rank is the rest of the mesh there,
        and its layouts are the compiler's, whatever the types of the mesh's axes.
      rows: within a rank, the PartitionSpec of a batch's and an activation's rows.
      names: {name: PartitionSpec} for `marks.constrain` within a rank.
      aux: how the trees of the microbatches become one: "sum", "mean", "max", "concatenate" (in
        the order of the batch's rows), or a tree of these, a prefix of it.
      gather: parameters that are cut along the axes of `rows` (FSDP) are gathered in each "task"
        that uses them, or once a "step", and then held whole by each device until it ends.
        Gradients are summed over these axes in each task, either way.
      manual: with a `Manual`, collectives within a rank are written out, and each program is a
        shard_map; it takes the place of `rows`, `names` and `gather`.
      who: the function that was called, which errors name.

    Raises:
      ValueError: an axis that the mesh lacks, no such `gather`, a mesh over several processes.

    Raises, when called:
      ValueError: marks that do not fit the schedule or cannot be cut, arrays of different numbers
        of rows, rows that do not divide, a count that depends on the parameters (with several
        microbatches), parameters of another placement.
      TypeError: a loss of another form, leaves that are no arrays, parameters that are not
        `Pipelined`.
      TaskError: a task failed.
    """
    checks.options(who, mesh, axis, microbatches, gather)
    options = axis, rows, names or {}, has_aux, aux, gather, manual, who
    asked = Asked(loss, mesh, schedule, microbatches, *options)
    return ValueAndGrad(asked)


def programs(
    function: "ValueAndGrad", params: Pipelined, batch: Any, *args: Any, key: Any = None
) -> dict[tuple[int, str], jax.stages.Lowered]:
    """{(stage, kind): jax.stages.Lowered}: the programs of each stage, to read, compile and count.

    `function` is what `value_and_grad` returned; the kinds are those of its schedule, "gather"
    where parameters are gathered once a step, and by hand "total", which then adds up gradients.
    """
    plan = function.plan(params, batch, *args, key=key)
    with outside():
        return plan.lowered(params)


class ValueAndGrad:
    """The function that `value_and_grad` returns; traces and programs are kept, as by `jax.jit`."""

    def __init__(self, asked: Asked):
        self.asked, self._plans, self._traces = asked, {}, {}

    def __call__(self, params: Pipelined, batch: Any, *args: Any, key: Any = None) -> Any:
        return self._run(params, batch, args, key, timed=False)[0]

    def timed(self, params: Pipelined, batch: Any, *args: Any, key: Any = None) -> Any:
        """(the function's result, {task: (start, end)}), in seconds from the run's start."""
        return self._run(params, batch, args, key, timed=True)

    def homes(self, tree: Any, batch: Any, *args: Any, key: Any = None) -> tuple[list, tuple]:
        """(the homes of each leaf of `tree`, the meshes of the stages), for `place`."""
        traced = self._traced(tree, batch, args, key)
        homes = [
            tuple((s.index, s.rows[i]) for s in traced.stages if i in s.rows)
            for i in range(len(jax.tree.leaves(tree)))
        ]
        return homes, stage_meshes(self.asked.mesh, self.asked.axis, traced.schedule.device_of)

    def plan(self, params: Pipelined, batch: Any, *args: Any, key: Any = None) -> Plan:
        """The `Plan` for arguments of these shapes, made once."""
        checks.parameters(self.asked.who, params)
        checks.leaves(self.asked.who, (), batch, args, key)
        given = (params.layout, params.structure, params.meshes, _signature((batch, args, key)))
        if given not in self._plans:
            tree = params.abstract()
            homes, meshes = self.homes(tree, batch, *args, key=key)
            if (homes, meshes) != ([p.homes for p in params.layout], params.meshes):
                raise ValueError(
                    f"{self.asked.who}: the parameters are placed for other stages or devices; "
                    "take them whole, and place them for this function."
                )
            with outside():
                self._plans[given] = Plan(
                    self.asked, self._planned(params, batch, args, key), params
                )
        return self._plans[given]

    def _run(self, params, batch, args, key, timed):
        plan = self.plan(params, batch, *args, key=key)
        with outside():
            value, grads, times = plan.run(params, batch, args, key, timed)
        return (value, grads), times

    def _planned(self, params, batch, args, key) -> Traced:
        if self.asked.manual is not None:
            return trace_by_hand(self.asked, params, batch, args, key)
        return self._traced(params.abstract(), batch, args, key)

    def _traced(self, tree, batch, args, key) -> Traced:
        checks.leaves(self.asked.who, tree, batch, args, key)
        given = _signature((tree, batch, args, key))
        if given not in self._traces:
            self._traces[given] = trace(self.asked, tree, batch, args, key)
        return self._traces[given]


def _signature(tree):
    leaves, structure = jax.tree.flatten(abstract(tree))
    return structure, tuple((x.shape, str(x.dtype), x.weak_type) for x in leaves)
