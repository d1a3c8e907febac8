"""Any schedule as one program for all devices, on plain arrays: a loss and its gradients."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import marks, objective, schedules
from shardwise import mesh as meshes
from shardwise.objective.division import Division
from shardwise.objective.gradients import nothing_if_empty
from shardwise.objective.means import cotangents, normal, quotient, widened
from shardwise.objective.parts import check_params, meaning, merged, reduced, split, ways
from shardwise.objective.tracing import trace
from shardwise.pipeline import checks, cut
from shardwise.pipeline.cut.parts import abstract, inexact
from shardwise.pipeline.cut.places import mark
from shardwise.pipeline.program import WHOLE, Program
from shardwise.pipeline.running import Run


@dataclasses.dataclass(frozen=True)
class Within:
    """What the mesh's other axes do within a stage, where collectives are written out.

    By default nothing: what else the mesh has is left to the compiler.

    Args:
      division: mesh axes over which rows, and the sequence, are cut, and how a batch is.
      by_hand: all axes that have names within; the others are the compiler's.
      meanings: {mark: meaning}, where the axes have names.
      shares: `shares(tree, loss, batch, args, options)`, called where the axes have names, of the
        loss of one device's part, whose parameters are like `tree`: what is done with shares of
        parameters, with the methods of `Whole`.
    """

    division: Division = dataclasses.field(default_factory=Division)
    by_hand: tuple[str, ...] = ()
    meanings: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
    shares: Callable | None = None


def value_and_grad(
    loss: Callable,
    mesh: Mesh,
    schedule: str | schedules.Schedule | Sequence,
    microbatches: int,
    axis: str = "stage",
    specs: Callable[[Any], Sequence[P]] | None = None,
    within: Within = Within(),
    has_aux: bool = False,
    aux: Any = "sum",
    who: str = "pipeline.value_and_grad",
    backward: bool = True,
) -> Callable:
    """A function of `(params, batch, *args, key=None)`: the mean over the batch, and its gradient.

    For use inside jit, on plain arrays of true shape, in any number of processes; `axis` is the
    mesh's axis of stages, and `within` says what the others do. `specs(params)` are the
    PartitionSpecs by which parameters lie over the axes by hand, `axis` among them; by default each
    device has all. Row i of a stacked array is layer i under every schedule. Without `backward`,
    the gradient is None, and only the forward tasks are run. `.program(params, batch, ...)` is the
    `Program` that it makes for arrays of these shapes.

    Raises, when called:
      ValueError: an axis that the mesh lacks; rows that do not split; no mark where the schedule
        wants stages; a mark where the loss cannot be cut; a count that depends on parameters, with
        several microbatches.
      TypeError: arguments that are no arrays, or parameters that have no gradient.
    """
    meshes.check_axes(who, mesh, (axis,))
    division = dataclasses.replace(within.division, microbatches=microbatches, who=who)
    within = dataclasses.replace(within, division=division)
    given = loss, mesh, schedule, microbatches, axis, within, has_aux, aux, who, backward
    specs = specs or (lambda params: [P()] * len(jax.tree.leaves(params)))

    def mapped(function, out_specs, params, batch, args, key):
        """(`function` of a `_Device` and its arrays, in a shard_map; the device)."""
        checks.arrays(who, params, batch, args, key)
        check_params(params, mesh, who)
        leaves, structure = jax.tree.flatten(params)
        lie = list(specs(params))
        batch, numbers, laid = division.cut(batch)
        device = _Device(*given, lie, structure)
        run = jax.shard_map(
            functools.partial(function, device),
            mesh=mesh,
            in_specs=(lie, *laid, P(), P()),
            out_specs=out_specs(lie),
            axis_names={axis, *within.by_hand},
            check_vma=False,  # around the user's loss; every sum over devices is written out
        )
        return run(leaves, batch, numbers, args, key), device

    def run(params, batch, *args, key=None):
        def out_specs(lie):
            return P(), (P(), P(division.rows or None)), lie if backward else []

        out, device = mapped(_Device.__call__, out_specs, params, batch, args, key)
        value, parts, grads = out
        if has_aux:
            value = value, merged(*parts, device.ways, jax.tree.structure(device.extra))
        return value, jax.tree.unflatten(device.structure, grads) if backward else None

    def program(params, batch, *args, key=None):
        made = []

        def traced(*given):
            made.append(mapped(_Device.buffered, lambda lie: (), *given)[1])

        jax.eval_shape(traced, params, batch, args, key)
        return made[0].program

    run.program = program
    return run


@dataclasses.dataclass
class _Device:
    """The loss and gradients of one device, and every sum over devices but those within tasks.

    Its call, in a shard_map, leaves here what is known once the loss is traced: the `program`; the
    loss of several parts as `objective` has `traced` it, or None; the shapes of what it returns,
    `mean` and `extra`, whose leaves are joined in these `ways`; whether each microbatch has a key
    of its own (`folded`).
    """

    loss: Callable
    mesh: Mesh
    schedule: str | schedules.Schedule | Sequence
    microbatches: int
    axis: str
    within: Within
    has_aux: bool
    aux: Any
    who: str
    backward: bool
    specs: list[P]
    structure: Any

    def __call__(self, leaves, batch, numbers, args, key):
        m = self.microbatches
        parts = split(batch, m), split(numbers, m)
        self._trace(leaves, parts, args, key)
        if self.folded:
            key = self.within.division.fold(key)
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

    def buffered(self, leaves: list, batch: Any, numbers: Any, args: tuple, key: Any) -> tuple:
        """Make the `program` and its buffers, as the call does, and run nothing."""
        m = self.microbatches
        self._trace(leaves, (split(batch, m), split(numbers, m)), args, key)
        _ = self.program.buffers  # its stages are traced here, where the axes have names
        return ()

    def _trace(self, leaves, parts, args, key):
        """Trace the loss of the first part of the batch."""
        first = jax.tree.map(lambda x: x[0], parts)
        with marks.bind(**self.within.meanings):
            self._cut(leaves, *abstract((*first, args, key)))

    def _cut(self, leaves, batch, rows, args, key):
        """Trace the loss of one part of the batch, of which all but the parameters are shapes."""
        within, m, shares = self.within, self.microbatches, WHOLE
        held = tuple(_place(spec, self.axis) for spec in self.specs)
        whole = [self._whole(x, along) for x, along in zip(leaves, held, strict=True)]
        params = jax.tree.unflatten(self.structure, whole)
        meanings = {"total": within.division}
        if within.shares is not None:
            options = {} if key is None else {"key": key}
            shares = within.shares(params, self.loss, batch, args, options)
            params, meanings["use"] = shares.received(params), shares.use
        loss, given = normal(self.loss, self.has_aux), (params, batch, rows, args, key)

        def outputs(params, batch, rows, args, key):
            with marks.bind(index=meaning(rows)):
                return loss(params, batch, *args, **({} if key is None else {"key": key}))

        self.traced = None
        with marks.bind(**meanings):
            if m > 1 or within.division.axes:
                with marks.bind(stage_boundary=mark):
                    outputs = self.traced = trace(self.loss, *given, self.has_aux)
                if m > 1:
                    self.traced.check_count(params, self.who)
            stages, shapes = cut.stages(outputs, *given, relocate=self._relocated)
        self.mean, self.extra = shapes
        count = self.mean.count
        if m == 1 and count is not None and inexact(count):  # which may depend on the parameters
            stages[-1] = dataclasses.replace(stages[-1], seeds=(0, 1))
        self.ways = ways(self.aux, self.extra)
        self.folded = key is not None and self.traced is not None and not self.traced.by_place
        schedule = checks.schedule(self, len(stages))
        start = len(jax.tree.leaves((batch, rows)))
        stop = start + len(jax.tree.leaves((args, None if self.folded else key)))
        rest = whole, held, frozenset(range(start, stop)), self.axis, shares, self.backward
        self.program = Program(stages, schedule, *rest)

    def _whole(self, x, along):
        """The shape of what a device has of `x` if it has all stages' parts, along that axis."""
        shape = list(x.shape)
        if along is not None:
            shape[along] *= self.mesh.shape[self.axis]
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

    def _relocated(self, sharding):
        """The sharding of a constraint of the loss, on the mesh as it is within the stages."""
        spec = sharding.spec if isinstance(sharding, NamedSharding) else None
        known = [name for name in self.mesh.axis_names if name != self.axis]
        names = {name for name in jax.tree.leaves(tuple(spec or ())) if isinstance(name, str)}
        if spec is None or not names <= {*known}:
            raise ValueError(
                f"{self.who}: the loss constrains an array to {sharding}; within a stage there are "
                f"the axes {known}. Constrain to a PartitionSpec of these."
            )
        return NamedSharding(meshes.within(self.mesh), sharding.spec)

    def _count(self, leaves, parts, args, key):
        """The count of the whole batch, which the first of several backward passes needs."""
        if self.microbatches == 1 or not self.backward:
            return None
        params = jax.tree.unflatten(self.structure, leaves)  # on which it does not depend

        def one(part):
            batch, rows, own = part
            return self.traced.count(params, batch, rows, args, own if self.folded else key)

        counts = jax.lax.map(one, (*parts, key if self.folded else None))
        return self.within.division.together(jnp.sum(widened(counts)))

    def _seeds(self, count, outputs):
        """The cotangents of a microbatch's total, and of its count where it is differentiated."""
        total = widened(outputs[0])
        if count is None:
            count = jnp.float32(1) if self.mean.count is None else widened(outputs[1])
            total, count = self.within.division.together((total, count))
        return cotangents(objective.Mean(total, count))

    def _value(self, outputs):
        """(the mean, the two sums of it, the auxiliary outputs in two groups)."""
        structure = jax.tree.structure((self.mean, self.extra))
        (total, count), extra = jax.tree.unflatten(structure, outputs)
        count = jnp.float32(self.microbatches) if count is None else jnp.sum(widened(count))
        whole = objective.Mean(*self.within.division.together((jnp.sum(widened(total)), count)))
        dtype = jnp.result_type(*(x.dtype for x in jax.tree.leaves(self.mean)))
        pairs = zip(jax.tree.leaves(extra), self.ways, strict=True)
        extra = [reduced(x, way) for x, way in pairs]
        groups = self.within.division.over_devices(extra, self.ways)
        return quotient(whole).astype(dtype), whole, groups


def _place(spec, axis):
    """The array's axis that this mesh axis cuts, or None."""
    places = (i for i, entry in enumerate(spec) if axis in jax.tree.leaves((entry,)))
    return next(places, None)
