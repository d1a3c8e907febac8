"""The chips to compile for, and how mesh axes lie along them; nothing here needs a compiler."""

import dataclasses
import math
import os
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from shardwise import jaxprs, mesh
from shardwise.topology.chip import CHIPS, Chip

_HOST = 2  # chips along the first two axes of a host's board
_PLACED = "annotate_device_placement"  # what XLA knows a memory by
PLATFORMS: Any = weakref.WeakKeyDictionary()  # {program: for which platform it was lowered}
# The variables that say what share of a GPU's memory JAX takes; the second is the older name.
_SHARES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@dataclasses.dataclass(frozen=True)
class Chips:
    """Chips of a `kind` in `slices`, or nodes of GPUs; `shape` counts a slice's chips, no cores, or
    the GPUs of a node: `chips("h100:16x8")` is `Chips("h100", (8,), 16)`.
    """

    kind: str
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def chip(self) -> Chip:
        """The `Chip` of this kind."""
        return CHIPS[self.kind]

    @property
    def number(self) -> int:
        """The number of chips, in all slices."""
        return math.prod(self.shape) * self.slices

    @property
    def devices(self) -> int:
        """The number of JAX devices, which the axes of a mesh multiply to."""
        return self.number * self.chip.devices

    @property
    def groups(self) -> str:
        """What the data centre's network joins, "slices" of TPUs or "nodes" of GPUs."""
        return "nodes" if self.chip.node else "slices"

    @property
    def usable_hbm(self) -> int:
        """The bytes of memory that a program may hold on a device. Of a TPU it is what the compiler
        allows; of a GPU what JAX takes when it starts, the share XLA_CLIENT_MEM_FRACTION (0.75), a
        ValueError if that is no number above 0.
        """
        if self.chip.usable_hbm:
            return self.chip.usable_hbm
        name = next(filter(os.environ.get, _SHARES), "")
        said = os.environ.get(name, "0.75")
        try:
            share = float(said)
        except ValueError:
            share = 0.0
        if 0 < share < math.inf:
            return int(self.chip.hbm_bytes * share)
        told = "the share of a GPU's memory that JAX takes, such as 0.9"
        raise ValueError(f"topology: {name}={said!r}; expected {told}.")

    def __str__(self):
        sizes = (self.slices, *self.shape) if self.chip.node else self.shape
        more = f" × {self.slices} slices" if self.slices > 1 and not self.chip.node else ""
        return f"{self.kind}:{'x'.join(map(str, sizes))}{more}"

    def mesh(self, **axes: int) -> "ChipMesh":
        """A `ChipMesh` of axes along these chips, as in `mesh(fsdp=-1, model=4)`; one size may be
        -1, and the first axes cross between slices or nodes. A ValueError for sizes that do not
        multiply to the number of devices, or axes that borders between slices cut unevenly.
        """
        each = f" of {self.chip.devices} devices each" if self.chip.devices > 1 else ""
        who = f"topology: on {self}, {self.number} chips{each}, mesh"
        return ChipMesh(self, tuple(mesh.resolve(who, axes, self.devices, exactly=True).items()))


