"""The programs of one stage, each a `jax.jit` for the devices of that stage."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import cut


@dataclasses.dataclass(frozen=True)
class Programs:
    """What one stage runs; `kinds` has the jitted functions of F, B, I and W.

    Gradients are added to sums that come in and go out, donated.
    """

    stage: cut.Stage
    halves: cut.Halves
    mesh: Any
    rows: Any
    kinds: dict
    zeros: Any
    finish: Any

    def lay(self, x, microbatch_rows):
        """The sharding of an activation or of a part of the batch: rows cut by `rows`."""
        return _sharding(self.mesh, self.rows, x, microbatch_rows)


def compile_stage(stage, mesh, pieces, rows, microbatch_rows):
    """The `Programs` of a stage whose parameters lie on `mesh` as `pieces` say."""
    halves = cut.backward(stage)
    own = [NamedSharding(mesh, piece.spec) for piece in pieces]
    sums = [jax.ShapeDtypeStruct(x.shape, wide(x.dtype)) for x in stage.params]

    def laid(values):
        return [_sharding(mesh, rows, x, microbatch_rows) for x in values]

    cot = [x for x in stage.carry if jnp.issubdtype(x.dtype, jnp.inexact)]

    def whole(params, data, residuals, cots, sums):
        back, grads = halves.whole(params, data, residuals, cots)
        return back, _add(sums, grads)

    def to_weights(params, data, residuals, pending, sums):
        return _add(sums, halves.to_weights(params, data, residuals, pending))

    def finish(sums, count):
        pairs = zip(sums, stage.params, strict=True)
        return [(total / jnp.maximum(count, 1)).astype(x.dtype) for total, x in pairs]

    kinds = {
        "F": jax.jit(halves.forward, out_shardings=(laid(stage.outputs), None)),
        "B": jax.jit(whole, out_shardings=(laid(cot), own), donate_argnums=4),
        "I": jax.jit(halves.to_input, out_shardings=(laid(cot), None)),
        "W": jax.jit(to_weights, out_shardings=own, donate_argnums=4),
    }
    zeros = jax.jit(lambda: [jnp.zeros(x.shape, x.dtype) for x in sums], out_shardings=own)
    finish = jax.jit(finish, out_shardings=own)
    return Programs(stage, halves, mesh, rows, kinds, zeros, finish)


def wide(dtype):
    """In which gradients are summed: float32 at least."""
    return jnp.promote_types(dtype, jnp.float32)


def _add(sums, grads):
    return [total + g.astype(total.dtype) for total, g in zip(sums, grads, strict=True)]


def _sharding(mesh, rows, x, microbatch_rows):
    cut_rows = len(x.shape) > 0 and x.shape[0] == microbatch_rows
    return NamedSharding(mesh, rows if cut_rows else P())
