"""A layout's roles, a model's parameters and its optimizer's state, as plain numbers."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp

from shardwise import tree as trees
from shardwise.layers import spans
from shardwise.model import Config
from shardwise.rules.kinds import dividing

# From the links that carry least to those that carry most.
ORDER = ("stage", "data", "fsdp", "expert", "context", "tensor")


@dataclasses.dataclass(frozen=True)
class Roles:
    """The number of devices of each role of a layout; these multiply to that of all devices.

    `grid = mesh.make(**roles.axes)` is their mesh, with an axis named after each role. A layout is
    `layouts.Layout(grid, fsdp="fsdp", ...)`, with each axis of `roles.axes` for its role, with
    `microbatches`, `sequence=True` with tensor, `attention="zigzag"` with context. For a decoder,
    `plan.text` has that of the best in full, as "code". `stage` and `loss_chunks` go into
    `model.Config`, as `stages` and `loss_chunks`. As a text they have all but `loss_chunks`.

    `expert` is an axis of its own, along which all but the experts is whole. With `remat` a layer
    is recomputed in the backward pass from what enters it, so that the layout's `remat=` is
    `jax.checkpoint_policies.nothing_saveable`. With `products` too, the results of products with
    its weights are kept: `dots_with_no_batch_dims_saveable`. With `offload` instead, what enters
    waits on the host meanwhile: `layouts.offload`.
    """

    stage: int = 1
    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    microbatches: int = 1
    remat: bool = False
    offload: bool = False
    products: bool = False
    loss_chunks: int = 1

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """A dict from each role above 1 to its number of devices, in the order of the mesh."""
        return {role: n for role in ORDER if (n := getattr(self, role)) > 1}

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the mesh's axes by role, as in `sizes`; {"data": 1} for one device."""
        return self.sizes or {"data": 1}

    @property
    def rows(self) -> int:
        """The number of parts into which devices cut the rows of the batch."""
        return self.data * self.fsdp * self.expert

    def has(self, sizes: Mapping[str, int]) -> bool:
        """Whether roles have the numbers of devices in `sizes`, {role: number}."""
        return all(getattr(self, role) == n for role, n in sizes.items())

    def __str__(self):
        told = " × ".join(f"{role} {n}" for role, n in self.sizes.items()) or "one device"
        told += f", {self.microbatches} microbatches" if self.microbatches > 1 else ""
        told += ", remat" if self.remat else ""
        told += ", products kept" if self.products else ""
        return told + (", offload" if self.offload else "")


# What `layouts.Layout` cuts over the tensor axis, and over the expert axis.
TENSOR, EXPERT = ("heads", "kv_heads", "mlp", "vocab"), "experts"


class Array(NamedTuple):
    """An array of a model, with the names of its logical axes, None for an axis that has none."""

    path: str
    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    itemsize: int

    @property
    def stacked(self) -> bool:
        """Whether the first axis is one of layers."""
        return self.names[:1] == (trees.LAYERS,)

    @property
    def is_embedding(self) -> bool:
        return self.path.startswith("embed")

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity: it is asked for often
class Arrays:
    """A model's parameters and its optimizer's state, with parameters' paths where shapes agree."""

    parameters: tuple[Array, ...]
    state: tuple[Array, ...]


class Share(NamedTuple):
    """A device's `elements` of an array, into how many parts fsdp and stages cut it, and along
    which axis stages do, None if they do not.
    """

    array: Array
    elements: int
    fsdp: int
    stages: int
    along: int | None


@functools.lru_cache(maxsize=4096)
def _shares(arrays, roles, state):
    return tuple(_share(array, roles) for array in (arrays.state if state else arrays.parameters))


def _share(array, r):
    """A device's part of an array as `layouts` cuts it: stages take the first axis that divides,
    that of layers where there is one, and fsdp another; if none is left that divides, the same.
    """
    over, axes = dict.fromkeys(TENSOR, r.tensor) | {EXPERT: r.expert}, range(len(array.shape))
    staged = dividing(array.shape, axes, r.stage) if r.stage > 1 and len(axes) > 1 else []
    if array.stacked and 0 not in staged:
        staged = [i for i in staged if over.get(array.names[i], 1) == 1]
    parts = {i: over.get(array.names[i], 1) for i in axes if i not in staged[:1]}
    free = [i for i, n in parts.items() if n == 1 and i >= array.stacked]
    stages, along = (r.stage, staged[0]) if staged else (1, None)
    shared = [i for i in staged[:1] if i >= array.stacked]
    divides = dividing(array.shape, free, r.fsdp) or dividing(array.shape, shared, r.fsdp * stages)
    fsdp = r.fsdp if array.size > 1 and divides else 1
    elements = array.size // (math.prod(parts.values()) * fsdp * stages)
    return Share(array, elements, fsdp, stages, along)


