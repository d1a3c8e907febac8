"""The stage of one device's program, and the rank's arrays, of which each device has a part."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import cut, objective
from shardwise.pipeline.forms import Shape, names_of, shaped
from shardwise.pipeline.manual import SUMMED, Manual
from shardwise.pipeline.placing import Piece
from shardwise.pipeline.tracing import Traced


@dataclasses.dataclass(frozen=True)
class LocalStage:
    """One stage of a trace by hand, whose parameters lie on `mesh` as `pieces` say.

    What a program keeps for another, and what goes from stage to stage, is a device's own: in the
    rank's array there is a new first axis, with one entry for each device. A gradient that is one
    device's term of a sum lies so too.
    """

    manual: Manual
    traced: Traced
    stage: cut.Stage
    mesh: Mesh
    pieces: list[Piece]

    @functools.cached_property
    def halves(self) -> cut.Halves:
        """The stage's programs, as one device runs them."""
        return self.manual.within(self.mesh, lambda: cut.backward(self.stage))

    @property
    def shares(self) -> Any:
        return self.traced.local.shares

    @property
    def numbers(self) -> list[int]:
        """The numbers of the stage's parameters among all parameters."""
        return list(self.stage.rows)

    @property
    def each(self) -> P:
        """The PartitionSpec of an array of which each device has one entry, its own."""
        return P(self.manual.axes)

    @property
    def data(self) -> list[P]:
        """The PartitionSpecs of the data that the stage reads."""
        return [self.traced.local.specs[i] for i in self.stage.data]

    @property
    def outputs(self) -> list[P]:
        """The PartitionSpecs of the outputs; a loss's are the same on every device, or rows."""
        if not self.stage.last:
            return [self.each] * len(self.stage.outputs)
        ways, sums = self.traced.ways, len(self.stage.outputs) - len(self.traced.ways)
        return [P()] * sums + [P() if w in SUMMED else P(self.manual.rows) for w in ways]

    @functools.cached_property
    def params(self) -> list[Shape]:
        """The shapes of the parameters as they are kept."""
        found = []
        for piece in self.pieces:
            rows = piece.rows(self.stage.index)
            shape = piece.shape if rows is None else (rows[1] - rows[0], *piece.shape[1:])
            found.append(self._on(Shape(shape, piece.dtype), piece.spec))
        return found

    @functools.cached_property
    def held(self) -> list[Shape]:
        """The shapes of the parameters as tasks find them."""
        pairs = zip(self.numbers, self.params, strict=True)
        return [self._on(x, *self.shares.held(i, x)) for i, x in pairs]

    @functools.cached_property
    def sums(self) -> list[Shape]:
        """The shapes of the arrays to which tasks add gradients."""
        found = []
        for i, x in zip(self.numbers, self.params, strict=True):
            axes, spec = self.shares.terms(i), self.shares.summed(i, x)
            shape = (self._size(axes), *x.shape) if axes else x.shape
            wide = Shape(shape, objective.wide(x.dtype))
            found.append(self._on(wide, P(axes, *spec) if axes else spec))
        return found

    def specs(self, shapes: list[Shape]) -> list[P]:
        """The PartitionSpecs of these shapes, of which only the axes by hand are kept."""
        return [self.manual.by_hand(x.sharding.spec) for x in shapes]

    def laid(self) -> dict[str, list[NamedSharding]]:
        """The shardings that a `Form` has."""
        seeded = cut.differentiable(self.stage)
        floating = [x for x in self.stage.carry if jnp.issubdtype(x.dtype, jnp.inexact)]
        specs = {
            "inputs": self.data,
            "carry": [self.each] * len(self.stage.carry),
            "outputs": self.outputs,
            "cotangents": [self.outputs[i] for i in seeded],
            "back": [self.each] * len(floating),
        }
        return {name: [NamedSharding(self.mesh, s) for s in found] for name, found in specs.items()}

    def whole(self) -> cut.Stage:
        """The `cut.Stage` of the rank's arrays, rather than of one device's."""
        outputs = [self._of_each(x) for x in self.stage.outputs]
        if self.stage.last:
            shapes = self.stage.outputs
            found = self.manual.within(self.mesh, lambda: jax.eval_shape(self.of_loss, shapes))
            outputs = [self._of_all(*pair) for pair in zip(found, self.outputs, strict=True)]
        return dataclasses.replace(
            self.stage,
            params=self.params,
            inputs=[self._of_all(*pair) for pair in zip(self.stage.inputs, self.data, strict=True)],
            carry=[self._of_each(x) for x in self.stage.carry],
            outputs=outputs,
        )

    def of_loss(self, outputs: list) -> list:
        """The total, the count and the auxiliary outputs of all devices."""
        sums = len(outputs) - len(self.traced.ways)
        whole = [jnp.asarray(x) for x in outputs[:sums]]
        whole = self.manual.together([x.astype(objective.wide(x.dtype)) for x in whole])
        pairs = zip(outputs[sums:], self.traced.ways, strict=True)
        return [*whole, *(objective.reduced_over(x, w, self.manual.axes) for x, w in pairs)]

    def _on(self, x, spec, dtype=None):
        return shaped(x, NamedSharding(self.mesh, spec), dtype)

    def _size(self, names):
        return math.prod(self.mesh.shape[name] for name in names)

    def _of_each(self, x):
        return Shape((self._size(self.manual.axes), *x.shape), x.dtype)

    def _of_all(self, x, spec):
        parts = [self._size(names_of(entry)) for entry in spec]
        parts += [1] * (len(x.shape) - len(parts))
        return Shape(tuple(n * size for n, size in zip(parts, x.shape, strict=True)), x.dtype)
