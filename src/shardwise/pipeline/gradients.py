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
from shardwise.objective.gradients import nothing_if_empty
from shardwise.pipeline import checks, running
from shardwise.pipeline.program import WHOLE, Program
from shardwise.pipeline.tracing import Asked, abstract, traced_parts


def _undivided(batch: Any, microbatches: int) -> tuple:
    numbers = objective.numbers(batch)
    return batch, numbers, (P(), P())


@dataclasses.dataclass(frozen=True)
class Within:
    """What the mesh's other axes do within a stage, where collectives are written out.

    By default nothing: what else the mesh has is left to the compiler.

    Args:
      rows: mesh axes over which rows are cut.
      columns: those over which the sequence is.
      by_hand: all axes that have names within; the others are the compiler's.
      divide: `divide(batch, microbatches) -> (batch, numbers, (specs, specs))`, the batch in the
        order in which it is cut, its rows' numbers (`objective.numbers`), and their PartitionSpecs.
      meanings: {mark: meaning}, where the axes have names.
      shares: `shares(tree, loss, batch, args, options)`, called where the axes have names, of the
        loss of one device's part, whose parameters are like `tree`: what is done with shares of
        parameters, with the methods of `Whole`.
    """

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    by_hand: tuple[str, ...] = ()
    divide: Callable = _undivided
    meanings: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
    shares: Callable | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which the parts' sums are added up."""
        return (*self.columns, *self.rows)

    def together(self, x: Any) -> Any:
        """The sum of `x` over a stage's devices."""
        return jax.lax.psum(x, self.axes) if self.axes else x

    def along(self, x: Any) -> Any:
        """The sum of `x` over the devices that have parts of the same rows."""
        return jax.lax.psum(x, self.columns) if self.columns else x

    def fold(self, key: Any) -> Any:
        """The key of this device, made of the batch's."""
        for name in self.axes if key is not None else ():
            key = jax.random.fold_in(key, jax.lax.axis_index(name))
        return key


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
      TypeError: parameters or a batch that are no arrays, or have no gradient.
    """
    asked = Asked(loss, mesh, schedule, microbatches, axis, has_aux, aux, who)
    checks.options(asked)
    specs = specs or (lambda params: [P()] * len(jax.tree.leaves(params)))

    made: list[Program] = []

    def run(params, batch, *args, key=None):
        checks.mesh_around(asked)
        checks.leaves(who, params, batch, args, key)
        checks.rows(who, batch, microbatches)
        leaves, structure = jax.tree.flatten(params)
        lie = list(specs(params))
        batch, numbers, cut = within.divide(batch, microbatches)
        shapes: list = []  # of the auxiliary outputs, which are known once the loss is traced
        device = _Device(asked, within, lie, structure, backward, shapes, made)
        mapped = jax.shard_map(
            device,
            mesh=mesh,
            in_specs=(lie, *cut, P(), P()),
            out_specs=(P(), (P(), P(within.rows or None)), lie if backward else []),
            axis_names={axis, *within.by_hand},
            check_vma=False,  # around the user's loss; every sum over devices is written out
        )
        value, parts, grads = mapped(leaves, batch, numbers, args, key)
        grads = jax.tree.unflatten(structure, grads) if backward else None
        return ((value, objective.merged(*parts, *shapes)) if has_aux else value), grads

    def program(*given, **options):
        jax.eval_shape(run, *given, **options)
        return made.pop()

    run.program = program
    return run


@dataclasses.dataclass(frozen=True)
class _Device:
    """The loss and gradients of one device, and every sum over devices but those within tasks."""

    asked: Asked
    within: Within
    specs: list[P]
    structure: Any
    backward: bool
    shapes: list
    made: list

    def __call__(self, leaves, batch, numbers, args, key):
        m, within = self.asked.microbatches, self.within
        parts = objective.split(batch, m), objective.split(numbers, m)
        first = jax.tree.map(lambda x: x[0], parts)
        with marks.bind(**within.meanings):
            traced, program, folded = self._traced(leaves, first, args, key)
        if folded:
            key = within.fold(key)
            key = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(m))
        count = self._count(traced, leaves, parts, args, key, folded)
        arrays = program.there(leaves)
        data = jax.tree.leaves((*parts, args, key))
        seeds = functools.partial(self._seeds, traced, count)
        outputs, grads = running.run(program, arrays, data, seeds)
        axis = self.asked.axis
        outputs = [_everywhere(x, axis) for x in outputs]
        value, whole, aux = self._value(traced, outputs)
        if not self.backward:
            return value, aux, []
        if traced.loss is None or not traced.loss.linear:
            grads = nothing_if_empty(grads, whole.count if traced.has_count else None)
        grads = program.back(grads, leaves)
        pairs = zip(grads, leaves, strict=True)
        return value, aux, [jnp.zeros_like(x) if g is None else g.astype(x.dtype) for g, x in pairs]

    def _traced(self, leaves, first, args, key):
        """(the traced loss, its program, whether keys are folded)."""
        asked, within, m = self.asked, self.within, self.asked.microbatches
        batch, rows, args, key = abstract((*first, args, key))
        held = tuple(_place(spec, asked.axis) for spec in self.specs)
        whole = [_whole(x, k, asked) for x, k in zip(leaves, held, strict=True)]
        loss, shares, shapes = asked.loss, WHOLE, jax.tree.unflatten(self.structure, whole)
        if within.shares is not None:
            options = {} if key is None else {"key": key}
            shares = within.shares(shapes, loss, batch, args, options)
            shapes = shares.received(shapes)

            def loss(*arguments, **options):
                with marks.bind(use=shares.use):
                    return asked.loss(*arguments, **options)

        traced = traced_parts(
            asked,
            loss,
            (shapes, batch, rows, args, key),
            in_parts=m > 1 or bool(within.axes),
            total=objective.Division(within.rows, within.columns, m),
            relocate=functools.partial(_relocated, asked),
        )
        if within.columns and "concatenate" in traced.ways:
            checks.no_rows(asked.who, within.columns)
        by_place = traced.loss is None or traced.loss.by_place
        folded = key is not None and not by_place
        start = len(jax.tree.leaves((batch, rows)))
        stop = start + len(jax.tree.leaves(args)) + (key is not None and not folded)
        fixed = frozenset(range(start, stop))
        given = traced.schedule, whole, held, fixed, asked.axis, shares, self.backward
        self.made[:] = [Program(traced.stages, *given)]
        return traced, self.made[0], folded

    def _count(self, traced, leaves, parts, args, key, folded):
        """The count of the whole batch, which the first of several backward passes needs."""
        m = self.asked.microbatches
        if m == 1 or traced.loss is None or not self.backward:
            return None
        params = jax.tree.unflatten(self.structure, leaves)  # on which it does not depend

        def one(part):
            batch, rows, own = part
            return traced.loss.count(params, batch, rows, args, own if folded else key)

        counts = jax.lax.map(one, (*parts, key if folded else None))
        return self.within.together(jnp.sum(_widened(counts)))

    def _seeds(self, traced, count, outputs):
        """The cotangents of a microbatch's total, and of its count where it is differentiated."""
        total = _widened(outputs[0])
        if count is None:
            count = _widened(outputs[1]) if traced.has_count else jnp.float32(1)
            total, count = self.within.together((total, count))
        return objective.cotangents(objective.Mean(total, count))

    def _value(self, traced, outputs):
        """(the mean, the two sums of it, the auxiliary outputs in two groups)."""
        total = jnp.sum(_widened(outputs[0]))
        count = jnp.float32(self.asked.microbatches)
        if traced.has_count:
            count = jnp.sum(_widened(outputs[1]))
        whole = objective.Mean(*self.within.together((total, count)))
        ways, leaves = traced.ways, outputs[1 + traced.has_count :]
        leaves = [objective.reduced(x, w) for x, w in zip(leaves, ways, strict=True)]
        self.shapes[:] = ways, jax.tree.structure(traced.aux)
        mean = objective.quotient(whole).astype(traced.dtype)
        return mean, whole, objective.over_devices(leaves, ways, self.within.axes)


def _place(spec, axis):
    """The array's axis that this mesh axis cuts, or None."""
    places = [i for i, entry in enumerate(spec) if axis in jax.tree.leaves((entry,))]
    return places[0] if places else None


def _whole(x, cut, asked):
    """The shape of what a device has of `x` if it has all stages' parts."""
    shape = list(x.shape)
    if cut is not None:
        shape[cut] *= asked.mesh.shape[asked.axis]
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype)


def _relocated(asked, sharding):
    """The sharding of a constraint of the loss, on the mesh as it is within the stages."""
    checks.constraint(asked.who, sharding, asked.mesh, asked.axis)
    new = jax.__version_info__ >= (0, 8)
    return NamedSharding(jax.sharding.get_abstract_mesh() if new else asked.mesh, sharding.spec)


def _everywhere(x, axis):
    """An array that the last stage's devices have, and the others have zeros of, on all."""
    if x.dtype == jnp.bool_:
        return jax.lax.psum(x.astype(jnp.int32), axis).astype(jnp.bool_)
    return jax.lax.psum(x, axis)


def _widened(x):
    return x.astype(objective.wide(x.dtype))
