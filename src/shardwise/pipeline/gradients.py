"""Loss and gradient by a schedule of tasks on stages."""

import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import cut, schedules
from shardwise.pipeline.compiling import compile_stage
from shardwise.pipeline.placing import Pipelined, stage_meshes
from shardwise.pipeline.running import run

REDUCTIONS = {
    "sum": lambda parts: functools.reduce(jnp.add, parts),
    "max": lambda parts: functools.reduce(jnp.maximum, parts),
    "concatenate": lambda parts: jnp.concatenate(parts),
}


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
            self._plans[key] = _Plan(self, params, batch, *cut_up)
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


class _Plan:
    """Everything that does not change from step to step."""

    def __init__(self, owner, params, batch, stages, shapes, schedule):
        self.owner, self.schedule, self.shapes, self.meshes = owner, schedule, shapes, params.meshes
        self.size = jax.tree.leaves(batch)[0].shape[0] // owner.microbatches
        self.layout = [[params.layout[i] for i in s.rows] for s in stages]
        self.stages = [
            compile_stage(stage, params.meshes[stage.index], pieces, owner.rows, self.size)
            for stage, pieces in zip(stages, self.layout, strict=True)
        ]
        last, total = self.stages[-1], stages[-1].outputs[0]
        whole = NamedSharding(last.mesh, P())
        self.seed = jax.device_put(np.ones((), total.dtype), whole)  # the total's own cotangent
        self._check_rows()
        self._check_halves()

    def run(self, params, batch, args):
        step = _Step(self, params, batch, args)
        times = run(self.schedule, step.perform)
        totals, counts, *extra = zip(*(step.outputs[j] for j in sorted(step.outputs)), strict=True)
        count = functools.reduce(jnp.add, counts)
        mean = functools.reduce(jnp.add, totals) / jnp.maximum(count, 1)
        grads = self._finish(params, step.sums, count)
        if not self.owner.has_aux:
            return mean, grads, times
        return (mean, self._reduced(extra)), grads, times

    def _check_rows(self):
        mesh, rows = self.meshes[0], self.owner.rows
        names = rows[0] if len(rows) else ()
        names = (names,) if isinstance(names, str) else names or ()
        devices = math.prod(mesh.shape[name] for name in names)
        if self.size % devices:
            raise ValueError(
                f"pipeline.value_and_grad: microbatches of {self.size} rows do not divide among "
                f"the {devices} devices of {rows}; take fewer microbatches, or pad the batch with "
                f"masked rows."
            )

    def _check_halves(self):
        kinds = {task.kind for order in self.schedule.tasks for task in order}
        for programs in self.stages if "I" in kinds else ():
            if names := programs.halves.undivided:
                warnings.warn(
                    f"pipeline: stage {programs.stage.index}: {', '.join(names)} yields both what "
                    f"the stage before waits for and gradients of weights; all of it runs in I.",
                    stacklevel=5,
                )

    def _reduced(self, extra):
        """The auxiliary outputs of all microbatches, each reduced in the way asked for."""
        tree, way = self.shapes[2], self.owner.aux
        ways = jax.tree.map(lambda way, part: [way] * len(jax.tree.leaves(part)), way, tree)
        reduced = [REDUCTIONS[w](x) for w, x in zip(jax.tree.leaves(ways), extra, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(tree), reduced)

    def _finish(self, params, sums, count):
        """The gradients: sums over stages of what several hold, divided by the count."""
        self._share(params.layout, sums)
        tree = {piece.path: {} for piece in params.layout}
        for s, (programs, pieces) in enumerate(zip(self.stages, self.layout, strict=True)):
            whole = jax.device_put(count, NamedSharding(programs.mesh, P()))
            for piece, g in zip(pieces, programs.finish(sums[s], whole), strict=True):
                tree[piece.path][s] = g
        return Pipelined(tree, params.layout, params.structure, params.meshes)

    def _share(self, layout, sums):
        for piece in layout:
            if piece.in_rows or len(piece.homes) == 1:
                continue
            places = [(s, self.layout[s].index(piece)) for s, _ in piece.homes]
            first, at = places[0]
            lies = sums[first][at].sharding
            parts = [jax.device_put(sums[s][i], lies) for s, i in places]
            total = functools.reduce(jnp.add, parts)
            for s, i in places:
                sums[s][i] = jax.device_put(total, sums[s][i].sharding)

    def lowered(self, params):
        """The programs of the schedule's kinds, lowered."""
        found = {}
        kinds = {(task.stage, task.kind) for order in self.schedule.tasks for task in order}
        for s, programs in enumerate(self.stages):
            stage, jitted = programs.stage, programs.kinds
            own = [params.tree[p.path][s] for p in self.layout[s]]
            data, carry = (self._laid(programs, x) for x in (stage.inputs, stage.carry))
            _, kept = jax.eval_shape(programs.halves.forward, own, data, carry)
            cots = self._laid(programs, [stage.outputs[i] for i in cut.differentiable(stage)])
            _, pending = jax.eval_shape(programs.halves.to_input, own, data, kept, cots)
            sums = jax.eval_shape(programs.zeros)
            arguments = {
                "F": (own, data, carry),
                "B": (own, data, kept, cots, sums),
                "I": (own, data, kept, cots),
                "W": (own, data, kept, pending, sums),
            }
            for kind in "FBIW":
                if (s, kind) in kinds:
                    found[s, kind] = jitted[kind].lower(*arguments[kind])
        return found

    def _laid(self, programs, values):
        return [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=programs.lay(x, self.size))
            for x in values
        ]


