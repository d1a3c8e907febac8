"""The row of a layout with stages, whose step is many programs."""

import collections
import math

import jax.numpy as jnp
import rounds

from shardwise import layouts, measure, pipeline


class Staged(rounds.Row):
    """A layout with stages, whose step is many programs: the most of any stage, but its update."""

    def __init__(self, layout, bench, *args):
        self._loss = layouts.value_and_grad(layout, bench.loss, bench.mixed, check=False)
        self._microbatches = layout.microbatches
        super().__init__(*args)

    def measured(self, grid, step):
        params, batch = self._state[0], self._batch
        plan = self._loss.plan(params, batch)
        held, sent = collections.defaultdict(int), collections.defaultdict(collections.Counter)
        for (stage, kind), lowered in pipeline.programs(self._loss, params, batch).items():
            compiled = lowered.compile()
            held[stage] = max(held[stage], measure.bytes_per_device(compiled).temporaries)
            found = measure.collectives(compiled)
            times = 1 if kind in ("gather", "total") else self._microbatches
            for axes, part in measure.by_axis(found, plan.stages[stage].mesh).items():
                sent[stage][axes] += times * part.ring_bytes
        for stage, programs in enumerate(plan.stages):
            last = stage == len(plan.stages) - 1
            sent[stage]["stage",] = self._microbatches * _crossing(programs, last)
        most = max(sent.values(), key=lambda each: sum(each.values()))
        arguments = max(measure.bytes_on_devices((self._state, batch)).values())
        return measure.DeviceBytes(arguments, 0, 0, max(held.values())), dict(most), step


def _crossing(programs, last):
    """Bytes that one device sends for a microbatch: activations onward, cotangents back; whole
    numbers have none.
    """

    def size(values, shardings):
        pairs = zip(values, shardings, strict=True)
        return sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in pairs)

    stage, laid = programs.stage, programs.laid
    onward = 0 if last else size(stage.outputs, laid["outputs"])
    back = [x for x in stage.carry if jnp.issubdtype(x.dtype, jnp.inexact)]
    return onward + size(back, laid["back"])
