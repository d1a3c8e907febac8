"""What does not change from step to step, and how a step's sums become its results."""

import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import cut
from shardwise.pipeline.compiling import compile_stage
from shardwise.pipeline.placing import Pipelined
from shardwise.pipeline.running import run
from shardwise.pipeline.stepping import Step

REDUCTIONS = {
    "sum": lambda parts: functools.reduce(jnp.add, parts),
    "max": lambda parts: functools.reduce(jnp.maximum, parts),
    "concatenate": lambda parts: jnp.concatenate(parts),
}


class Plan:
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
        step = Step(self, params, batch, args)
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