@dataclasses.dataclass(frozen=True)
class Part:
    """A stage of a layout, or all of a layout without stages; tokens are those of a microbatch."""

    config: Config
    arrays: Arrays
    roles: Roles
    stage: int
    rows: int  # of a microbatch, on a device
    sequence: int  # of the whole row
    span: tuple[int, int]  # of layers
    packed: bool = False  # several documents in a row

    @property
    def layers(self) -> int:
        return self.span[1] - self.span[0]

    @functools.cached_property
    def stacks(self) -> tuple["Part", ...]:
        """The part of each stack of equal layers that it has: of the dense ones, and of others."""
        if not self.config.dense_layers:
            return (self,)
        n, of = self.config.dense_layers, self.config.stacks
        own = [_within(self.span, *ends) for ends in ((0, n), (n, self.config.layers))]
        pairs = zip(of, own, strict=True)
        return tuple(dataclasses.replace(self, config=c, span=x) for c, x in pairs if x[0] < x[1])

    @functools.cached_property
    def kinds(self) -> list["Part"]:
        """Of all stages' stacks those that differ in layers or their number, each of the first
        stage that has it.
        """
        own, found = spans(self.config.layers, self.roles.stage), {}
        n = self.config.dense_layers
        for stage, span in enumerate(own):
            found.setdefault((span[1] - span[0], min(n, span[0]), min(n, span[1])), (stage, span))
        parts = (dataclasses.replace(self, stage=s, span=span) for s, span in found.values())
        each = (stack for part in parts for stack in part.stacks)
        return [*{(x.config, x.layers): x for x in reversed([*each])}.values()]

    @property
    def routed(self) -> int:
        """The number of layers with experts."""
        return sum(s.layers for s in self.stacks if s.config.experts)

    @functools.cached_property
    def itemsize(self) -> int:
        """The bytes of an activation's element."""
        return jnp.dtype(self.config.dtype).itemsize

    @property
    def is_last(self) -> bool:
        return self.stage == self.roles.stage - 1

    @property
    def tokens(self) -> int:
        """The tokens of a microbatch on a device, before the tensor axis cuts them."""
        return self.rows * self.sequence // self.roles.context

    def reads(self, array: Array) -> bool:
        """Whether the stage reads a parameter."""
        begins = self.stage == 0 and array.is_embedding
        return array.stacked or begins or (self.is_last and self.ends(array))

    def ends(self, array: Array) -> bool:
        """Whether the end of the model reads a parameter that is in no layer."""
        return self.config.tied or not array.is_embedding

    def layers_of(self, array: Array) -> tuple[tuple[int, int], ...]:
        """Of an array of layers the (first, end) of those that each stage has."""
        first = 0 if array.path.startswith("dense") else self.config.dense_layers
        return _layers(first, array.shape[0], self.config.layers, self.roles.stage)

    def is_in_place(self, share: Share) -> bool:
        """Whether each stage holds the layers of an array that it reads."""
        rows = self.layers_of(share.array)
        return share.along == 0 and rows == spans(share.array.shape[0], self.roles.stage)

    def carried(self, share: Share) -> int:
        """The elements of a share that a device has in a step, which all run one program: of layers
        the most of any stage.
        """
        whole, array = share.elements * share.stages, share.array
        if not array.stacked:
            return whole
        return whole * _most(self.layers_of(array)) // array.shape[0]

    def used(self, share: Share) -> int:
        """The elements of a share in a step: of layers the stage's own; of others, which stages
        gather before the first tick, all.
        """
        whole, array = share.elements * share.stages, share.array
        if not array.stacked or self.roles.stage == 1:
            return whole
        first, end = self.layers_of(array)[self.stage]
        return whole * (end - first) // array.shape[0]

    def whole(self, share: Share) -> int:
        """The elements of a share where it is read, gathered over fsdp."""
        return self.used(share) * share.fsdp

    def held(self, state: bool = False) -> tuple[Share, ...]:
        """The `Share` of each parameter, or with `state` of each array of the optimizer's state."""
        r = self.roles
        sizes = Roles(stage=r.stage, fsdp=r.fsdp, expert=r.expert, tensor=r.tensor)
        return _shares(self.arrays, sizes, state)


def parts(
    roles: Roles,
    config: Config,
    arrays: Arrays,
    batch: int,
    sequence: int,
    packed: bool = False,
) -> tuple[Part, ...]:
    """The stages that differ: the first, the last, and of those between one with most layers."""
    rows, own = batch // roles.rows // roles.microbatches, spans(config.layers, roles.stage)
    between = reversed(range(1, roles.stage - 1))
    stages = {0, roles.stage - 1, max(between, key=lambda s: own[s][1] - own[s][0], default=0)}
    return tuple(
        Part(config, arrays, roles, s, rows, sequence, own[s], packed) for s in sorted(stages)
    )


@functools.cache
def _layers(first, rows, layers, stages):
    found = (_within(span, first, first + rows) for span in spans(layers, stages))
    return tuple((a - first, b - first) for a, b in found)


@functools.cache
def _most(rows):
    return max(end - first for first, end in rows)


def _within(span, first, end):
    """The part of a span between two ends; empty where it lies outside."""
    a, b = max(span[0], first), min(span[1], end)
    return a, max(a, b)
