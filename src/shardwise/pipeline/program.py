"""The program of a pipeline's devices: stages by a schedule, and where their parameters lie."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.objective.means import wide
from shardwise.pipeline import checks, cut
from shardwise.pipeline.moving import Own, Shared, carriers
from shardwise.pipeline.packing import Packing
from shardwise.pipeline.ticking import Ticks, ticks


class Kind(NamedTuple):
    """Stages that run the same program: one of them, its halves, and what these hand on."""

    stage: cut.Stage
    halves: cut.Halves
    kept: list
    pending: list


class Whole:
    """The operations on parameters that the devices of a stage share, where nothing is written out.

    They are whole, or the compiler's. `layouts.shares` has those by hand.
    """

    use: Callable | None = None  # the meaning of `marks.use`

    def received(self, tree: Any) -> Any:
        """The shapes of parameters as the loss receives them."""
        return tree

    def alike(self, i: int) -> Any:
        """What has to be equal of parameters that are carried together."""
        return None

    def gather(self, i: int, x: Any) -> Any:
        """A parameter as tasks find it, once a step."""
        return x

    def scatter(self, i: int, g: Any) -> Any:
        """The sum of a parameter's gradients that tasks have made, in shares, once a step."""
        return g

    def total(self, i: int, g: Any) -> Any:
        """This, added up over the devices that have copies of the parameter."""
        return g

    def enter(self, numbers: list, arrays: list, reads: tuple) -> list:
        """A task's parameters as its program takes them; it reads those at the places `reads`."""
        return arrays

    def leave(self, numbers: list, grads: list) -> list:
        """A task's gradients as they are added to the sums."""
        return grads

    def sum_shape(self, i: int, shape: tuple) -> tuple:
        """The shape of the sum of gradients of a parameter that has this one in a task."""
        return shape

    def by_rows(self, i: int) -> bool:
        """Whether the stage's devices share the parameter's rows, so that a task gathers first."""
        return False

    def all_rows(self, i: int) -> int:
        """The number of the rows of such a parameter."""
        raise NotImplementedError


WHOLE = Whole()


