"""One run of a schedule: what each task takes, computes and sends on."""

import jax
import jax.numpy as jnp
import numpy as np


class Step:
    """One run: what is alive, by stage and microbatch. Each entry is written and read once."""

    def __init__(self, plan, params, batch, args):
        self.plan, self.batch, self.args = plan, jax.tree.leaves(batch), args
        self.params = [
            [params.tree[piece.path][s] for piece in pieces] for s, pieces in enumerate(plan.layout)
        ]
        self.sums = [programs.zeros() for programs in plan.stages]
        self.carry, self.kept, self.cots, self.pending, self.outputs = {}, {}, {}, {}, {}

    def perform(self, task):
        """Run one task, wait for what it computes, and send on what others need."""
        s, kind, j = task
        programs, own = self.plan.stages[s], self.params[s]
        jitted = programs.kinds[kind]
        if kind == "F":
            data = self._data(programs, j)
            outputs, kept = jitted(own, data, self.carry.pop((s, j), []))
            self.kept[s, j] = data, kept
            jax.block_until_ready((outputs, kept))
            if programs.stage.last:
                self.outputs[j] = outputs
                self.cots[s, j] = [self.plan.seed]
            else:
                self.carry[s + 1, j] = self._send(outputs, s + 1)
            return
        if kind in "BI":
            cots = self.cots.pop((s, j))
        if kind == "B":
            back, self.sums[s] = jitted(own, *self.kept.pop((s, j)), cots, self.sums[s])
        elif kind == "I":
            back, self.pending[s, j] = jitted(own, *self.kept[s, j], cots)
        else:
            kept, pending = self.kept.pop((s, j)), self.pending.pop((s, j))
            self.sums[s] = jitted(own, *kept, pending, self.sums[s])
            jax.block_until_ready(self.sums[s])
            return
        jax.block_until_ready((back, self.sums[s] if kind == "B" else self.pending[s, j]))
        if s > 0:
            self.cots[s - 1, j] = self._send(back, s - 1)

    def _data(self, programs, j):
        """The parts of the batch, and the arguments, that a stage reads."""
        size, n = self.plan.size, len(self.batch)
        arguments = jax.tree.leaves(self.args)
        values = [
            self.batch[i][j * size : (j + 1) * size] if i < n else _folded(arguments[i - n], j)
            for i in programs.stage.data
        ]
        return [jax.device_put(x, programs.lay(x, size)) for x in map(_array, values)]

    def _send(self, values, stage):
        programs = self.plan.stages[stage]
        return [jax.device_put(x, programs.lay(x, self.plan.size)) for x in values]


def _folded(x, j):
    is_key = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.fold_in(x, j) if is_key else x


def _array(x):
    return x if hasattr(x, "dtype") else np.asarray(x, jax.dtypes.result_type(x))
