"""Bytes that the devices of one stage hold and send, by formula: its collectives by hand."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardwise import marks, pipeline
from shardwise.layouts import staged
from shardwise.layouts.layout import Layout
from shardwise.layouts.meanings import meanings
from shardwise.layouts.placing import cast
from shardwise.objective import wide
from shardwise.pipeline import spmd
from shardwise.pipeline.forms import names_of
from shardwise.pipeline.placing import state_layout

READING = {"F": "forward", "B": "whole", "I": "to_input", "W": "to_weights"}
Sent = dict[tuple[str, ...], float]


class StageBytes(NamedTuple):
    """A stage's `held` and `sent` as in a `Prediction`, parameters' shapes, if it has the ends."""

    held: dict[str, int]
    sent: Sent
    shapes: Any
    ends: tuple[bool, bool]


def of_stage(
    layout: Layout, shapes: Any, batch: Any, tx: Any, loss: Callable, has_aux: bool, stage: int
) -> StageBytes:
    """The `StageBytes`: parameters, gradients, the loss's two sums, what goes to stages beside it.

    Which tasks read a parameter, and so gather it, the cut loss tells.
    """
    who = "layouts.predict"
    function = staged.value_and_grad(layout, loss, has_aux, "sum", who)
    placed = staged.located(layout, shapes, function, batch, who)
    one = _Stage(layout, function.plan(placed, batch), stage)
    held = {"parameters": sum(map(one.held, placed.layout))}
    if tx is not None:
        pieces = state_layout(jax.eval_shape(tx.init, placed.abstract()), placed)
        held["state"] = sum(map(one.held, pieces))
    here = [jax.ShapeDtypeStruct(one.shape(p), p.dtype) for p in placed.layout]
    ends = stage == 0, one.plan.traced.stages[stage].last
    return StageBytes(held, one.sent(), jax.tree.unflatten(placed.structure, here), ends)


def of_program(layout: Layout, shapes: Any, batch: Any, loss: Callable, has_aux: bool) -> float:
    """Bytes that a device sends along stage, where stages are one program."""

    def marked(params, *args):
        with marks.bind(**meanings(layout)):
            return loss(cast(layout, params), *args)

    given = layout.schedule, layout.microbatches, layout.stage[0], has_aux
    sends = spmd.program(marked, layout.auto, *given, shapes, batch).sends()
    return sends["rings"] / layout.size_of_rows() + sends["sums"] + sends["rows"]


class _Stage(NamedTuple):
    """One stage of a plan by hand."""

    layout: Layout
    plan: Any
    stage: int

    def shape(self, piece: pipeline.Piece) -> tuple:
        """The shape of an array's part on the stage; elsewhere, of all of it."""
        rows = dict(piece.homes).get(self.stage)
        return piece.shape if rows is None else (rows[1] - rows[0], *piece.shape[1:])

    def held(self, piece: pipeline.Piece) -> int:
        """Bytes of an array on one device of the stage."""
        if self.stage not in dict(piece.homes):
            return 0
        return self._elements(self.shape(piece), piece.spec) * jnp.dtype(piece.dtype).itemsize

    def sent(self) -> Sent:
        """Bytes that one device sends in a step."""
        found: Sent = {}
        own, m = self.plan.traced.stages[self.stage], self.layout.microbatches
        if self.layout.by_hand:  # else no axis within the stage cuts rows, sequence or parameters
            params = self.plan.stages[self.stage].form.stage.params
            for place, (i, x) in enumerate(zip(own.rows, params, strict=True)):
                self._parameter(place, i, x, found)
        back = [x for x in own.carry if jnp.issubdtype(x.dtype, jnp.inexact)]
        passed = back if own.last else [*back, *own.outputs]
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in passed)
        _add(found, self.layout.stage, m * size)
        if own.last:
            axes = (*self.layout.context, *self.layout.rows)
            counted = 1 if self.plan.traced.has_count and m > 1 else 0
            numbers = sum(
                wide(x.dtype).itemsize for x in own.outputs[: 1 + self.plan.traced.has_count]
            )
            _add(found, axes, 2 * (m * numbers + counted * 4) * self._share(axes))
        return found

    def _parameter(self, place, i, x, found):
        """Add the bytes of a parameter's gathers, and of its gradient's reductions, to `found`."""
        layout, shares = self.layout, self.plan.traced.local.shares
        held = self._elements(x.shape, x.sharding.spec)
        used, m = jnp.dtype(layout.dtype or x.dtype), layout.microbatches
        if shares.hows[i] is not None:
            gathers = m * self._readers(place) if layout.zero == 3 else 1
            scatters = m if layout.zero > 1 else 1
            reduced = layout.reduce_dtype or (
                used if layout.zero > 1 or layout.dtype else wide(used)
            )
            size = gathers * used.itemsize + scatters * jnp.dtype(reduced).itemsize
            whole = held * layout.size("fsdp")
            _add(found, layout.fsdp, whole * size * self._share(layout.fsdp))
        over = shares.copied(i)
        _add(found, over, 2 * held * wide(x.dtype).itemsize * self._share(over))

    def _readers(self, place):
        """The number of a microbatch's tasks that read the parameter at a place."""
        reads = self.plan.stages[self.stage].form.halves.reads
        tasks = {
            t.kind for order in self.plan.schedule.tasks for t in order if t.stage == self.stage
        }
        return sum(place in reads[READING[kind]] for kind in tasks)

    def _elements(self, shape, spec):
        names = [name for entry in spec for name in names_of(entry)]
        return math.prod(shape) // math.prod(self.layout.auto.shape[name] for name in names)

    def _share(self, axes):
        n = math.prod(self.layout.auto.shape[name] for name in axes)
        return (n - 1) / n


def _add(sent, axes, size):
    if size:
        sent[tuple(axes)] = sent.get(tuple(axes), 0) + size