@dataclasses.dataclass(frozen=True)
class Program:
    """The stages of a traced loss by a schedule, for `running.run`.

    `leaves` are the parameters' shapes on a device that has all stages'; `held` tells of each the
    axis along which devices of different stages hold parts between steps (None: each has all).
    Of the data, the leaves in `whole` are the same for all microbatches. `shares` is what tasks do
    with parameters that the devices of one stage share.
    """

    stages: list[cut.Stage]
    schedule: Any
    leaves: list
    held: tuple[int | None, ...]
    whole: frozenset[int]
    axis: str
    shares: Any = WHOLE
    backward: bool = True

    @functools.cached_property
    def ticks(self) -> Ticks:
        """The schedule's table; without `backward`, of its forward tasks."""
        return ticks(self.schedule, self.backward)

    @functools.cached_property
    def passed(self) -> dict[str, Packing]:
        """{"act": what activations lie in on their way round a ring, "cot": their cotangents}."""
        carries = [stage.carry for stage in self.stages[1:]]
        return {"act": Packing(carries), "cot": Packing(map(_inexact, carries))}

    @functools.cached_property
    def left(self) -> dict[str, Packing]:
        """{"kept": what a forward task leaves lies in, "pend": what an I leaves to its W}."""
        kinds = self.kinds[0]
        return {"kept": Packing(k.kept for k in kinds), "pend": Packing(k.pending for k in kinds)}

    @functools.cached_property
    def slots(self) -> dict[str, list[int]]:
        """The number of slots of each buffer: of what kinds leave, as many as theirs that use it.

        The last stage has a microbatch at a time under 1F1B, and so its logits a single slot.
        """
        (kinds, of), table = self.kinds, self.ticks
        found = {name: [table.slots[name]] * len(x.keys) for name, x in self.passed.items()}
        kind_of = np.array(of)[table.columns["stage"]]
        for name, first in (("kept", 1), ("pend", 2)):  # the first of F, I, W that has a slot
            busy, packing = table.columns["kind"] >= first, self.left[name]
            found[name] = [0] * len(packing.keys)
            for number, kind in enumerate(kinds if self.backward else ()):
                own = table.columns[name][busy & (kind_of == number)]
                for at in packing.places(kind.kept if name == "kept" else kind.pending):
                    found[name][at] = max(found[name][at], int(own.max()) + 1)
        return found

    def sends(self) -> dict[str, int]:
        """The bytes that a device sends along the stages in a step, by what is sent.

        `rings`: a tick's activation and cotangent, whether anyone waits for them or not; `sums`: of
        the loss's outputs; `parameters`: those that lie elsewhere than where stages read them,
        before the first tick, and the sums of their gradients after the last.
        """
        n, table = self.schedule.devices, self.ticks
        rings = sum(
            len(table.columns["kind"]) * self.passed[name].nbytes
            for name, offsets in table.rings.items()
            for offset in offsets
            if offset % n
        )
        summed = 2 * sum(self.schedule.microbatches * _nbytes(x) for x in self.stages[-1].outputs)
        moved = 0
        for carrier, i in zip(self.carriers, self.first, strict=True):
            dtype = self.leaves[i].dtype
            moved += carrier.sent(self.leaves, dtype.itemsize)
            if self.backward and is_inexact(self.leaves[i]):
                moved += carrier.sent(self.leaves, wide(dtype).itemsize, back=True)
        return {"rings": rings, "sums": summed * (n - 1) // n, "parameters": moved}

    @functools.cached_property
    def _carried(self) -> tuple[list, dict]:
        every = range(len(self.leaves))
        return carriers(
            self.axis,
            self.schedule.device_of,
            [stage.rows for stage in self.stages],
            self.leaves,
            self.held,
            [self.shares.alike(i) for i in every],
            [self.shares.by_rows(i) for i in every],
        )

    @property
    def carriers(self) -> list[Shared | Own]:
        """The ways of the parameters to where the stages read them."""
        return self._carried[0]

    @property
    def places(self) -> dict[tuple[int, int], tuple[int, int | None]]:
        """{(stage, parameter): (its carrier, the place there; None where all of it is)}."""
        return self._carried[1]

    @functools.cached_property
    def first(self) -> list[int]:
        """A parameter of each carrier."""
        return [c.leaf if isinstance(c, Shared) else c.pieces[0][0] for c in self.carriers]

    @functools.cached_property
    def kinds(self) -> tuple[list[Kind], list[int]]:
        """(the kinds of stages, the kind of each stage)."""
        signatures: dict[Any, int] = {}
        found, of = [], []
        for stage in self.stages:
            number = signatures.setdefault(self._signature(stage), len(signatures))
            of.append(number)
            if number == len(found):
                found.append(self._kind(stage))
        return found, of

    def _signature(self, stage):
        text = str(jax.make_jaxpr(stage.function)(stage.params, stage.inputs, stage.carry))
        text = re.sub(r"stage boundary [\d.]+", "", text)
        found = []
        for i, ends in stage.rows.items():
            carrier, place = self.places[stage.index, i]
            found.append((carrier, ends if place is None else "own"))
        return stage.index == 0, stage.last, tuple(found), stage.data, text

    def _kind(self, stage):
        halves = cut.backward(stage)
        checks.undivided(stage, halves, self.schedule)
        given = stage.params, stage.inputs
        kept = jax.eval_shape(halves.forward, *given, stage.carry)[1]
        cots = [stage.outputs[i] for i in cut.differentiable(stage)]
        pending = jax.eval_shape(halves.to_input, *given, kept, cots)[1]
        return Kind(stage, halves, list(kept), list(pending))

    def there(self, held: list) -> list[list]:
        """What the device's stages read, a list for each carrier, of what the device holds."""
        pairs = zip(self.first, self.carriers, strict=True)
        return [[self.shares.gather(i, x) for x in way.there(held)] for i, way in pairs]

    def back(self, sums: list[list], held: list) -> list:
        """The gradients of what the device holds, of the sums of those of what its stages read."""
        found: list = [None] * len(held)
        for i, way, own in zip(self.first, self.carriers, sums, strict=True):
            if own is not None:
                back = way.back([self.shares.scatter(i, g) for g in own], held)
                for leaf, g in back.items():
                    found[leaf] = g if found[leaf] is None else found[leaf] + g
        return [None if g is None else self.shares.total(i, g) for i, g in enumerate(found)]

    def spots(self, stage: cut.Stage) -> dict[int, tuple[int, list[int]]]:
        """{parameter of a stage: (its carrier, the place there, for each stage of its kind)}."""
        of, found = self.kinds[1], {}
        for position, i in enumerate(stage.rows):
            places = [0] * len(of)
            for s in (s for s in self.stages if of[s.index] == of[stage.index]):
                places[s.index] = self.places[s.index, list(s.rows)[position]][1] or 0
            found[i] = self.places[stage.index, i][0], places
        return found

    def sliced(self, stage: cut.Stage, i: int) -> tuple[int, int] | None:
        """The rows that a stage's task takes of a parameter that it has all of; None for all."""
        return stage.rows[i] if self.places[stage.index, i][1] is None else None


def is_inexact(x: Any) -> bool:
    """Whether an array's dtype has gradients."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _nbytes(x):
    """Of an array as a sum over devices sends it: truth values are counted in int32."""
    return x.size * (4 if x.dtype == jnp.bool_ else x.dtype.itemsize)


def _inexact(shapes):
    return [x for x in shapes if is_inexact(x)]
