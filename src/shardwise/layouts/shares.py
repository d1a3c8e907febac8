"""Shares of parameters within a stage: gathered, and their gradients reduced, as `fsdp` does it."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardwise import fsdp, pipeline
from shardwise.fsdp.arrays import of_specs
from shardwise.fsdp.gathering import How, all_gather, cast, scatter
from shardwise.fsdp.using import Use, reads_of, use_of
from shardwise.layouts.layout import Layout
from shardwise.layouts.placing import expert_rule, parameter_rule

Shape = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Shares:
    """The operations of a stage's programs on shares of parameters, which go by their numbers.

    With ZeRO 3 a task gathers what it reads, and scatters its gradients: those that the loss gives
    to `marks.use` there, the others where it begins and ends. With 2 they are gathered once a step;
    with 1 gradients too are scattered once. Functions of arrays are one device's.
    """

    layout: Layout
    mesh: Mesh
    arrays: tuple[fsdp.ArrayLayout, ...]
    dtypes: tuple[Any, ...]
    hows: tuple[How | None, ...]
    use: Use

    @property
    def shapes(self) -> list[Shape]:
        """The parameters as the loss receives them, one device's."""
        found = []
        for late, array, dtype in zip(self.use.deferred, self.arrays, self.dtypes, strict=True):
            if late:
                found.append(Shape(array.local_shape(self.mesh), dtype))
            else:
                found.append(Shape(array.inside(self.mesh), self.layout.dtype or dtype))
        return found

    @property
    def parts(self) -> int:
        """The number of parts into which an array is cut."""
        return math.prod(self.mesh.shape[name] for name in self.layout.fsdp)

    def held(self, i: int, x: Any) -> tuple[P, Any]:
        """The spec and the dtype in which tasks find a parameter that is kept as `x`."""
        if self.layout.zero == 3 or self.hows[i] is None:
            return x.sharding.spec, x.dtype
        return self._whole(i, x.sharding.spec), self.layout.dtype or x.dtype

    def summed(self, i: int, x: Any) -> P:
        """The spec of the sum to which a parameter's gradients are added."""
        once = self.layout.zero == 1 and self.hows[i] is not None
        return self._whole(i, x.sharding.spec) if once else x.sharding.spec

    def terms(self, i: int) -> tuple[str, ...]:
        """The mesh axes over which the devices' sums of a parameter's gradients are added up."""
        once = self.layout.zero == 1 and self.hows[i] is not None
        return (*self.copied(i), *(self.layout.fsdp if once else ()))

    def gather(self, numbers: Sequence[int], arrays: list) -> list:
        """The parameters as tasks find them, gathered once a step."""
        return all_gather(arrays, self._hows(numbers, arrays, numbers, self.parts))

    def enter(self, numbers: Sequence[int], arrays: list, reads: Sequence[int]) -> list:
        """A task's parameters as its program takes them; it reads those at the places `reads`."""
        read = {numbers[place] for place in reads}
        early = [i for i in numbers if i in read and self._at_ends(i)]
        whole = all_gather(arrays, self._hows(numbers, arrays, early, self.parts))
        pairs = zip(numbers, whole, strict=True)
        return [x if self.use.deferred[i] else cast(x, self.layout.dtype) for i, x in pairs]

    def leave(self, numbers: Sequence[int], grads: list) -> list:
        """A task's gradients, as they are added to sums."""
        now = [i for i in numbers if self._at_ends(i) or self.layout.zero == 2]
        return scatter(grads, self._hows(numbers, grads, now))

    def total(self, numbers: Sequence[int], sums: list) -> list:
        """The gradients to which the devices' sums add up, once a step."""
        once = numbers if self.layout.zero == 1 else ()
        sums = scatter(sums, self._hows(numbers, sums, once))
        pairs = zip(numbers, sums, strict=True)
        return [jax.lax.psum(x, axes) if (axes := self.copied(i)) else x for i, x in pairs]

    def _at_ends(self, i):
        """Whether a task gathers the parameter where it begins."""
        return self.layout.zero == 3 and not self.use.deferred[i]

    def _hows(self, numbers, arrays, wanted, parts=1):
        """The `How` of each array that is wanted, at the size that a stage has; else None."""
        found = []
        for i, x in zip(numbers, arrays, strict=True):
            how = self.hows[i] if i in wanted else None
            if how is not None:
                size = x.shape[how.cut] * parts
                how = how._replace(size=size)
            found.append(how)
        return found

    def copied(self, i: int) -> tuple[str, ...]:
        """The mesh axes along which devices have copies of a parameter, or of its share."""
        own = {*jax.tree.leaves(tuple(self.arrays[i].manual))}
        return tuple(name for name in (*self.layout.context, *self.layout.rows) if name not in own)

    def _whole(self, i, spec):
        cut = self.arrays[i].cut
        return P(*(None if axis == cut else entry for axis, entry in enumerate(spec)))


def shares(
    layout: Layout,
    params: pipeline.Pipelined,
    mesh: Mesh,
    loss: Callable,
    batch: Any,
    args: tuple,
    options: dict,
) -> Shares:
    """The `Shares` of a loss of one device's part; called where the axes of `mesh` have names.

    Raises:
      ValueError: what `fsdp.value_and_grad` says of reads outside `marks.use`.
    """
    tree = params.abstract()
    specs = [piece.spec for piece in params.layout]
    arrays = of_specs(tree, specs, parameter_rule(layout), mesh, expert_rule(layout))
    dtypes = tuple(piece.dtype for piece in params.layout)
    by_hand = tuple(name for name in mesh.axis_names if name not in layout.tensor)
    hows = tuple(How.of(a, mesh, layout.dtype, layout.reduce_dtype, by_hand) for a in arrays)
    at_use = hows if layout.zero == 3 else [None] * len(hows)

    def of_leaves(arrays, *rest, **options):
        return loss(jax.tree.unflatten(params.structure, arrays), *rest, **options)

    used = [layout.dtype or dtype for dtype in dtypes]
    found = reads_of(of_leaves, arrays, mesh, at_use, used, batch, args, options)
    use = use_of(found, arrays, mesh, at_use)
    return Shares(layout, mesh, arrays, dtypes, hows, use)
