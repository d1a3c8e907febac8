"""Any schedule as one program for all devices, on plain arrays: a loss and its gradients."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardwise import marks, objective, schedules
from shardwise import mesh as meshes
from shardwise.objective.gradients import nothing_if_empty
from shardwise.objective.means import cotangents, normal, quotient, widened
from shardwise.objective.parts import (
    Division,
    check_arrays,
    check_params,
    merged,
    reduced,
    split,
    ways,
)
from shardwise.objective.tracing import trace
from shardwise.pipeline import cut
from shardwise.pipeline.cut.parts import inexact
from shardwise.pipeline.cut.places import mark
from shardwise.pipeline.program import WHOLE, Program
from shardwise.pipeline.running import Run

_UNMARKED = (
    " The loss has no stage boundary, so that all of it is one stage. Write x = "
    "marks.stage_boundary(x) where a stage ends, on all that it hands to the next, between layers "
    "and in no loop; k of these marks make k + 1 stages."
)


def value_and_grad(
    loss: Callable,
    mesh: Mesh,
    schedule: str | schedules.Schedule | Sequence,
    microbatches: int,
    axis: str = "stage",
    specs: Callable[[Any], Sequence[P]] | None = None,
    division: Division | None = None,
    by_hand: Sequence[str] = (),
    meanings: Mapping[str, Callable] | None = None,
    shares: Callable | None = None,
    has_aux: bool = False,
    aux: Any = "sum",
    who: str = "pipeline.value_and_grad",
    backward: bool = True,
) -> Callable:
    """A function of `(params, batch, *args, key=None)`: the mean over the batch, and its gradient.

    For use inside jit, on plain arrays of true shape; `axis` is the mesh's axis of stages. Row i of
    a stacked array is layer i under every schedule. `loss`, `has_aux` and `aux` are as in
    `objective.value_and_grad`. Without `backward`, the gradient is None, and only the forward tasks
    are run. `division`, `by_hand`, `meanings`, `shares` and `who` are for `layouts`, which cuts by
    hand within a stage; without them all other axes are the compiler's.

    Args:
      schedule: a key of `schedules.SCHEDULES`, or a `Schedule`, or lists of tasks (`from_tasks`),
        for the k+1 stages of k marks, as many devices as `axis` has, and `microbatches`.
      specs: a function of the parameters to a list of PartitionSpecs, one for each leaf in the
        order of `jax.tree.leaves`: how parameters, and so gradients, lie over `axis` and `by_hand`.
        One may cut any leaf over `axis`, along any axis that divides, whatever the schedule: parts
        are brought to their stage. By default every device has all parameters and gradients whole.

    Raises, when called:
      ValueError: an axis that the mesh lacks; rows or specs that do not divide; a schedule for
        other numbers of stages, devices or microbatches; a mark where the loss cannot be cut; a
        count that depends on parameters, with several microbatches.
      TypeError: arguments that are no arrays, or parameters that have no gradient.
    """
    meshes.check_axes(who, mesh, (axis,))
    division = dataclasses.replace(division or Division(), microbatches=microbatches, who=who)
    ranks, meanings = mesh.shape[axis], meanings or {}
    given = loss, schedule, axis, ranks, division, meanings, shares, has_aux, aux, backward

    def made(params, batch, args, key):
        """(value and gradient; the device, which has the program)."""
        check_params(params, mesh, who)
        check_arrays({"the batch": batch, "the arguments": args, "key": key}, who)
        leaves, structure = jax.tree.flatten(params)
        lie = list(specs(params)) if specs else [P()] * len(leaves)
        batch, numbers, laid = division.cut(batch)
        device = _Device(*given, lie, structure)
        run = jax.shard_map(
            device,
            mesh=mesh,
            in_specs=(lie, *laid, P(), P()),
            out_specs=(P(), (P(), P(division.rows or None)), lie if backward else []),
            axis_names={axis, *by_hand},
            check_vma=False,  # around the user's loss; every sum over devices is written out
        )
        value, parts, grads = run(leaves, batch, numbers, args, key)
        if has_aux:
            value = value, merged(*parts, device.ways, jax.tree.structure(device.extra))
        return (value, jax.tree.unflatten(structure, grads) if backward else None), device

    def run(params, batch, *args, key=None):
        return made(params, batch, args, key)[0]

    def program(params, batch, *args, key=None):
        found = []
        jax.eval_shape(lambda *given: found.append(made(*given)[1]), params, batch, args, key)
        return found[0].program

    run.program = program
    return run


@dataclasses.dataclass
class _Device:
    """The loss and gradients of one device, and every sum over devices but those within tasks.

    Its call, in a shard_map, leaves here what is known once the loss is traced: the `program`; the
    loss of several parts as `objective` has `traced` it, or None; the shapes of what it returns,
    `mean` and `extra`, whose leaves are joined in these `ways`; whether keys are `folded`.
    """

    loss: Callable
    schedule: str | schedules.Schedule | Sequence
    axis: str
    ranks: int
    division: Division
    meanings: Mapping[str, Callable]
    shares: Callable | None
    has_aux: bool
    aux: Any
    backward: bool
    specs: list[P]
    structure: Any

    def __call__(self, leaves, batch, numbers, args, key):
        m = self.division.microbatches
        parts = split(batch, m), split(numbers, m)
        self._trace(leaves, parts, args, key)
        if self.folded:
            key = self.division.fold(key)
            key = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(m))
        seeds = functools.partial(self._seeds, self._count(leaves, parts, args, key))
        data = jax.tree.leaves((*parts, args, key))
        outputs, sums = Run(self.program, seeds)(self.program.there(leaves), data)
        # The last stage's devices have them, the others zeros; of truth values the sum is int32.
        outputs = [jax.lax.psum(x, self.axis).astype(x.dtype) for x in outputs]
        value, whole, aux = self._value(outputs)
        if not self.backward:
            return value, aux, []
        sums = nothing_if_empty(sums, None if self.mean.count is None else whole.count)
        grads = zip(self.program.back(sums, leaves), leaves, strict=True)
        return value, aux, [g.astype(x.dtype) for g, x in grads]

    def _trace(self, leaves, parts, args, key):
        """Trace the loss of the first part of the batch; all but the parameters are shapes."""
        (batch, rows), args, key = jax.eval_shape(
            lambda parts, *rest: (jax.tree.map(lambda x: x[0], parts), *rest), parts, args, key
        )
        division, m, shares = self.division, self.division.microbatches, WHOLE
        held = tuple(_place(spec, self.axis) for spec in self.specs)
        whole = [_whole(x, along, self.ranks) for x, along in zip(leaves, held, strict=True)]
        params, loss = jax.tree.unflatten(self.structure, whole), normal(self.loss, self.has_aux)
        meanings = {**self.meanings, "total": division}
        if self.shares is not None:
            with marks.bind(**self.meanings):
                shares = self.shares(params, loss, batch, args, {"key": key})
            params, meanings["use"] = shares.received(params), shares.use
        given = params, batch, rows, args, key

        def outputs(params, batch, rows, args, key):
            return loss(params, batch, *args, key=key)

        self.traced = None
        with marks.bind(**meanings):
            if m > 1 or division.axes:
                with marks.bind(stage_boundary=mark):
                    outputs = self.traced = trace(self.loss, *given, self.has_aux)
                if m > 1:
                    self.traced.check_count(params, division.who)
            stages, shapes = cut.stages(outputs, *given)
        self.mean, self.extra = shapes
        count = self.mean.count
        if m == 1 and count is not None and inexact(count):  # which may depend on the parameters
            stages[-1] = dataclasses.replace(stages[-1], seeds=(0, 1))
        self.ways = ways(self.aux, self.extra)
        self.folded = key is not None and self.traced is not None and not self.traced.by_place
        start = len(jax.tree.leaves((batch, rows)))
        stop = start + len(jax.tree.leaves((args, None if self.folded else key)))
        rest = whole, held, frozenset(range(start, stop)), self.axis, shares, self.backward
        self.program = Program(stages, self._schedule(len(stages)), *rest)

    def _schedule(self, stages):
        """The schedule that was asked for, by name or as lists, if it is for so many stages."""
        given, ranks = self.schedule, self.ranks
        m, who = self.division.microbatches, self.division.who
        if isinstance(given, str):
            if given not in schedules.SCHEDULES:
                known = ", ".join(schedules.SCHEDULES)
                raise ValueError(f"{who}: no schedule {given!r}; there are {known}.")
            try:
                return schedules.SCHEDULES[given](stages, ranks, m)
            except ValueError as error:
                told = f"{error} (the mesh has {ranks} ranks along {self.axis!r})"
                unmarked = _UNMARKED if stages == 1 else ""
                raise ValueError(f"{who}: {told}{unmarked}") from error
        found = schedules.from_tasks(given)
        if (found.stages, found.devices, found.microbatches) != (stages, ranks, m):
            raise ValueError(
                f"{who}: the schedule is for {found.stages} stages, {found.devices} devices and "
                f"{found.microbatches} microbatches; the loss has {stages} stages (one more than "
                f"calls of marks.stage_boundary), the mesh {ranks} ranks along {self.axis!r}, and "
                f"microbatches is {m}."
            )
        return found

    def _count(self, leaves, parts, args, key):
        """The count of the whole batch, which the first of several backward passes needs."""
        if self.division.microbatches == 1 or not self.backward:
            return None
        params = jax.tree.unflatten(self.structure, leaves)  # on which it does not depend

        def one(part):
            batch, rows, own = part
            return self.traced.count(params, batch, rows, args, own if self.folded else key)

        counts = jax.lax.map(one, (*parts, key if self.folded else None))
        return self.division.together(jnp.sum(widened(counts)))

    def _seeds(self, count, outputs):
        """The cotangents of a microbatch's total, and of its count where it is differentiated."""
        total = widened(outputs[0])
        if count is None:
            count = jnp.float32(1) if self.mean.count is None else widened(outputs[1])
            total, count = self.division.together((total, count))
        return cotangents(objective.Mean(total, count))

    def _value(self, outputs):
        """(the mean, the two sums of it, the auxiliary outputs in two groups)."""
        structure = jax.tree.structure((self.mean, self.extra))
        (total, count), extra = jax.tree.unflatten(structure, outputs)
        parts = self.division.microbatches
        count = jnp.float32(parts) if count is None else jnp.sum(widened(count))
        whole = objective.Mean(*self.division.together((jnp.sum(widened(total)), count)))
        dtype = jnp.result_type(*(x.dtype for x in jax.tree.leaves(self.mean)))
        extra = [*map(reduced, jax.tree.leaves(extra), self.ways)]
        groups = self.division.over_devices(extra, self.ways)
        return quotient(whole).astype(dtype), whole, groups


def _place(spec, axis):
    """The array's axis that this mesh axis cuts, or None."""
    return next((i for i, entry in enumerate(spec) if axis in meshes.axes_of(entry)), None)


def _whole(x, along, ranks):
    """The shape of all stages' parts of `x`, of which a device has its own along this axis."""
    shape = [n * ranks if i == along else n for i, n in enumerate(x.shape)]
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype)
