"""Bytes that the devices of one stage send, by formula: its collectives by hand."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardwise.layouts import gradients
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
    program = gradients.program(layout, loss, has_aux, shapes, batch)
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
        """The shape of what the device's stages read of a parameter; of none, without rows."""
        own = [self.program.stages[s] for s in self.stages if i in self.program.stages[s].rows]
        ends = [stage.rows[i] for stage in own]
        if None in ends or not x.shape:
            return x
        return jax.ShapeDtypeStruct((sum(b - a for a, b in ends), *x.shape[1:]), x.dtype)

    def sent(self) -> Sent:
        """The bytes that the device sends in a step, by mesh axes."""
        layout = self.layout
        found: Sent = {layout.stage: sum(self.program.sends().values())}
        if layout.by_hand:
            self._shares(found)
            for i, x in enumerate(self.program.leaves):
                over, size = self.program.shares.copied(i), math.prod(x.shape)
                if self.program.held[i] is not None:
                    size //= self.program.schedule.devices
                _add(found, over, 2 * size * wide(x.dtype).itemsize * self._share(over))
            every = (*layout.context, *layout.rows)
            sums = 3  # total and count; before a backward pass, the count
            _add(found, every, 2 * 4 * sums * self._share(every))
        return found

    def _shares(self, found):
        """Add the bytes of gathers along fsdp, and of gradients' reductions, to `found`."""
        program, layout, m = self.program, self.layout, self.layout.microbatches
        kinds, of = program.kinds
        for stage in (program.stages[s] for s in self.stages):
            halves = kinds[of[stage.index]]
            for place, (i, ends) in enumerate(stage.rows.items()):
                readers = sum(place in getattr(halves, task).reads for task in TASKS)
                gathers = m * readers if layout.zero == 3 else 0
                scatters = m if layout.zero > 1 else 0
                self._travels(i, ends, gathers, scatters, found)
        if layout.zero < 3:  # once, whatever the device's stages read of what is carried
            for carrier in program.carriers:
                places, ends = carrier.places, carrier.pieces[0][1]
                self._travels(carrier.leaf, ends, places, places * (layout.zero == 1), found)

    def _travels(self, i, ends, gathers, scatters, found):
        """Add this many gathers of a parameter, or of its rows, and scatters of its gradient."""
        layout, x = self.layout, self.program.leaves[i]
        if self.program.shares.hows[i] is None:
            return
        used = jnp.dtype(layout.dtype or x.dtype)
        reduced = layout.reduce_dtype or (used if layout.zero > 1 or layout.dtype else wide(used))
        size = gathers * used.itemsize + scatters * jnp.dtype(reduced).itemsize
        rows = (
            x.shape
            if ends is None or self.program.shares.rows(i) is not None
            else (ends[1] - ends[0], *x.shape[1:])
        )
        whole = math.prod(rows) * layout.size("fsdp")
        _add(found, layout.fsdp, whole * size * self._share(layout.fsdp))

    def _share(self, axes):
        n = math.prod(self.layout.auto.shape[name] for name in axes)
        return (n - 1) / n


def _add(sent, axes, size):
    if size:
        sent[tuple(axes)] = sent.get(tuple(axes), 0) + size
