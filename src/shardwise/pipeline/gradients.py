"""Loss and gradient by a schedule of tasks on stages."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import cut, schedules
from shardwise.pipeline.placing import Pipelined, stage_meshes
from shardwise.pipeline.planning import Plan


def value_and_grad(
    loss, mesh, schedule, microbatches, axis="stage", rows=P(), names=None, has_aux=False, aux="sum"
):
    """A function of `(params, batch, *args)`: the loss over the whole batch, and its gradient.

    `loss(params, batch, *args)` is written for one device, with `marks.stage_boundary` where a
    stage ends. It returns `(total, count)`, whose quotient over all microbatches is the result, or
    a scalar, a mean over rows; with `has_aux`, that and a tree. The batch's rows are taken in
    `microbatches` contiguous parts. Typed PRNG keys among `args` are folded with the microbatch's
    number. `params` is what `pipeline.split` returns, and so is the gradient. The function has an
    attribute `times`, {task: (start, end)} of its last run in seconds; the first run compiles. The
    threads do not see JAX's context managers: set `jax.config` instead.

    Args:
      schedule: a name in `schedules.SCHEDULES`, a `Schedule`, or lists of tasks written by hand.
      axis: the mesh axis along which stages are placed; each rank is the rest of the mesh there.
      rows: within a rank, the PartitionSpec of a batch's and an activation's rows.
      names: {name: PartitionSpec} for `marks.constrain` within a rank.
      aux: how the tree of the microbatches becomes one: "sum", "max", "concatenate", or a tree of
        these, a prefix of it.

    Raises, when called:
      ValueError: an axis that the mesh lacks, marks that do not fit the schedule or cannot be cut,
        rows that do not divide, parameters of another placement.
      TypeError: a loss of another form, parameters that are not `Pipelined`.
      TaskError: a task failed.
    """
    if axis not in mesh.shape:
        raise ValueError(
            f"pipeline.value_and_grad: the mesh has no axis {axis!r}; it has {dict(mesh.shape)}."
        )
    if microbatches < 1:
        raise ValueError(
            f"pipeline.value_and_grad: microbatches={microbatches}; expected 1 or more."
        )
    return _ValueAndGrad(loss, mesh, schedule, microbatches, axis, rows, names or {}, has_aux, aux)


def programs(function, params, batch, *args):
    """{(stage, kind): jax.stages.Lowered}: what each stage runs, to read, compile and count.

    `function` is what `value_and_grad` returned; the kinds are those of its schedule.
    """
    return function.plan(params, batch, *args).lowered(params)


class _ValueAndGrad:
    def __init__(self, loss, mesh, schedule, microbatches, axis, rows, names, has_aux, aux):
        self.loss, self.mesh, self.axis, self.rows, self.names = loss, mesh, axis, rows, names
        self.microbatches, self.has_aux, self.aux = microbatches, has_aux, aux
        self.asked, self.times, self._plans, self._cuts = schedule, {}, {}, {}

    def __call__(self, params, batch, *args):
        plan = self.plan(params, batch, *args)
        value, grads, self.times = plan.run(params, batch, args)
        return value, grads

    def homes(self, tree, batch, *args):
        """For `split`: where each leaf of `tree` lives, and the meshes of the stages."""
        stages, _, schedule = self._cut(tree, batch, args)
        homes = [
            tuple((s.index, s.rows[i]) for s in stages if i in s.rows)
            for i in range(len(jax.tree.leaves(tree)))
        ]
        return homes, stage_meshes(self.mesh, self.axis, schedule.device_of)

    def plan(self, params, batch, *args):
        if not isinstance(params, Pipelined):
            raise TypeError(
                f"pipeline.value_and_grad: the parameters are a {type(params).__name__}; expected "
                f"what pipeline.split returns."
            )
        key = (params.layout, params.structure, params.meshes, _signature((batch, args)))
        if key not in self._plans:
            cut_up = self._cut(params.abstract(), batch, args)
            homes, meshes = self.homes(params.abstract(), batch, *args)
            if (homes, meshes) != ([p.homes for p in params.layout], params.meshes):
                raise ValueError(
                    "pipeline.value_and_grad: the parameters are placed for other stages or "
                    "devices; merge them, and split them like this function."
                )
            self._plans[key] = Plan(self, params, batch, *cut_up)
        return self._plans[key]

    def _cut(self, tree, batch, args):
        """(stages, shapes of the loss's output, schedule)."""
        leaves = _abstract((tree, batch, args))
        key = (jax.tree.structure(tree), _signature(leaves))
        if key not in self._cuts:
            _check_floating(leaves[0])
            part = jax.tree.map(self._part, leaves[1])
            mesh = stage_meshes(self.mesh, self.axis, [0])[0].abstract_mesh

            def pin(x, name):
                spec = self.names.get(name)
                return x if spec is None else _constrain(x, NamedSharding(mesh, spec))

            given = leaves[0], part, *leaves[2]
            stages, shapes = cut.stages(self._normal, *given, constrain=pin)
            self._cuts[key] = stages, shapes, self._schedule(len(stages))
        return self._cuts[key]

    def _part(self, x):
        if not x.shape or x.shape[0] % self.microbatches:
            raise ValueError(
                f"pipeline.value_and_grad: an array of the batch of shape {x.shape} does not split "
                f"into {self.microbatches} microbatches by its rows; pad it with masked rows."
            )
        return jax.ShapeDtypeStruct((x.shape[0] // self.microbatches, *x.shape[1:]), x.dtype)

    def _normal(self, params, batch, *args):
        """The loss as (total, count, aux)."""
        out = self.loss(params, batch, *args)
        out, extra = out if self.has_aux else (out, ())
        if isinstance(out, tuple) and len(out) == 2 and all(jnp.ndim(x) == 0 for x in out):
            return (*out, extra)
        if not isinstance(out, tuple) and jnp.shape(out) == ():
            rows = jax.tree.leaves(batch)[0].shape[0]
            return out * rows, jnp.float32(rows), extra
        raise TypeError(
            f"pipeline.value_and_grad: the loss returned {jax.tree.map(jnp.shape, out)}; expected "
            f"(total, count), two scalars, or one scalar, a mean over rows. For more outputs, "
            f"return (that, tree) with has_aux=True."
        )

    def _schedule(self, stages):
        ranks = self.mesh.shape[self.axis]
        if isinstance(self.asked, str):
            if self.asked not in schedules.SCHEDULES:
                raise ValueError(
                    f"pipeline.value_and_grad: no schedule {self.asked!r}; there are "
                    f"{', '.join(schedules.SCHEDULES)}."
                )
            return schedules.SCHEDULES[self.asked](stages, ranks, self.microbatches)
        schedule = schedules.from_tasks(self.asked)
        schedules.check(schedule)
        given = (schedule.stages, schedule.devices, schedule.microbatches)
        if given != (stages, ranks, self.microbatches):
            raise ValueError(
                f"pipeline.value_and_grad: the schedule is for {given[0]} stages, {given[1]} "
                f"devices and {given[2]} microbatches; the loss has {stages} stages (one more than "
                f"calls of marks.stage_boundary), the mesh {ranks} ranks along {self.axis!r}, and "
                f"microbatches is {self.microbatches}."
            )
        return schedule


def _abstract(tree):
    """Shapes and dtypes as JAX sees them."""
    return jax.eval_shape(lambda tree: tree, tree)


def _constrain(x, sharding):
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, sharding), x)


def _signature(tree):
    leaves, structure = jax.tree.flatten(_abstract(tree))
    return structure, tuple((x.shape, str(x.dtype)) for x in leaves)


def _check_floating(tree):
    for keys, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(
                f"pipeline.value_and_grad: {jax.tree_util.keystr(keys)} is {x.dtype}, which has no "
                f"gradient; pass keys and counters in the batch or as further arguments."
            )
