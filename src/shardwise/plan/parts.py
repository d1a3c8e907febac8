"""A stage's part of a model: its layers, and how many of a device's tokens go through it."""

import dataclasses
from collections.abc import Iterator

from shardwise.model import Config
from shardwise.plan.arrays import Array, Arrays, shares
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
