"""The plan that steps of the same shapes share, and how a step's sums become its results."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import cut, objective
from shardwise.pipeline import checks
from shardwise.pipeline.by_hand import by_hand
from shardwise.pipeline.compiling import Programs, compile_stage
from shardwise.pipeline.counting import Counted
from shardwise.pipeline.forms import by_compiler, shaped
from shardwise.pipeline.placing import Pipelined
from shardwise.pipeline.running import run
from shardwise.pipeline.stepping import Step
from shardwise.pipeline.tracing import Asked, Traced


class Plan:
    """The stages' programs and all else that does not change from step to step."""

    def __init__(self, asked: Asked, traced: Traced, params: Pipelined):
        self.asked, self.traced, self.schedule = asked, traced, traced.schedule
        stages = traced.stages
        self.layout = [[params.layout[i] for i in s.rows] for s in stages]
        self._check_rows(params.meshes[0])
        self.stages = [
            compile_stage(self._form(stage, params.meshes[stage.index], pieces))
            for stage, pieces in zip(stages, self.layout, strict=True)
        ]
        self.counted = Counted(traced, asked.microbatches, self.stages[-1], asked.manual)
        self._results = jax.jit(self._joined)
        self._check_halves()

    def run(self, params: Pipelined, batch: Any, args: tuple, key: Any, timed: bool) -> tuple:
        """((mean, aux) or mean, gradients, {task: (start, end)} or None)."""
        count = self.counted.before(params, batch, args, key)
        step = Step(self, params, batch, args, key, count)
        ran = run(self.schedule, step.perform, timed)
        if count is None:
            count = self.counted.after(step.outputs[0])
        outputs = [step.outputs[j] for j in sorted(step.outputs)]
        mean, extra = self._results(outputs, count)
        grads = self._finish(params, step.sums, count)
        ran.wait()
        extra = jax.tree.unflatten(jax.tree.structure(self.traced.aux), extra)
        return ((mean, extra) if self.asked.has_aux else mean), grads, ran.times

    def _form(self, stage, mesh, pieces):
        if self.asked.manual is not None:
            return by_hand(self.asked.manual, self.traced, stage, mesh, pieces)
        specs = [piece.spec for piece in pieces]
        halves = cut.backward(stage)
        return by_compiler(stage, halves, mesh, specs, self.asked.rows, self.asked.gather)

    def _check_rows(self, mesh):
        for stage in self.traced.stages:
            for x, axis in zip(stage.inputs, stage.axes.get("inputs", ()), strict=False):
                if axis is not None:
                    checks.divided(self.asked.who, x.shape[axis], mesh, self.asked.rows)

    def _check_halves(self):
        kinds = {task.kind for order in self.schedule.tasks for task in order}
        for programs in self.stages if "I" in kinds else ():
            if names := programs.form.halves.undivided:
                warnings.warn(
                    f"pipeline: stage {programs.stage.index}: {', '.join(names)} yields both what "
                    f"the stage before waits for and gradients of weights; all of it runs in I.",
                    stacklevel=5,
                )

    def _joined(self, outputs, count):
        """(the mean of all microbatches, their auxiliary outputs, each joined in its way)."""
        totals = [jnp.asarray(out[0]) for out in outputs]
        total = functools.reduce(jnp.add, [x.astype(objective.wide(x.dtype)) for x in totals])
        mean = objective.quotient(objective.Mean(total, count)).astype(self.traced.dtype)
        leaves = zip(*(out[1 + self.traced.has_count :] for out in outputs), strict=True)
        pairs = zip(leaves, self.traced.ways, strict=True)
        return mean, [objective.reduced(jnp.stack(parts), way) for parts, way in pairs]

    def _finish(self, params, sums, count):
        """The gradients; those of a parameter that several stages hold are summed over these."""
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
            sharding = sums[first][at].sharding
            parts = [jax.device_put(sums[s][i], sharding) for s, i in places]
            total = functools.reduce(jnp.add, parts)
            for s, i in places:  # of two stages on one device each has its own, which it donates
                sums[s][i] = jax.device_put(total, sums[s][i].sharding, may_alias=False)

    def lowered(self, params: Pipelined) -> dict[tuple[int, str], jax.stages.Lowered]:
        """The lowered programs of the schedule's kinds, and of what a step does once."""
        found = {}
        kinds = {(task.stage, task.kind) for order in self.schedule.tasks for task in order}
        for s, programs in enumerate(self.stages):
            if programs.form.gathered:
                own = [params.tree[p.path][s] for p in self.layout[s]]
                found[s, "gather"] = programs.gather.lower(programs.cut_up(own))
            if self.asked.manual is not None:
                found[s, "total"] = jax.jit(programs.form.total).lower(programs.form.sums)
            for kind, given in arguments(programs).items():
                if (s, kind) in kinds:
                    found[s, kind] = programs.kinds[kind].lower(*given)
        return found


def arguments(programs: Programs) -> dict[str, tuple]:
    """{kind: abstract arguments} of a stage's programs; kept and pending have no shardings."""
    stage, halves, own = programs.stage, programs.form.halves, programs.form.held
    outputs = [stage.outputs[i] for i in cut.differentiable(stage)]
    data, carry, cots = (
        [shaped(x, sharding) for x, sharding in zip(values, programs.laid[name], strict=True)]
        for name, values in (
            ("inputs", stage.inputs),
            ("carry", stage.carry),
            ("cotangents", outputs),
        )
    )
    _, kept = jax.eval_shape(halves.forward, own, data, carry)
    _, pending = jax.eval_shape(halves.to_input, own, data, kept, cots)
    sums = programs.form.sums
    return {
        "F": (own, data, carry),
        "B": (own, data, kept, cots, sums),
        "I": (own, data, kept, cots),
        "W": (own, data, kept, pending, sums),
    }
