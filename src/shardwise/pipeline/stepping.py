"""A run of a schedule: what each task takes, computes and sends on."""

import functools

import jax
import numpy as np

from shardwise.pipeline.placing import plain
from shardwise.pipeline.tracing import row_numbers


class Step:
    """A run of a schedule: the live arrays by stage and microbatch, each written and read once."""

    def __init__(self, plan, params, batch, args, key, count):
        self.plan, self.count, self.m = plan, count, plan.asked.microbatches
        self.in_parts = jax.tree.leaves(self._divided(jax.tree.map(plain, batch)))
        self.whole, self.key = jax.tree.leaves(args), key
        self.params = [
            programs.parameters([params.tree[piece.path][s] for piece in pieces])
            for s, (programs, pieces) in enumerate(zip(plan.stages, plan.layout, strict=True))
        ]
        self.sums = [programs.zeros() for programs in plan.stages]
        self.seeds = None if count is None else plan.counted.seeds(count)
        self.carry, self.kept, self.cots, self.pending, self.outputs = {}, {}, {}, {}, {}

    def _divided(self, batch):
        """(the batch, the numbers of its rows)."""
        manual = self.plan.asked.manual
        if manual is None:
            return batch, row_numbers(batch)
        batch, numbers, _ = manual.divide(batch, self.m)
        return batch, jax.tree.map(np.asarray, numbers)

    def perform(self, task):
        """Dispatch one task, send on what others need, and return what is there when it has run."""
        s, kind, j = task
        programs, own = self.plan.stages[s], self.params[s]
        jitted = programs.kinds[kind]
        if kind == "F":
            data = self._data(programs, j)
            outputs, kept, done = jitted(own, data, self.carry.pop((s, j), []))
            self.kept[s, j] = data, kept
            self._forwarded(programs, s, j, outputs)
            return done
        if kind == "W":
            kept, pending = self.kept.pop((s, j)), self.pending.pop((s, j))
            self.sums[s], done = jitted(own, *kept, pending, self.sums[s])
            return done
        cots = self.cots.pop((s, j))
        if kind == "B":
            back, self.sums[s], done = jitted(own, *self.kept.pop((s, j)), cots, self.sums[s])
        else:
            back, self.pending[s, j], done = jitted(own, *self.kept[s, j], cots)
        if s > 0:
            self.cots[s - 1, j] = _put(back, self.plan.stages[s - 1].laid["cotangents"])
        return done

    def _forwarded(self, programs, s, j, outputs):
        if not programs.stage.last:
            self.carry[s + 1, j] = _put(outputs, self.plan.stages[s + 1].laid["carry"])
            return
        self.outputs[j] = outputs
        counted = self.plan.counted
        if self.seeds is None:  # the only microbatch
            self.seeds = counted.seeds(counted.after(outputs), outputs[0])
        self.cots[s, j] = self.seeds

    def _data(self, programs, j):
        """The parts of the batch, and the arguments, that a stage reads."""
        n, arguments = len(self.in_parts), [*self.whole, self._key(j)]
        values = [
            self._part(self.in_parts[i], j) if i < n else arguments[i - n]
            for i in programs.stage.data
        ]
        return _put(values, programs.laid["inputs"])

    def _key(self, j):
        """The key of microbatch `j`: the batch's own, where draws go by place."""
        if self.key is None or self.m == 1 or self.plan.traced.loss.by_place:
            return self.key
        return jax.random.fold_in(self.key, j)

    def _part(self, x, j):
        """The rows r of `x` with r % m == j."""
        if self.m == 1:
            return x
        if isinstance(x, jax.Array):
            return _strided(x, j, self.m)
        return np.asarray(x)[j :: self.m]


@functools.partial(jax.jit, static_argnums=2)
def _strided(x, j, m):
    parts = x.reshape(x.shape[0] // m, m, *x.shape[1:])
    return jax.lax.dynamic_index_in_dim(parts, j, axis=1, keepdims=False)


def _put(values, shardings):
    pairs = zip(values, shardings, strict=True)
    return [jax.device_put(_array(x), sharding) for x, sharding in pairs]


def _array(x):
    return x if hasattr(x, "dtype") else np.asarray(x, jax.dtypes.result_type(x))
