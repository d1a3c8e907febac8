"""Creation of parameters on their stages."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise.mesh import outside
from shardwise.pipeline.placing import Pipelined, located


def create(
    function: Callable, key: jax.Array, like: Any, batch: Any, *args: Any, rule: Any = P()
) -> Pipelined:
    """`place(function(key), like, batch, *args)`, without the whole of it anywhere.

    Each stage runs a program of its own, which draws what lives there. The same key gives the same
    numbers as `jax.jit(function)(key)`, as far as they do not depend on the layout: uniform draws
    are bitwise equal.

    Raises:
      ValueError: as `place`.
    """
    shapes = jax.eval_shape(function, key)
    layout, meshes = located(shapes, like, batch, *args, rule=rule)

    def of_stage(stage):
        return [(i, p) for i, p in enumerate(layout) if stage in dict(p.homes)]

    tree: dict[str, dict] = {piece.path: {} for piece in layout}
    with outside():
        for stage, grid in enumerate(meshes):
            mine = of_stage(stage)

            def own(key, stage=stage, mine=mine):
                leaves = jax.tree.leaves(function(key))
                return [leaves[i][slice(*(p.rows(stage) or (None,)))] for i, p in mine]

            laid = [NamedSharding(grid, piece.spec) for _, piece in mine]
            here = jax.device_put(key, NamedSharding(grid, P()))
            for (_, piece), x in zip(mine, jax.jit(own, out_shardings=laid)(here), strict=True):
                tree[piece.path][stage] = x
    return Pipelined(tree, layout, jax.tree.structure(shapes), meshes)
