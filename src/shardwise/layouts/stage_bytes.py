"""Bytes that the devices of one stage send, by formula: its collectives by hand."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardwise.layouts import staged
from shardwise.layouts.layout import Layout
from shardwise.objective import wide
from shardwise.pipeline.program import Program

TASKS = "forward", "to_input", "to_weights"
Sent = dict[tuple[str, ...], float]


class StageBytes(NamedTuple):
    """What a device sends, the shapes of the parameters that it reads, if it has the ends."""

    sent: Sent
    shapes: Any
    ends: tuple[bool, bool]


def of_stage(
    layout: Layout, shapes: Any, batch: Any, loss: Callable, has_aux: bool, place: int
) -> StageBytes:
    """The `StageBytes` of a device at this place along the stages, whose program the loss tells."""
    program = staged.program(layout, loss, has_aux, shapes, batch)
    one = _Device(layout, program, place)
    own = [program.stages[s] for s in one.stages]
    here = [one.shape(i, x) for i, x in enumerate(program.leaves)]
    tree = jax.tree.unflatten(jax.tree.structure(shapes), here)
    return StageBytes(one.sent(), tree, (own[0].index == 0, own[-1].last))


class _Device(NamedTuple):
    """A device of a program, at a place along its stages."""

    layout: Layout
    program: Program
    place: int

    @property
    def stages(self) -> list[int]:
        """The numbers of the device's stages."""
        device_of = self.program.schedule.device_of
        return [s for s, device in enumerate(device_of) if device == self.place]

    def shape(self, i: int, x: Any) -> Any:
        """The shape of what the device's stages read of a parameter."""
        ends = [self.program.stages[s].rows.get(i) for s in self.stages]
        rows = sum(b - a for a, b in filter(None, ends))
        shape = (rows, *x.shape[1:]) if i in self.program.in_rows else x.shape
        return jax.ShapeDtypeStruct(shape, x.dtype)

    def sent(self) -> Sent:
        """The bytes that the device sends in a step, by mesh axes."""
        layout, m = self.layout, self.layout.microbatches
        found = {layout.stage: sum(self.program.sends().values())}
        if layout.by_hand:
            for i in self.program.trained:
                self._parameter(i, found)
            every = (*layout.context, *layout.rows)
            sums = 4 if m == 1 else 3  # total and count; before a backward pass, both or the count
            _add(found, every, 2 * 4 * sums * self._share(every))
        return found

    def _parameter(self, i, found):
        """Add the bytes of a parameter's gathers, and of its gradient's reductions, to `found`."""
        layout, shares, x = self.layout, self.program.shares, self.program.leaves[i]
        used, m = jnp.dtype(layout.dtype or x.dtype), layout.microbatches
        if shares.hows[i] is not None:
            once, tasks = math.prod(self.shape(i, x).shape), self._tasks(i, x)
            gathered = m * sum(size * reads for size, reads in tasks) if layout.zero == 3 else once
            scattered = m * sum(size for size, _ in tasks) if layout.zero > 1 else once
            wanted = used if layout.zero > 1 or layout.dtype else wide(used)
            size = gathered * used.itemsize
            size += scattered * jnp.dtype(layout.reduce_dtype or wanted).itemsize
            _add(found, layout.fsdp, size * layout.size("fsdp") * self._share(layout.fsdp))
        over = shares.copied(i)
        n = 1 if self.program.held[i] is None else self.program.schedule.devices
        _add(found, over, 2 * x.size // n * wide(x.dtype).itemsize * self._share(over))

    def _tasks(self, i, x):
        """[(elements of a share that a task gathers, how many of its tasks read it)] of stages."""
        kinds, of = self.program.kinds
        found = []
        for stage, kind in ((self.program.stages[s], kinds[of[s]]) for s in self.stages):
            if i not in stage.rows:
                continue
            ends, place = stage.rows[i], list(stage.rows).index(i)
            whole = ends is None or self.program.shares.by_rows(i)
            size = x.size if whole else x.size // x.shape[0] * (ends[1] - ends[0])
            reads = sum(place in kind.halves.reads[t] for t in TASKS)
            found.append((size, reads))
        return found

    def _share(self, axes):
        n = math.prod(self.layout.auto.shape[name] for name in axes)
        return (n - 1) / n


def _add(sent, axes, size):
    if size:
        sent[tuple(axes)] = sent.get(tuple(axes), 0) + size
