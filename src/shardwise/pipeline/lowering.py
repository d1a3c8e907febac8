"""The programs of a training step for devices that are not here, made from shapes alone."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise.mesh import outside
from shardwise.pipeline import live
from shardwise.pipeline.forms import shaped
from shardwise.pipeline.gradients import ValueAndGrad
from shardwise.pipeline.live import Held, Moment
from shardwise.pipeline.optimizing import program
from shardwise.pipeline.placing import Pipelined, state_layout
from shardwise.pipeline.planning import Plan, arguments
from shardwise.schedules import Schedule

PLATFORM = "tpu"
Key = tuple[int, str]  # a stage, and which of its programs


@dataclasses.dataclass(frozen=True)
class Step:
    """A step whose programs are to be compiled, for a function on an abstract mesh.

    `params` and `state` say where arrays would live; they have none.
    """

    plan: Plan
    params: Pipelined
    state: Pipelined
    tx: Any

    @property
    def schedule(self) -> Schedule:
        return self.plan.schedule

    @property
    def axis(self) -> str:
        """The mesh axis along which the stages lie."""
        return self.plan.asked.axis

    def compiled(
        self, compile: Callable[[int, str, jax.stages.Lowered], Any]
    ) -> tuple[dict[Key, Any], list[Held]]:
        """({(stage, name): compiled}, [`Held` of each stage]), by `compile(stage, name, lowered)`.

        Names are the kinds of tasks; "gather" and "finish", which begin and end a step's; "update",
        and "update 0" and so on, which compute numbers that it needs from several stages. What
        `compile` returns has `outputs`, PartitionSpecs: as one task's program lays out what it
        keeps, so another finds it.
        """
        found, held = {}, []
        with outside():
            for s in range(len(self.plan.stages)):
                for name, program in self._of_tasks(s, compile, held):
                    found[s, name] = program
            for s, number, jitted, given in self._update().programs():
                name = "update" if number == "goals" else f"update {number}"
                found[s, name] = compile(s, name, _lowered(jitted, given))
        return found, held

    def moments(self, held: list[Held]) -> list[Moment]:
        """The bytes on a device while each program runs."""
        return live.moments(self.schedule, held)

    def transfers(self, held: list[Held]) -> list[int]:
        """The bytes that one device of each rank sends to other ranks."""
        return live.transfers(self.schedule, held)

    def kinds(self, stage: int) -> list[str]:
        """The kinds of a stage's tasks, the first to run first."""
        orders = self.plan.schedule.tasks
        kinds = {t.kind for order in orders for t in order if t.stage == stage}
        return [kind for kind in "FBIW" if kind in kinds]

    def _of_tasks(self, s, compile, held) -> Iterator[tuple[str, Any]]:
        programs = self.plan.stages[s]
        form, given, between = programs.form, arguments(programs), {}
        own = [shaped(x, sharding) for x, sharding in zip(form.stage.params, form.own, strict=True)]
        if form.gathered:
            lowered = _lowered(programs.gather, (programs.cut_up(own),))
            yield "gather", compile(s, "gather", lowered)
        for kind in self.kinds(s):
            values = list(given[kind])
            if kind != "F":
                values[2] = between["F"]
            if kind == "W":
                values[3] = between["I"]
            lowered = _lowered(programs.kinds[kind], values)
            done = compile(s, kind, lowered)
            if kind in "FI":
                between[kind] = _laid(lowered.out_info, done.outputs, programs.mesh)
            yield kind, done
        count = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(programs.mesh, P()))
        lowered = _lowered(programs.finish.jitted, programs.finish.arguments(form.sums, count))
        yield "finish", compile(s, "finish", lowered)
        held.append(self._held(s, own, given, between))

    def _held(self, s, own, given, between):
        programs, stage = self.plan.stages[s], self.plan.stages[s].form.stage
        laid = programs.laid
        _, data, carry = given["F"]
        floating = [x for x in stage.carry if jnp.issubdtype(x.dtype, jnp.inexact)]
        outputs, back = (
            [shaped(x, sharding) for x, sharding in zip(values, laid[name], strict=True)]
            for name, values in (("outputs", stage.outputs), ("back", floating))
        )
        return Held(
            own=_bytes(own),
            found=_bytes([programs.form.held[i] for i in programs.form.gathered]),
            state=self._of_pieces(self.state.layout, s),
            sums=_bytes(programs.form.sums),
            data=_bytes(data),
            carry=_bytes(carry),
            outputs=_bytes(outputs),
            cotangents=_bytes(given["B"][3]),
            back=_bytes(back),
            kept=_bytes(between["F"]),
            pending=_bytes(between.get("I", [])),
        )

    def _of_pieces(self, pieces, s):
        total = 0
        for piece in pieces:
            if s in dict(piece.homes):
                rows = piece.rows(s)
                shape = piece.shape if rows is None else (rows[1] - rows[0], *piece.shape[1:])
                x = jax.ShapeDtypeStruct(shape, piece.dtype)
                total += _bytes([shaped(x, NamedSharding(self.state.meshes[s], piece.spec))])
        return total

    def _update(self):
        trees = self.params, self.state, self.params
        return program(self.tx, (), tuple((t.layout, t.structure, t.meshes) for t in trees))


def lower(function: ValueAndGrad, params: Pipelined, tx: Any, batch: Any) -> Step:
    """The `Step` of what `value_and_grad` returned, for parameters that are placed, but not here.

    Raises:
      ValueError: parameters that several stages hold whole, whose gradients travel.
    """
    shapes = params.abstract()
    for piece in params.layout:
        if len(piece.homes) > 1 and not piece.in_rows:
            raise ValueError(
                f"pipeline: {piece.path} is read by the stages {[s for s, _ in piece.homes]}, each "
                f"of which holds it whole; such a step is not lowered for other devices yet. Give "
                f"each stage an array of its own."
            )
    state = jax.eval_shape(tx.init, shapes)
    laid = Pipelined({}, state_layout(state, params), jax.tree.structure(state), params.meshes)
    return Step(function.plan(params, batch), params, laid, tx)


def _lowered(jitted, given):
    return jitted.trace(*given).lower(lowering_platforms=(PLATFORM,))


def _laid(out_info, specs, mesh):
    """The shapes of a program's second output, laid out as it came out; on one device, whole."""
    first, second = (jax.tree.leaves(out) for out in out_info[:2])
    specs = specs[len(first) : len(first) + len(second)] or [P()] * len(second)
    return [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(second, specs, strict=True)
    ]


def _bytes(arrays) -> int:
    """The bytes of these arrays on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)