@dataclasses.dataclass(frozen=True)
class ChipMesh:
    """A mesh of named axes along `chips` that are not here, to lower for and to compile for."""

    chips: Chips
    axes: tuple[tuple[str, int], ...]

    def __post_init__(self):
        self.across_slices()

    @property
    def shape(self) -> dict[str, int]:
        """A dict from each axis to its size."""
        return dict(self.axes)

    @property
    def abstract(self) -> AbstractMesh:
        """The mesh to write shardings with and to trace for; it has no devices."""
        names, sizes = zip(*self.axes, strict=True)
        return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))

    def lower(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """A jitted function, lowered for these chips with abstract arguments; nothing is allocated.

        `fn` is made by `jax.jit`, or by `rules.jit`, whose mesh is `abstract`:
        `mesh.lower(rules.jit(f, mesh.abstract, in_rules=rule), *shapes)`. Arguments are shapes
        (`jax.ShapeDtypeStruct`). One at least has a sharding over `abstract`, its own or by
        `in_shardings` of `jax.jit` or `in_rules` of `rules.jit` (for none `topology.compile` raises
        a ValueError); the compiler lays out the others. Whether a loss may be divided is not
        judged: `objective.check` does that, on any device.

        Raises:
          TypeError: `fn` is not jitted.
          NotImplementedError: it moves arrays to the host, and this JAX loses that here.
        """
        traced = fn.trace(*args, **kwargs) if hasattr(fn, "trace") else None
        if not isinstance(traced, jax.stages.Traced):  # nnx.jit's has no program to look at
            raise TypeError(
                f"topology: mesh.lower takes a function made by jax.jit or rules.jit, and got "
                f"{type(fn).__name__}, made by {type(fn).__module__}; jit it by one of these; of a "
                f"module, a function of its state."
            )
        found = traced.lower(lowering_platforms=(self.platform,))
        # 0.7.2 does where there is no device to ask.
        if to_host(traced.jaxpr.jaxpr) and _PLACED not in found.as_text():
            raise NotImplementedError(
                f"topology: the program moves arrays to the host, and jax {jax.__version__} leaves "
                f"that out for chips that are not here: its memory would be wrong. Take a later "
                f"one, or a program that does not offload."
            )
        PLATFORMS[found] = self.platform
        return found

    @property
    def platform(self) -> str:
        """JAX's name of the platform, "cuda" or "tpu"."""
        return "cuda" if self.chips.chip.node else "tpu"

    def across_slices(self) -> tuple[int, ...]:
        """A tuple: for each of `axes`, into how many parts borders of slices, or nodes, cut it."""
        chips = self.chips
        return mesh.across_groups("topology", self.shape, chips.slices, chips.groups)


def to_host(jaxpr: Any) -> bool:
    """Whether a traced program moves arrays to the host's memory."""
    put = (eqn for eqn in jaxprs.every(jaxpr) if eqn.primitive.name == "device_put")
    return any("Host" in str(eqn.params["devices"]) for eqn in put)


def chips(name: str, slices: int = 1) -> Chips:
    """The `Chips` of a name: "v5p:4x4x8" is 128 TPUs (which Google calls v5p-256, by cores), and
    "h100:16x8" 16 nodes of 8 GPUs; "h100:4" is four GPUs of one node.

    Kinds are v5e and v6e, in a torus of two axes; v4, v5p and tpu7x, of three; a100, h100, h200 and
    b200, 8 of a node at most; gb200, 72. The first two sizes of a torus are even.

    Raises:
      ValueError: a kind that `CHIPS` lacks; a shape that its torus does not have, or more GPUs of a
        node than NVLink joins; fewer than one slice, or slices of GPUs.
    """
    kind, _, written = name.partition(":")
    who = f"topology.chips({name!r}{f', slices={slices}' if slices != 1 else ''})"
    if kind not in CHIPS:
        raise ValueError(
            f"{who}: the kinds known are {', '.join(CHIPS)}, as in 'v5p:4x4x8' or, in nodes and "
            f"GPUs of each, 'h100:16x8'."
        )
    if slices < 1:
        raise ValueError(f"{who}: give one slice or more.")
    sizes = [*map(int, written.split("x"))] if re.fullmatch(r"\d+(x\d+)*", written) else []
    return (_gpus if CHIPS[kind].node else _tpus)(who, tuple(sizes), CHIPS[kind], slices)


def usual(kind: str, least: int, most: int) -> Iterator[Chips]:
    """From `least` to `most` chips in the shapes that clouds offer, the fewest first: a torus grows
    by its shortest side, then by slices; GPUs within a node, then by nodes.
    """
    chip = CHIPS[kind]
    if chip.node:
        node = 1 << (chip.node.bit_length() - 1)  # of 72, 64: what batches divide by
        every = [Chips(kind, (2**i,)) for i in range(8) if 2**i < node]
        every += [Chips(kind, (node,), 2**i) for i in range(16)]
    else:
        every, shape = [], [2, 2, 1][: chip.dimensions]
        while math.prod(shape) <= chip.largest:
            every.append(Chips(kind, tuple(shape)))
            shape[max(range(len(shape)), key=lambda i: (-shape[i], i))] *= 2
        every += [dataclasses.replace(every[-1], slices=2**i) for i in range(1, 8)]
    return (c for c in every if least <= c.number <= most)


def _gpus(who, sizes, chip, slices):
    nodes, each = (1, *sizes)[-2:] if len(sizes) in (1, 2) else (0, 0)
    if slices > 1 or nodes < 1 or not 0 < each <= chip.node:
        raise ValueError(
            f"{who}: NVLink joins the {chip.node} GPUs of a node of {chip.kind}; write nodes and "
            f"GPUs of each, as in '{chip.kind}:16x{chip.node}', or up to {chip.node} of one node, "
            f"as in '{chip.kind}:4'."
        )
    return Chips(chip.kind, (each,), nodes)


def _tpus(who, sizes, chip, slices):
    example = " or ".join("x".join([side] * chip.dimensions) for side in "24")
    if len(sizes) != chip.dimensions:
        told = (
            f"a {chip.kind} lies in a torus of {chip.dimensions} axes; write its chips along each"
        )
    elif 0 in sizes or any(size % _HOST for size in sizes[:2]):
        told = f"hosts have {_HOST}×{_HOST} chips, so that the first two sizes are even"
    elif (number := math.prod(sizes)) > chip.largest:
        most = f"a slice of {chip.kind} has {chip.largest} at most"
        told = f"{number} chips; {most}: give a smaller shape, and slices="
    else:
        return Chips(chip.kind, sizes, slices)
    raise ValueError(f"{who}: {told}, as in {example}.")
