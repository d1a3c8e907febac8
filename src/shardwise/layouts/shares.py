"""Shares of parameters within a stage: gathered, and their gradients reduced, as `fsdp` does it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardwise.fsdp.arrays import ArrayLayout
from shardwise.fsdp.gathering import How, all_gather, cast, scatter
from shardwise.fsdp.reads import reads
from shardwise.fsdp.using import Use, use_of
from shardwise.layouts.layout import Layout
from shardwise.pipeline.program import Whole


@dataclasses.dataclass(frozen=True)
class Shares(Whole):
    """The operations of tasks on shares of parameters, which go by their numbers.

    With ZeRO 3 a task gathers what it reads, and scatters its gradients: those that the loss gives
    to `marks.use` there, the others where it begins and ends. With 2 they are gathered once a step;
    with 1 gradients too are scattered once.
    """

    layout: Layout
    arrays: tuple[ArrayLayout, ...]
    hows: tuple[How | None, ...]
    use: Use

    def received(self, tree: Any) -> Any:
        """The parameters as the loss receives them, one device's."""
        mesh, (leaves, structure) = self.layout.auto, jax.tree.flatten(tree)
        return structure.unflatten(
            jax.ShapeDtypeStruct(array.local_shape(mesh), x.dtype)
            if late
            else jax.ShapeDtypeStruct(array.inside(mesh), self.layout.dtype or x.dtype)
            for late, array, x in zip(self.use.deferred, self.arrays, leaves, strict=True)
        )

    def rows(self, i: int) -> int | None:
        how = self.hows[i]
        return how.size if how is not None and how.cut == 0 else None

    def alike(self, i: int) -> Any:
        return self.hows[i], self.use.deferred[i], self.copied(i)

    def gather(self, i: int, x: jax.Array) -> jax.Array:
        return x if self.layout.zero == 3 else all_gather([x], [self.hows[i]])[0]

    def enter(self, numbers: Sequence[int], arrays: list, reads: Sequence[int]) -> list:
        read = {numbers[place] for place in reads}
        hows = [self.hows[i] if i in read and self._at_ends(i) else None for i in numbers]
        pairs = zip(numbers, all_gather(arrays, hows), strict=True)
        return [x if self.use.deferred[i] else cast(x, self.layout.dtype) for i, x in pairs]

    def leave(self, numbers: Sequence[int], grads: list) -> list:
        now = [i for i in numbers if self._at_ends(i) or self.layout.zero == 2]
        hows = [self.hows[i] if i in now else None for i in numbers]
        return scatter(_at_once(grads) if any(hows) else grads, hows)

    def scatter(self, i: int, g: jax.Array) -> jax.Array:
        return scatter([g], [self.hows[i]])[0] if self.layout.zero == 1 else g

    def total(self, i: int, g: jax.Array) -> jax.Array:
        return jax.lax.psum(g, axes) if (axes := self.copied(i)) else g

    def copied(self, i: int) -> tuple[str, ...]:
        """The mesh axes along which devices have copies of a parameter, or of its share."""
        return self.layout.copied(self.arrays[i].manual)

    def _at_ends(self, i):
        """Whether a task gathers the parameter where it begins."""
        return self.layout.zero == 3 and not self.use.deferred[i]


def _at_once(arrays):
    """The same numbers, on CPU none before all are computed.

    XLA:CPU begins a collective while a loop before it still runs, unless it takes data of the loop,
    and tells those of a `shard_map` apart by nothing but their order: a scatter would be summed
    with one of the loop's, of another shape (seen with jaxlib 0.10.1).
    """

    def tied(arrays):
        some = [x.ravel()[0].real.astype(jnp.float32) for x in arrays if x.size]
        zero = sum(jnp.where(jnp.isfinite(x), 0 * x, 0) for x in some)
        return [x + zero.astype(x.dtype) for x in arrays]

    return jax.lax.platform_dependent(list(arrays), cpu=tied, default=lambda arrays: arrays)


def shares(
    layout: Layout,
    arrays: tuple[ArrayLayout, ...],
    tree: Any,
    loss: Any,
    batch: Any,
    args: tuple,
    options: dict,
) -> Shares:
    """The `Shares` of a loss of one device's part; called where the axes by hand have names."""
    mesh, structure = layout.auto, jax.tree.structure(tree)
    by_hand = [name for name in mesh.axis_names if name not in layout.tensor]
    hows = tuple(How.of(a, mesh, layout.dtype, layout.reduce_dtype, by_hand) for a in arrays)
    at_use = hows if layout.zero == 3 else [None] * len(hows)

    def of_leaves(arrays, *rest, **options):
        return loss(jax.tree.unflatten(structure, arrays), *rest, **options)

    used = [layout.dtype or x.dtype for x in jax.tree.leaves(tree)]
    found = reads(of_leaves, arrays, mesh, at_use, used, batch, args, options)
    return Shares(layout, arrays, hows, use_of(found, arrays, mesh, at_use))
