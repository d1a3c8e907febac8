"""What one stage has of a model: which layers, and how many of a device's tokens go through it."""

import dataclasses

from shardwise.model import Config
from shardwise.plan.arrays import Array, Arrays, share
from shardwise.plan.roles import Roles


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
        """Of a microbatch on a device, before the tensor axis cuts them."""
        return self.rows * self.sequence // self.roles.context

    @property
    def live(self) -> int:
        """Microbatches whose activations are kept at once, by the schedule 1f1b."""
        return min(self.roles.microbatches, self.roles.stage - self.stage)

    def has(self, array: Array) -> bool:
        """Whether the stage reads a parameter."""
        if array.stacked:
            return True
        return self.is_first if array.path.startswith("embed") else self.is_last

    def elements(self, array: Array) -> int:
        """Those of the stage's parameter, or of what is kept as it, on a device."""
        r = self.roles
        whole = share(array, r.fsdp, r.tensor, r.expert).elements
        return whole // (r.stage if array.stacked else 1)

    def is_gathered(self, array: Array) -> bool:
        return share(array, self.roles.fsdp, self.roles.tensor, self.roles.expert).is_gathered


def parts(
    roles: Roles, config: Config, arrays: Arrays, batch: int, sequence: int
) -> tuple[Part, ...]:
    """The stages that differ: the first, the last, and the one before it for those between."""
    rows = batch // roles.rows // roles.microbatches
    stages = sorted({0, max(0, roles.stage - 2), roles.stage - 1})
    return tuple(Part(config, arrays, roles, stage, rows, sequence) for stage in stages)
