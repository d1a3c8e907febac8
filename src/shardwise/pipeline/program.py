"""The program of a pipeline's devices: stages by a schedule, and where their parameters lie."""

import collections
import dataclasses
import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.objective.means import wide
from shardwise.pipeline import cut
from shardwise.pipeline.cut.parts import inexact
from shardwise.pipeline.moving import Carrier, Place, back, carriers
from shardwise.pipeline.ticking import Ticks, ticks


class Whole:
    """The operations on parameters that the devices of a stage share, where nothing is written out.

    They are whole, or the compiler's. `layouts.gradients` has those by hand.
    """

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

    def rows(self, i: int) -> int | None:
        """The number of a parameter's rows, if devices share them, so that a task gathers first."""
        return None


WHOLE = Whole()


class Buffers:
    """Slots for any one of several lists of arrays, of each list so many.

    Arrays of one shape and dtype lie in the same buffers: of `keys`, with so many `slots`.
    """

    def __init__(self, lists: Sequence[Sequence[Any]], slots: Sequence[int]):
        most: collections.Counter = collections.Counter()
        for arrays in lists:
            most |= collections.Counter(map(_key, arrays))
        self.keys = sorted(most.elements(), key=str)
        self.slots = [0] * len(self.keys)
        for arrays, n in zip(lists, slots, strict=True):
            for i in self.places(arrays):
                self.slots[i] = max(self.slots[i], int(n))

    @property
    def sizes(self) -> list[int]:
        """The bytes of one slot of each buffer."""
        return [math.prod(shape) * dtype.itemsize for shape, dtype in self.keys]

    def zeros(self) -> list[jax.Array]:
        """All slots of each buffer."""
        pairs = zip(self.slots, self.keys, strict=True)
        return [jnp.zeros((n, *shape), dtype) for n, (shape, dtype) in pairs]

    def pack(self, arrays: Sequence[Any] = ()) -> list[jax.Array]:
        """One array for each buffer; zeros where the list has none."""
        found = [jnp.zeros(shape, dtype) for shape, dtype in self.keys]
        for i, x in zip(self.places(arrays), arrays, strict=True):
            found[i] = x
        return found

    def write(self, buffers: Sequence[Any], slot: Any, arrays: Sequence[Any]) -> list[Any]:
        """The buffers, [slots, ...] each, in one slot of which the list's arrays lie now."""
        found = list(buffers)
        for i, x in zip(self.places(arrays), arrays, strict=True):
            found[i] = put(found[i], slot, x)
        return found

    def read(self, buffers: Sequence[Any], slot: Any, like: Sequence[Any]) -> list[Any]:
        """The arrays of a list of these shapes in one of the slots."""
        return [at(buffers[i], slot) for i in self.places(like)]

    def places(self, arrays: Sequence[Any]) -> list[int]:
        """The numbers of the buffers in which a list's arrays lie."""
        seen: collections.Counter = collections.Counter()
        found = []
        for key in map(_key, arrays):
            found.append(self.keys.index(key) + seen[key])
            seen[key] += 1
        return found


