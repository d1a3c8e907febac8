"""The chips to compile for, and how mesh axes are laid along them; nothing here needs libtpu."""

import dataclasses
import math
import re

from jax.sharding import AbstractMesh, AxisType

from shardwise.topology.chip import CHIPS, Chip

_HOST = 2  # chips along the first two axes of a host's board


@dataclasses.dataclass(frozen=True)
class Chips:
    """Slices of one kind and shape; `shape` counts chips, never cores."""

    kind: str
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]

    @property
    def number(self) -> int:
        """The number of chips, in all slices."""
        return math.prod(self.shape) * self.slices

    @property
    def devices(self) -> int:
        """The number of JAX devices, which the axes of a mesh multiply to."""
        return self.number * self.chip.devices

    def __str__(self):
        shape = "x".join(map(str, self.shape))
        return f"{self.kind}:{shape}" + (f" × {self.slices} slices" if self.slices > 1 else "")

    def mesh(self, **axes: int) -> "ChipMesh":
        """The axes along these chips, in order: `mesh(fsdp=-1, model=4)`; one size may be -1.

        Slices are outermost: the first axes cross between them.

        Raises:
          ValueError: sizes that do not multiply to the number of devices, or that slices cut.
        """
        return ChipMesh(self, tuple(_sizes(self, axes).items()))


@dataclasses.dataclass(frozen=True)
class ChipMesh:
    """Named axes along `chips`: what `topology.compile` lays out, and what to trace for."""

    chips: Chips
    axes: tuple[tuple[str, int], ...]

    def __post_init__(self):
        self.across_slices()

    @property
    def shape(self) -> dict[str, int]:
        return dict(self.axes)

    @property
    def abstract(self) -> AbstractMesh:
        """The mesh to write shardings with and to trace for; it has no devices."""
        sizes = tuple(self.shape.values())
        return AbstractMesh(sizes, tuple(self.shape), axis_types=(AxisType.Auto,) * len(sizes))

    def across_slices(self) -> tuple[int, ...]:
        """The number of parts into which borders between slices cut each axis."""
        parts, rest = [], self.chips.slices
        for name, size in self.axes:
            part = math.gcd(rest, size)
            if part not in (rest, size):
                raise ValueError(
                    f"topology: the axis {name!r} of size {size} lies along {rest} slices, which "
                    f"cut it unevenly; make it a multiple of {rest}, or a divisor with the rest "
                    f"in the next axis."
                )
            parts.append(part)
            rest //= part
        return tuple(parts)


def chips(name: str, slices: int = 1) -> Chips:
    """The chips of a name such as "v5p:4x4x8": 128 chips (which Google calls v5p-256, by cores).

    Raises:
      ValueError: a kind that is unknown, or that no compiler is known for; a shape that its torus
        does not have; fewer than one slice.
    """
    kind, _, written = name.partition(":")
    known = {k: chip for k, chip in CHIPS.items() if chip.dimensions}
    if kind not in known:
        arithmetic = f"{kind} is in topology.CHIPS for arithmetic only; " if kind in CHIPS else ""
        raise ValueError(
            f"topology.chips({name!r}): {arithmetic}the kinds that can be compiled for are "
            f"{', '.join(known)}, as in 'v5p:4x4x8'."
        )
    if slices < 1:
        raise ValueError(f"topology.chips({name!r}, slices={slices}): give one slice or more.")
    return Chips(kind, _shape(name, written, known[kind]), slices)


def _shape(name, written, chip):
    example = "x".join(["2"] * chip.dimensions) + " or " + "x".join(["4"] * chip.dimensions)
    if not re.fullmatch(r"\d+(x\d+)*", written) or written.count("x") + 1 != chip.dimensions:
        raise ValueError(
            f"topology.chips({name!r}): a {chip.kind} lies in a torus of {chip.dimensions} axes; "
            f"write its chips along each, as {example}."
        )
    shape = tuple(map(int, written.split("x")))
    if any(size < 1 for size in shape) or any(size % _HOST for size in shape[:2]):
        raise ValueError(
            f"topology.chips({name!r}): hosts have {_HOST}×{_HOST} chips, so that the first two "
            f"sizes are even, as in {example}."
        )
    if math.prod(shape) > chip.largest:
        raise ValueError(
            f"topology.chips({name!r}) are {math.prod(shape)} chips; a slice of {chip.kind} has "
            f"{chip.largest} at most: give a smaller shape, and slices=."
        )
    return shape


def _sizes(chips, axes):
    asked = ", ".join(f"{name}={size}" for name, size in axes.items())
    free = [name for name, size in axes.items() if size == -1]
    known = math.prod(size for size in axes.values() if size != -1)
    wrong = any(size < 1 and size != -1 for size in axes.values()) or len(free) > 1
    if (
        not axes
        or wrong
        or known < 1
        or chips.devices % known
        or not (free or known == chips.devices)
    ):
        per_chip = f", {chips.chip.devices} devices each" if chips.chip.devices > 1 else ""
        raise ValueError(
            f"topology: mesh({asked}) on {chips}: {chips.number} chips{per_chip}, so the sizes "
            f"have to be positive (one may be -1) and multiply to {chips.devices}, not {known}."
        )
    return {name: chips.devices // known if size == -1 else size for name, size in axes.items()}
