"""The count of the whole batch, and the cotangents that it makes of the loss's outputs."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import cut, objective
from shardwise.pipeline.compiling import Programs
from shardwise.pipeline.placing import Pipelined
from shardwise.pipeline.tracing import Traced, abstract, row_numbers


class Counted:
    """The count, on the last stage's devices, from the batch alone: no weight is read for it.

    With one microbatch it is the count of its forward pass, and may depend on the parameters.
    """

    def __init__(self, traced: Traced, microbatches: int, last: Programs, manual: Any = None):
        self.loss, self.microbatches, self.has_count = traced.loss, microbatches, traced.has_count
        self.manual, self.local, self.mesh = manual, traced.local, last.mesh
        self.here = NamedSharding(last.mesh, P())
        self.dtypes = [last.stage.outputs[i].dtype for i in cut.differentiable(last.stage)]
        self.program = None
        self.seeds = jax.jit(self._seeds, out_shardings=self.here)
        self.after = jax.jit(lambda outputs: _wide(outputs[1]), out_shardings=self.here)

    def before(self, params: Pipelined, batch: Any, args: tuple, key: Any) -> jax.Array | None:
        """The count, before anything else runs; None if the only microbatch is to tell it."""
        if not self.has_count:  # a mean over rows: every part counts as one
            return jax.device_put(jnp.float32(self.microbatches * self._devices()), self.here)
        if self.microbatches == 1:
            return None
        leaves = jax.tree.leaves((batch, args, key))
        if self.program is None:
            self.program = self._traced(params.abstract(), *abstract((batch, args, key)))
        run, used = self.program
        return run(*(jax.device_put(leaves[i], self.here) for i in used))

    def _traced(self, tree, batch, args, key):
        """(the count's program, the numbers of the leaves of (batch, args, key) that it reads)."""
        rows = row_numbers(batch)

        def whole(batch, args, key):
            if self.manual is not None:
                divided = self.manual.divide(batch, self.microbatches)[:2]
                parts = objective.split(divided, self.microbatches)
                return self._over_devices(tree, parts, args, key)
            return self._summed(tree, objective.split((batch, rows), self.microbatches), args, key)

        closed = jax.make_jaxpr(whole)(batch, args, key)
        read = {id(v) for e in closed.jaxpr.eqns for v in e.invars}
        read |= {id(v) for v in closed.jaxpr.outvars}
        used = [i for i, v in enumerate(closed.jaxpr.invars) if id(v) in read]
        shapes = [x.aval for x in closed.jaxpr.invars]

        def run(*values):
            given = dict(zip(used, values, strict=True))
            unused = lambda x: jnp.zeros(x.shape, x.dtype)  # noqa: E731
            each = [given[i] if i in given else unused(x) for i, x in enumerate(shapes)]
            return jaxpr_as_fun(closed)(*each)[0]

        return jax.jit(run, out_shardings=self.here), used

    def _summed(self, tree, parts, args, key):
        """The count of all microbatches."""

        def count(part):
            *part, j = part
            own = key  # that of the microbatch's loss: what is drawn may be counted
            if key is not None and not self.loss.by_place:
                own = jax.random.fold_in(key, j)
                own = own if self.manual is None else self.manual.fold(own)
            return _wide(self.loss.count(tree, *part, args, own))

        return jnp.sum(jax.lax.map(count, (*parts, jnp.arange(self.microbatches))))

    def _over_devices(self, tree, parts, args, key):
        """The count of all microbatches, summed over devices, each of which has its own part."""

        def count(parts, args, key):
            return self.manual.together(self._summed(tree, parts, args, key))

        leaves, structure = jax.tree.flatten(parts)
        specs = [P(None, *spec) for spec in self.local.specs[: len(leaves)]]
        specs = jax.tree.unflatten(structure, specs), P(), P()
        return self.manual.mapped(count, self.mesh, specs, P())(parts, args, key)

    def _devices(self):
        names = () if self.manual is None else self.manual.axes
        return math.prod(self.mesh.shape[name] for name in names)

    def _seeds(self, count, total=None):
        """The cotangents of the total, and of a count that is differentiated."""
        cots = objective.cotangents(objective.Mean(0.0 if total is None else _wide(total), count))
        return [c.astype(dtype) for c, dtype in zip(cots, self.dtypes, strict=False)]


def _wide(x):
    return jnp.asarray(x).astype(objective.wide(jnp.asarray(x).dtype))