class _Step:
    """One run: what is alive, by stage and microbatch. Each entry is written and read once."""

    def __init__(self, plan, params, batch, args):
        self.plan, self.batch, self.args = plan, jax.tree.leaves(batch), args
        self.params = [
            [params.tree[piece.path][s] for piece in pieces] for s, pieces in enumerate(plan.layout)
        ]
        self.sums = [programs.zeros() for programs in plan.stages]
        self.carry, self.kept, self.cots, self.pending, self.outputs = {}, {}, {}, {}, {}

    def perform(self, task):
        """Run one task, wait for what it computes, and send on what others need."""
        s, kind, j = task
        programs, own = self.plan.stages[s], self.params[s]
        jitted = programs.kinds[kind]
        if kind == "F":
            data = self._data(programs, j)
            outputs, kept = jitted(own, data, self.carry.pop((s, j), []))
            self.kept[s, j] = data, kept
            jax.block_until_ready((outputs, kept))
            if programs.stage.last:
                self.outputs[j] = outputs
                self.cots[s, j] = [self.plan.seed]
            else:
                self.carry[s + 1, j] = self._send(outputs, s + 1)
            return
        if kind in "BI":
            cots = self.cots.pop((s, j))
        if kind == "B":
            back, self.sums[s] = jitted(own, *self.kept.pop((s, j)), cots, self.sums[s])
        elif kind == "I":
            back, self.pending[s, j] = jitted(own, *self.kept[s, j], cots)
        else:
            kept, pending = self.kept.pop((s, j)), self.pending.pop((s, j))
            self.sums[s] = jitted(own, *kept, pending, self.sums[s])
            jax.block_until_ready(self.sums[s])
            return
        jax.block_until_ready((back, self.sums[s] if kind == "B" else self.pending[s, j]))
        if s > 0:
            self.cots[s - 1, j] = self._send(back, s - 1)

    def _data(self, programs, j):
        """The parts of the batch, and the arguments, that a stage reads."""
        size, n = self.plan.size, len(self.batch)
        arguments = jax.tree.leaves(self.args)
        values = [
            self.batch[i][j * size : (j + 1) * size] if i < n else _folded(arguments[i - n], j)
            for i in programs.stage.data
        ]
        return [jax.device_put(x, programs.lay(x, size)) for x in map(_array, values)]

    def _send(self, values, stage):
        programs = self.plan.stages[stage]
        return [jax.device_put(x, programs.lay(x, self.plan.size)) for x in values]


def _folded(x, j):
    is_key = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.fold_in(x, j) if is_key else x


def _array(x):
    return x if hasattr(x, "dtype") else np.asarray(x, jax.dtypes.result_type(x))


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
