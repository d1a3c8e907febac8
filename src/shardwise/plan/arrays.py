"""A model's parameters and its optimizer's state, as plain numbers; a device's part of each."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from shardwise import train
from shardwise import tree as trees
from shardwise.model import Config, Decoder
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
