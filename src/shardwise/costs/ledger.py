"""Ring bytes that a device sends in a step, added up: along axes of a mesh, and for what."""

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

WIDE = 4  # bytes of the float32 in which sums travel


class Sent(NamedTuple):
    """The ring bytes along `roles`, or mesh axes, together, in a step.

    `kind` is "weights" (gathers, and scatters of gradients), "gradients" (sums of what devices have
    copies of), "attention", "activations" (of tensor), "tokens" (to experts), "stages", or "loss"
    and "counts" (a few numbers).
    """

    roles: tuple[str, ...]
    kind: str
    bytes: float


class Ledger(dict[tuple[tuple[str, ...], str], float]):
    """{(axes, kind as in `Sent`): bytes}, of a mesh whose axes have these `sizes`, in its order."""

    def __init__(self, sizes: Mapping[str, int]):
        super().__init__()
        self.sizes = sizes

    def add(self, kind: str, axes: Collection[str], size: float) -> None:
        """Count this many bytes along these axes together."""
        if size:
            key = tuple(sorted(axes, key=list(self.sizes).index)), kind
            self[key] = self.get(key, 0) + size

    def gather(self, kind: str, axes: Collection[str], size: float) -> None:
        """Count a gather, or a scatter, of this many bytes, whole, along axes together."""
        n = math.prod(self.sizes[name] for name in axes)
        self.add(kind, axes, size * (n - 1) / n)

    def sum(self, kind: str, axes: Collection[str], size: float) -> None:
        """Count a sum of this many bytes: a scatter and a gather."""
        self.gather(kind, axes, 2 * size)

    def weights(
        self, axes: Collection[str], elements: int, used: int, reduced: int, passes: tuple[int, int]
    ) -> None:
        """Count `passes`, (gathers, scatters), of an array that has so many elements when gathered:
        in the bytes of an element as `used`, and of its gradient as `reduced`.
        """
        gathers, scatters = passes
        self.gather("weights", axes, elements * (gathers * used + scatters * reduced))

    def loss(self, axes: Collection[str], staged: bool) -> None:
        """Count sums of the loss's total and count; of stages the count's before backward too."""
        self.sum("loss", axes, (3 if staged else 2) * WIDE)

    def attention(self, axes: Collection[str], one: Any, layers: int, again: bool) -> None:
        """Count attention of so many `layers`, in all microbatches; `one` is what `bytes_sent` says
        of one. Done `again` with remat, it sends what its forward pass does once more.
        """
        self.add("attention", axes, layers * (one.forward * (1 + again) + one.backward))

    def pipeline(self, axes: Collection[str], passed: float, summed: float) -> None:
        """Count what is `passed` on along stages, and sums of so many bytes, the loss's outputs."""
        self.add("stages", axes, passed)
        self.sum("stages", axes, summed)

    @property
    def sent(self) -> tuple[Sent, ...]:
        """Each `Sent`, in the order in which they were counted."""
        return tuple(Sent(*key, size) for key, size in self.items())

    @property
    def along(self) -> dict[tuple[str, ...], float]:
        """A dict from axes to the bytes along them, of all kinds, in the order of the mesh."""
        found: dict[tuple[str, ...], float] = {}
        place = list(self.sizes).index
        for axes, kind in sorted(self, key=lambda key: [*map(place, key[0])]):
            found[axes] = found.get(axes, 0) + self[axes, kind]
        return found


def passes(zero: int, microbatches: int, again: bool) -> tuple[int, int]:
    """(gathers, scatters of its gradient) of a parameter that ZeRO cuts, in a step: with ZeRO 3 the
    first for each microbatch, twice if its layer is done `again`; with ZeRO 1 the second once.
    """
    return (1 + again) * microbatches if zero == 3 else 1, 1 if zero == 1 else microbatches
