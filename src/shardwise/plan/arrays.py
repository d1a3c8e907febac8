"""A model's parameters and its optimizer's state, as plain numbers; a device's part of each, and
a stage's.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from shardwise import train
from shardwise import tree as trees
from shardwise.model import Config, Decoder
from shardwise.plan.roles import Roles
from shardwise.rules.fsdp import dividing

# What `layouts.Layout` cuts over the tensor axis, and over the expert axis.
TENSOR, EXPERT = ("heads", "kv_heads", "mlp", "vocab"), "experts"


class Array(NamedTuple):
    """An array of a model, with the names of its logical axes, None for an axis that has none."""

    path: str
    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    stacked: bool
    itemsize: int

    @property
    def is_expert(self) -> bool:
        return EXPERT in self.names

    @property
    def is_cut(self) -> bool:
        """Whether the tensor axis cuts the array."""
        return bool({*TENSOR} & {*self.names})

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity: it is asked for often
class Arrays:
    """A model's parameters, and the state that an optimizer keeps for them.

    An array of the state that has its parameter's shape has the parameter's path too.
    """

    parameters: tuple[Array, ...]
    state: tuple[Array, ...]


def of(shapes: Any, tx: Any) -> Arrays:
    """The `Arrays` of a pytree of arrays or `ShapeDtypeStruct`, by the names its leaves carry."""
    parameters = tuple(_parameter(*walked) for walked in trees.walk(shapes))
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
    state = jax.eval_shape(tx.init, plain)
    owners, found = trees.owners(state, plain), []
    for (path, x), owner in zip(trees.leaves(state), owners, strict=True):
        like = parameters[owner.index] if owner else None
        if like is None or owner.shape != x.shape:
            stacked = bool(like and like.stacked and owner.axes and owner.axes[0] == 0)
            like = Array(path, x.shape, (None,) * x.ndim, stacked, 0)
        found.append(like._replace(itemsize=x.dtype.itemsize))
    return Arrays(parameters, tuple(found))


def _parameter(keys, x, box):
    axes, rank = trees.axis_names(box), len(x.shape)
    named = axes is not None and (len(axes) < rank or axes[:1] == (trees.LAYERS,))
    names = (*[None] * (rank - len(axes or ())), *(axes or ()))
    return Array("/".join(keys), x.shape, names, named, jnp.dtype(x.dtype).itemsize)


@functools.lru_cache(maxsize=64)
def of_decoder(config: Config, optimizer: Callable[[], Any] = train.optimizer) -> Arrays:
    """The `Arrays` of `model.Decoder`, with AdamW by default."""
    shapes = nnx.state(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    return of(shapes, optimizer())


class Share(NamedTuple):
    """A device's part of an array: how many elements, and whether fsdp cuts it."""

    elements: int
    is_gathered: bool


Shares = tuple[tuple[Array, Share], ...]


@functools.lru_cache(maxsize=4096)
def shares(held: Arrays, fsdp: int, tensor: int, expert: int) -> tuple[Shares, Shares]:
    """(the parameters, the optimizer's state): each array with a device's part of it."""
    cut = fsdp, tensor, expert
    parameters = tuple((array, share(array, *cut)) for array in held.parameters)
    return parameters, tuple((array, share(array, *cut)) for array in held.state)


def share(array: Array, fsdp: int, tensor: int, expert: int) -> Share:
    """A device's part of an array as `layouts` cuts it: along fsdp, if an axis is left for it."""
    taken = {*(TENSOR if tensor > 1 else ()), *((EXPERT,) if expert > 1 else ())}
    parts = math.prod(
        (tensor if name in TENSOR else expert) for name in array.names if name in taken
    )
    free = [i for i, name in enumerate(array.names) if name not in taken and i >= array.stacked]
    is_cut = fsdp > 1 and array.size > 1 and bool(dividing(array.shape, free, fsdp))
    return Share(array.size // (parts * (fsdp if is_cut else 1)), is_cut)


@dataclasses.dataclass(frozen=True)
class Part:
    """A stage of a layout, or all of a layout without stages; tokens are those of a microbatch."""

    config: Config
    arrays: Arrays
    roles: Roles
    stage: int
    rows: int  # of a microbatch, on a device
    sequence: int  # of the whole row

    @property
    def layers(self) -> int:
        return self.config.layers // self.roles.stage

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.roles.stage - 1

    @property
    def tokens(self) -> int:
        """The tokens of a microbatch on a device, before the tensor axis cuts them."""
        return self.rows * self.sequence // self.roles.context

    @property
    def live(self) -> int:
        """The number of microbatches whose activations are kept at once, by the schedule 1f1b."""
        return min(self.roles.microbatches, self.roles.stage - self.stage)

    def has(self, array: Array) -> bool:
        """Whether the stage reads a parameter."""
        if array.stacked:
            return True
        first = array.path.startswith("embed") or not array.shape
        return self.is_first if first else self.is_last

    def held(self, state: bool = False) -> Iterator[tuple[Array, int, bool]]:
        """(parameter, a device's elements of the stage's part, whether fsdp cuts it).

        With `state`, arrays of the optimizer's state; its counters are on the first stage.
        """
        r = self.roles
        for array, share in shares(self.arrays, r.fsdp, r.tensor, r.expert)[state]:
            if self.has(array):
                layers = r.stage if array.stacked else 1
                yield array, share.elements // layers, share.is_gathered


def parts(
    roles: Roles, config: Config, arrays: Arrays, batch: int, sequence: int
) -> tuple[Part, ...]:
    """The stages that differ: the first, the last, and the one before it for those between."""
    rows = batch // roles.rows // roles.microbatches
    stages = sorted({0, max(0, roles.stage - 2), roles.stage - 1})
    return tuple(Part(config, arrays, roles, stage, rows, sequence) for stage in stages)
