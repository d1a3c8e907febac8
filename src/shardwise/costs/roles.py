"""The sizes of a layout's roles, as plain numbers."""

import dataclasses
import functools
from collections.abc import Mapping

# From the links that carry least to those that carry most.
ORDER = ("stage", "data", "fsdp", "expert", "context", "tensor")


@dataclasses.dataclass(frozen=True)
class Roles:
    """The number of devices of each role of a layout; these multiply to that of all devices.

    `expert` is an axis of its own, along which all but the experts is whole. With tensor the
    sequence is cut between its products. `remat` says whether a layer is recomputed in the backward
    pass, from what enters it; `products`, whether what its weights were multiplied to is kept and
    the rest recomputed; `offload`, whether what enters waits on the host meanwhile.
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

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """A dict of the number of devices of each role above 1, in the order of the mesh."""
        return {role: n for role in ORDER if (n := getattr(self, role)) > 1}

    @property
    def axes(self) -> dict[str, int]:
        """The axes of the layout's mesh, one for each role above 1, by its name; one at least."""
        return self.sizes or {"data": 1}

    @property
    def rows(self) -> int:
        """The number of parts into which devices cut the rows of the batch."""
        return self.data * self.fsdp * self.expert

    def has(self, sizes: Mapping[str, int]) -> bool:
        """Whether each of these roles has so many devices."""
        return all(getattr(self, role) == n for role, n in sizes.items())

    def __str__(self):
        told = " × ".join(f"{role} {n}" for role, n in self.sizes.items()) or "one device"
        told += f", {self.microbatches} microbatches" if self.microbatches > 1 else ""
        told += ", remat" if self.remat else ""
        told += ", products kept" if self.products else ""
        return told + (", offload" if self.offload else "")
