"""GPipe in one compiled program: a scan over ticks, in which every stage works and passes on."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardwise.objective.parts import reduced, split


def gpipe(stage: Callable, mesh: Mesh, microbatches: int, axis: str = "stage") -> Callable:
    """A function `run(stack, x)` that takes `x` through all stages, differentiable like any.

    `x` is one array of rows. `stage(weights, x)` maps rows to rows of the same shape and dtype.
    Each array of the pytree `stack` has a first axis, of layers say, which is cut over the ranks of
    `axis`: `weights` is one rank's part, which keeps that axis, even where it is 1. Microbatch j
    has the rows r with r % microbatches == j. What comes before and after, an embedding and a head,
    is outside and the compiler's.

    The backward pass is the transpose: the scan runs back, and each permute sends the other way
    (Huang et al., 2019, GPipe). Ranks work in every one of the `microbatches + ranks - 1` ticks, in
    the bubble on what nobody reads.

    Raises:
      ValueError: rows that do not split into the microbatches.
    """
    ranks = mesh.shape[axis]

    def rank(stack, parts):
        first = jax.lax.axis_index(axis) == 0

        def tick(arrived, t):
            x = jnp.where(first, parts[jnp.minimum(t, microbatches - 1)], arrived)
            y = stage(stack, x)
            return jax.lax.ppermute(y, axis, [(i, i + 1) for i in range(ranks - 1)]), y

        ticks = jnp.arange(microbatches + ranks - 1)
        return jax.lax.scan(tick, jnp.zeros_like(parts[0]), ticks)[1][None, ranks - 1 :]

    def run(stack, x):
        if microbatches < 1 or x.shape[0] % microbatches:
            raise ValueError(f"gpipe: {x.shape[0]} rows do not split into {microbatches} parts.")
        specs = dict(in_specs=(P(axis), P()), out_specs=P(axis), check_vma=False)
        done = jax.shard_map(rank, mesh=mesh, **specs)(stack, split(x, microbatches))
        return reduced(done[-1], "concatenate")

    return run