@dataclasses.dataclass
class Program:
    """The stages of a traced loss by a schedule, for `running.Run`.

    `leaves` are the parameters' shapes on a device that has all stages'; `held` tells of each the
    axis along which devices of different stages hold parts between steps (None: each has all).
    Of the data, the leaves in `whole` are the same for all microbatches.
    """

    stages: list[cut.Stage]
    schedule: Any
    leaves: list
    held: tuple[int | None, ...]
    whole: frozenset[int]
    axis: str
    shares: Any = WHOLE
    backward: bool = True
    ticks: Ticks = dataclasses.field(init=False)  # without `backward`, of forward tasks
    carriers: list[Carrier] = dataclasses.field(init=False)
    places: list[list[Place]] = dataclasses.field(init=False)  # of each stage's parameters

    def __post_init__(self):
        self.ticks = ticks(self.schedule, self.backward)
        read = [stage.rows for stage in self.stages]
        given = self.axis, self.schedule.device_of, read, self.leaves, self.held, self.shares
        self.carriers, self.places = carriers(*given)

    @functools.cached_property
    def buffers(self) -> dict[str, Buffers]:
        """What activations ("act") and cotangents ("cot") lie in that came round a ring, what a
        forward task leaves ("kept"), what an I leaves to its W ("pend").

        Of what kinds of stages leave, each buffer has as many slots as those that use it need: the
        last stage has a microbatch at a time under 1F1B, and so its logits a single slot.
        """
        (kinds, of), (columns, slots, _) = self.kinds, self.ticks
        of_task, kinds = np.array(of)[columns["stage"]], kinds if self.backward else []
        lists = {"act": [stage.carry for stage in self.stages[1:]]}
        lists["cot"] = [[x for x in carry if inexact(x)] for carry in lists["act"] if kinds]
        lists |= {"kept": [k.kept for k in kinds], "pend": [k.pending for k in kinds]}
        most = {name: [slots[name]] * len(lists[name]) for name in ("act", "cot")}
        for name in ("kept", "pend"):
            most[name] = [columns[name][of_task == k].max() + 1 for k in range(len(kinds))]
        return {name: Buffers(lists[name], most[name]) for name in lists}

    def sends(self) -> tuple[float, float]:
        """(bytes that a device passes on along stages in a step: at each tick, whether anyone waits
        or not, and of parameters that lie elsewhere than they are read; bytes that are summed).
        """
        offsets = {name: len({*ways} - {0}) for name, ways in self.ticks.rings.items()}
        outputs = self.stages[-1].outputs  # of which truth values are summed in int32
        summed = sum(x.size * max(x.dtype.itemsize, 4 * (x.dtype == bool)) for x in outputs)
        passed = sum(n * sum(self.buffers[name].sizes) for name, n in offsets.items())
        moved = len(self.ticks.columns["kind"]) * passed
        for carrier in self.carriers:
            dtype = self.leaves[carrier.leaf].dtype
            moved += carrier.sent(self.leaves, dtype.itemsize)
            if self.backward:
                moved += carrier.sent(self.leaves, wide(dtype).itemsize, back=True)
        return moved, summed * self.schedule.microbatches

    @functools.cached_property
    def kinds(self) -> tuple[list[cut.Halves], list[int]]:
        """(one of each kind of stages, which run the same program; the kind of each stage)."""
        splits = any(task.kind == "I" for order in self.schedule.tasks for task in order)
        signatures: dict[Any, int] = {}
        found, of = [], []
        for stage in self.stages:
            number = signatures.setdefault(self._signature(stage), len(signatures))
            of.append(number)
            if number == len(found):
                found.append(cut.backward(stage))
                if splits and (names := ", ".join(found[-1].undivided)):
                    warnings.warn(
                        f"pipeline: stage {stage.index}: {names} yields both what the stage before "
                        f"waits for and gradients of weights; all of it runs in I.",
                        stacklevel=2,
                    )
        return found, of

    def _signature(self, stage):
        text = str(jax.make_jaxpr(stage.function)(stage.params, stage.inputs, stage.carry))
        carried = tuple((carrier, ends) for carrier, _, ends in self.places[stage.index])
        return stage.index == 0, stage.last, carried, stage.data, text

    def there(self, held: list) -> list[list]:
        """What the device's stages read, for each carrier, of what the device holds."""
        return [[self.shares.gather(c.leaf, x) for x in c.there(held)] for c in self.carriers]

    def back(self, sums: list[list], held: list) -> list:
        """The gradients of what the device holds, of the sums of those of what its stages read."""
        pairs = zip(self.carriers, sums, strict=True)
        sums = [[self.shares.scatter(c.leaf, g) for g in own] for c, own in pairs]
        grads = back(self.carriers, sums, held)
        return [self.shares.total(i, g) for i, g in enumerate(grads)]


def at(x: Any, j: Any) -> Any:
    """Row `j` of an array."""
    return jax.lax.dynamic_index_in_dim(x, j, 0, keepdims=False)


def put(x: Any, j: Any, row: Any) -> Any:
    """The array with another row `j`."""
    return jax.lax.dynamic_update_index_in_dim(x, row.astype(x.dtype), j, 0)


def _key(x):
    return x.shape, x.dtype
