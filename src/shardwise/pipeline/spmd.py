"""Any schedule as one program for all devices, on plain arrays: a loss and its gradients."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import objective, schedules
from shardwise.objective.gradients import nothing_if_empty
from shardwise.objective.means import wide
from shardwise.pipeline import checks
from shardwise.pipeline.program import Program
from shardwise.pipeline.tracing import Asked, abstract, traced_parts


def value_and_grad(
    loss: Callable,
    mesh: Mesh,
    schedule: str | schedules.Schedule | Sequence,
    microbatches: int,
    axis: str = "stage",
    has_aux: bool = False,
    aux: Any = "sum",
    who: str = "pipeline.value_and_grad",
    backward: bool = True,
) -> Callable:
    """A function of `(params, batch, *args, key=None)`: the mean over the batch, and its gradient.

    For use inside jit, on plain arrays of true shape, in any number of processes; `axis` is the
    mesh's axis of stages, and what else the mesh has is the compiler's. Row i of a stacked array is
    layer i under every schedule. Without `backward`, the gradient is None, and only the forward
    tasks are run.
    """
    asked = Asked(loss, mesh, schedule, microbatches, axis, P(), {}, has_aux, aux, "step", who=who)

    def run(params, batch, *args, key=None):
        checks.rows(who, batch, microbatches)
        return _Call(asked, params, batch, args, key, backward).results()

    return run


def program(
    loss: Callable,
    mesh: Mesh,
    schedule: str | schedules.Schedule | Sequence,
    microbatches: int,
    axis: str,
    has_aux: bool,
    params: Any,
    batch: Any,
) -> Program:
    """The `Program` that `value_and_grad` makes of a loss for arrays of these shapes."""
    asked = Asked(loss, mesh, schedule, microbatches, axis, P(), {}, has_aux, "sum", "step")
    made = []

    def trace(params, batch):
        made.append(_Call(asked, params, batch, (), None, True).program)

    jax.eval_shape(trace, params, batch)
    return made[0]


class _Call:
    """One call: the loss traced for a microbatch, and its program on all."""

    def __init__(self, asked, params, batch, args, key, backward):
        m = asked.microbatches
        self.asked, self.params = asked, params
        batch, rows = objective.split(batch, m), objective.split(objective.numbers(batch), m)
        first = jax.tree.map(lambda x: x[0], (batch, rows))
        groups = abstract((params, *first, args, key))
        within = asked.mesh.abstract_mesh.update_axis_types({asked.axis: AxisType.Manual})
        with jax.sharding.use_abstract_mesh(within):
            traced = traced_parts(
                asked,
                asked.loss,
                groups,
                in_parts=m > 1,
                total=objective.Totals(m),
                relocate=lambda sharding: NamedSharding(within, sharding.spec),
            )
        by_place = traced.loss is None or traced.loss.by_place
        folded = key is not None and not by_place
        if folded:
            key = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(m))
        self.data = jax.tree.leaves((batch, rows, args, key))
        first_whole = len(jax.tree.leaves((batch, rows)))
        last_whole = first_whole + len(jax.tree.leaves(args)) + (0 if folded else 1)
        self.program = Program(
            traced.stages,
            traced.schedule,
            jax.tree.leaves(groups[0]),
            frozenset(range(first_whole, last_whole)),
            asked.axis,
            backward,
        )
        self.traced, self.count = traced, None
        if traced.loss is not None and backward:
            self.count = self._counted(batch, rows, args, key, folded)

    def _counted(self, batch, rows, args, key, folded):
        """The count of the whole batch, which the first backward pass needs."""

        def one(part):
            batch, rows, own = part
            return self.traced.loss.count(self.params, batch, rows, args, own if folded else key)

        counts = jax.lax.map(one, (batch, rows, key if folded else None))
        return jnp.sum(_widened(counts))

    def _seeds(self, count, outputs):
        """The cotangents of the loss's total, and of its count where it is differentiated."""
        if count is None:
            count = _widened(outputs[1]) if self.traced.has_count else jnp.float32(1)
        return objective.cotangents(objective.Mean(_widened(outputs[0]), count))

    def results(self):
        """(mean, gradients), or ((mean, aux), gradients)."""
        traced = self.traced
        outputs, grads = self._run()
        total = jnp.sum(_widened(outputs[0]))
        count = jnp.float32(self.asked.microbatches)
        if traced.has_count:
            count = jnp.sum(_widened(outputs[1]))
        if grads is not None:
            grads = nothing_if_empty(grads, count if traced.has_count else None)
        mean = objective.quotient(objective.Mean(total, count)).astype(traced.dtype)
        if not self.asked.has_aux:
            return mean, grads
        leaves = outputs[1 + traced.has_count :]
        leaves = [objective.reduced(x, w) for x, w in zip(leaves, traced.ways, strict=True)]
        return (mean, jax.tree.unflatten(jax.tree.structure(traced.aux), leaves)), grads

    def _run(self):
        """(the loss's outputs of all microbatches, on every device; gradients, as parameters)."""
        program, axis = self.program, self.asked.axis
        leaves, structure = jax.tree.flatten(self.params)
        specs = [program.spec(i) for i in range(len(leaves))]
        moved = {
            i: order for i, order in program.order.items() if (order != np.arange(len(order))).any()
        }
        given = [x[moved[i]] if i in moved else x for i, x in enumerate(leaves)]

        def rank(leaves, data, count):
            leaves = [
                jax.lax.all_gather(x, axis, axis=program.cuts[i], tiled=True)
                if i in program.cuts
                else x
                for i, x in enumerate(leaves)
            ]
            outputs, grads = program(leaves, data, functools.partial(self._seeds, count))
            return [_from_last(x, axis) for x in outputs], [
                summed(i, g) for i, g in enumerate(grads)
            ]

        def summed(i, g):
            if g is None or i in program.in_rows:
                return g
            if i not in program.cuts:
                return jax.lax.psum(g, axis)
            return jax.lax.psum_scatter(g, axis, scatter_dimension=program.cuts[i], tiled=True)

        mapped = jax.shard_map(
            rank,
            mesh=self.asked.mesh,
            in_specs=(specs, [P()] * len(self.data), P()),
            out_specs=(P(), specs if program.backward else []),
            axis_names={axis},
            check_vma=False,  # around the user's loss
        )
        outputs, grads = mapped(given, self.data, self.count)
        if not program.backward:
            return outputs, None
        grads = [
            jnp.zeros_like(x) if g is None else g[np.argsort(moved[i])] if i in moved else g
            for i, (x, g) in enumerate(zip(leaves, grads, strict=True))
        ]
        grads = [g.astype(x.dtype) for g, x in zip(grads, leaves, strict=True)]
        return outputs, jax.tree.unflatten(structure, grads)


def _from_last(x, axis):
    """An array that the last stage's device has, and the others have zeros of, on all."""
    if x.dtype == jnp.bool_:
        return jax.lax.psum(x.astype(jnp.int32), axis).astype(jnp.bool_)
    return jax.lax.psum(x, axis)


def _widened(x):
    return x.astype(wide(x.dtype))
