"""The way mesh axes lie along a torus, or in nodes, and the seconds that collectives take there.

A collective over a ring of chips sends both ways, over a line one way; an axis over several sides
of the torus uses all at once. Parts of one side that lie in between each other share its links. A
node's GPUs have a switch, to which each sends at its full bandwidth, whoever takes part.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shardwise.plan.roles import divisors
from shardwise.topology.slices import Chip, Chips


class Side(NamedTuple):
    """A mesh axis along one side of the torus, in a node, or over the cores of a chip (`on_chip`):
    `size` of these, every `stride`-th of `whole`.
    """

    size: int
    stride: int
    whole: int
    on_chip: bool = False

    def bandwidth(self, chip: Chip) -> float:
        """The bytes/s that a device sends in a ring collective, in all directions there are."""
        closed = not self.on_chip and chip.is_ring(self.whole)
        ways = 2 if closed and self.size * self.stride == self.whole else 1
        return ways * self.lane(chip)

    def lane(self, chip: Chip) -> float:
        """The bytes/s that a device sends one way."""
        if self.on_chip:
            return chip.core_bandwidth
        return chip.link_bandwidth / (1 if chip.node else self.stride * chip.devices)


class Way(NamedTuple):
    """The links between a role's devices: along `sides` of the torus, or in a node, each a `Side`;
    and across `across` slices or nodes, which `groups` names, "slices" or "nodes".
    """

    sides: tuple[Side, ...]
    across: int = 1
    groups: str = "slices"

    @property
    def inside(self) -> int:
        return math.prod(side.size for side in self.sides)

    def __str__(self):
        each = f", {self.inside} devices of each" if self.inside > 1 else ""
        told = [f"{s.size} of {s.whole}" if not s.on_chip else "a chip" for s in self.sides]
        return f"{self.across} {self.groups}{each}" if self.across > 1 else " × ".join(told)


@functools.lru_cache(maxsize=8192)
def lay(chips: Chips, sizes: tuple[tuple[str, int], ...]) -> Mapping[str, Way]:
    """{role: its Way}, of `sizes` in the order of the mesh, as `mesh.placed` lays it on this torus:
    slices outermost, and the last axis chooses its sides first. (Of up to 8 chips JAX makes rings
    that go over several sides: they count as sides here.)
    """
    mesh = chips.mesh(**dict(sizes))
    sides, devices = chips.shape, chips.chip.devices
    free = [Side(whole, 1, whole) for whole in sides]  # what is left of each
    if devices > 1:
        free.append(Side(devices, 1, devices, on_chip=True))
    # Of a few chips of several cores, JAX lays the last axis over the cores, whatever else.
    cores = devices > 1 and max(sides[:2]) <= 2 and math.prod(sides) * devices <= 32
    found = {}
    for (role, size), across in reversed([*zip(mesh.axes, mesh.across_slices(), strict=True)]):
        factors = _choose(size // across, free, cores)
        taken = (s._replace(size=f) for s, f in zip(free, factors, strict=True) if f > 1)
        found[role] = Way(tuple(taken), across, chips.groups)
        pairs = zip(free, factors, strict=True)
        free = [s._replace(size=s.size // f, stride=s.stride * f) for s, f in pairs]
    return found


def _choose(size, free, cores):
    """The factors into which JAX's `mesh_utils` cuts a size, one for each side of the torus: over
    the `cores` of a chip first, or as much as can be on whole sides, then of more sides, then where
    another axis lies already.
    """

    def order(factors):
        whole = [f for f, side in zip(factors, free, strict=True) if f == side.whole > 1]
        shared = math.prod(f for f, side in zip(factors, free, strict=True) if side.stride > 1)
        own = math.prod(f for f, side in zip(factors, free, strict=True) if side.on_chip and cores)
        return own, math.prod(whole), len(whole), shared, factors

    options = ([f for f in divisors(side.size) if size % f == 0] for side in free)
    return max((f for f in itertools.product(*options) if math.prod(f) == size), key=order)


def _bandwidth(sides, chip):
    """The bytes/s that a device sends in a ring collective over these sides, of all links at once.

    A core gives its fellows all but its part, and sends that round the torus: what takes longer.
    """
    each = [side.bandwidth(chip) for side in sides]
    cores = math.prod(side.size for side in sides if side.on_chip)
    if chip.node or cores == 1 or len(sides) == 1:
        return max(each, default=0.0) if chip.node else sum(each)  # one switch has all links
    torus = sum(x for x, side in zip(each, sides, strict=True) if not side.on_chip)
    n = math.prod(side.size for side in sides)
    longest = max((1 - 1 / cores) / chip.core_bandwidth, (1 / cores - 1 / n) / torus)
    return (1 - 1 / n) / longest


def ring_seconds(chip: Chip, ways: Iterable[Way], sent: float) -> float:
    """The seconds of gathers, scatters and sums that send `sent` ring bytes over roles as one."""
    ways = tuple(ways)
    inside, across = (math.prod(getattr(w, name) for w in ways) for name in ("inside", "across"))
    sides = [side for way in ways for side in way.sides]
    return chip.ring_seconds(sent, inside, across, _bandwidth(sides, chip))


def hop_seconds(chip: Chip, way: Way, sent: float) -> float:
    """The seconds in which each device passes `sent` bytes to the next: one way, along one side; of
    the cores of several chips, from chip to chip, which takes longest.
    """
    if way.across > 1:
        return sent / chip.dcn_bandwidth
    lanes = [side.lane(chip) for side in way.sides if not side.on_chip]
    if len(lanes) < len(way.sides):
        lanes = [lane * chip.devices for lane in lanes] or [chip.core_bandwidth]
    return sent / max(lanes)


def exchange_seconds(chip: Chip, way: Way, sent: float) -> float:
    """The seconds of an all-to-all in which a device sends `sent` bytes of its own.

    A block crosses a quarter of a ring on average, and a third of a line, whose middle link half of
    all blocks pass: size/8 and size/4 of a device's bytes are on the busiest link, each way.
    """
    if chip.node:
        return chip.exchange_seconds(sent, way.inside, way.across)
    n = way.inside * way.across
    whole = sent * n / (n - 1) if n > 1 else 0.0
    busiest = [whole * side.size / 4 / side.bandwidth(chip) for side in way.sides]
    away = whole * (way.across - 1) / way.across / chip.dcn_bandwidth
    return max(busiest, default=0.0) + away
