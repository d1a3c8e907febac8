"""The seconds of a collective: its bytes over the links that it takes, of a torus or of nodes."""

import functools
import re
from collections import Counter
from typing import Any

from .counts import BETWEEN_SLICES
from .hlo import Groups
from .trips import Found

# Of the first color: how many chips it passes along each axis, one axis in each phase.
_COLORS = re.compile(r"colors:(\d+) phases:\d+ cores:\{([\d ]+)\}")


def taken(begun: Found, chip: Any) -> tuple[int, float, Counter[Any]]:
    """(directions of links, 0 between slices or nodes, seconds, load) of one run of a collective
    alone; the load is {link: seconds} where links are known: two that run at once share them.
    """
    op, places = begun.value, begun.frame.program.places
    if chip.node:
        return *_switched(op, chip, places), Counter()
    if op.kind.endswith(BETWEEN_SLICES):
        return 0, op.ring_bytes / chip.dcn_bandwidth, Counter()
    pairs = op.groups if op.kind == "collective-permute" else ()
    if op.kind == "all-to-all" or op.group_size == 2:
        pairs = tuple((a, b) for group in op.groups for a in group for b in group)
    if places and pairs:
        each = op.ring_bytes / max(1, (op.group_size or 2) - 1)
        rates = *[chip.link_bandwidth] * 3, chip.core_bandwidth  # the last from core to core
        ways = carried(pairs, places, chip).items()
        load = Counter({link: each * n / rates[link[0]] for link, n in ways})
        return 1, max(load.values(), default=0), load
    if not (lanes := {"collective-permute": 1, "all-to-all": chip.links}.get(op.kind)):
        ways, sizes = _strategy(op, begun.op.says("backend_config"))
        # Two links of a chip lead along a ring, one along a line or to one other chip.
        rings = (n > 2 and (len(sizes) == 1 or n >= (chip.ring_from or 0)) for n in sizes)
        lanes = min(ways, sum(2 if ring else 1 for ring in rings), chip.links)
    return lanes, op.ring_bytes / (lanes * chip.link_bandwidth) * chip.devices, Counter()


@functools.lru_cache(maxsize=256)
def carried(pairs: Groups, places: Groups, chip: Any) -> Counter[tuple[int, ...]]:
    """{link: how many of the `pairs` send over it}, from one of the `places` of a slice to another.

    A way leads along one axis of the torus after another, and last from core to core; on a ring the
    shorter way round, and of two as short half goes each. A link is (axis, direction, the chip that
    it leaves, whose devices share it).
    """
    found: Counter[tuple[int, ...]] = Counter()
    sizes = [max(along) + 1 for along in zip(*places, strict=True)][:-1]
    for source, target in pairs:
        at = list(places[source])
        for axis, size in enumerate(sizes):
            start, apart, half = at[axis], places[target][axis] - at[axis], size // 2
            ways = [apart]
            if chip.is_ring(size):
                ways = [half, -half] if abs(apart) == half else [half - (half - apart) % size]
            for way in ways:
                for step in range(abs(way)):
                    at[axis] = (start + (step if way > 0 else -step)) % size
                    found[axis, way > 0, *at[:3]] += 1 / len(ways)
            at[axis] = start + apart
    return found


def _switched(op, chip, places):
    """(directions, seconds) between GPUs; where no places are told, in nodes that are full."""
    node = [place[-1] for place in places]
    nodes = [Counter(node[i] if node else i // chip.node for i in group) for group in op.groups]
    # The fewest of a node take in what that node has not: of uneven parts they are the slowest.
    parts = [(min(n.values()), sum(n.values()) / min(n.values())) for n in nodes]
    inside, across = max(parts, key=lambda pair: pair[1], default=(1, 1))
    if op.kind == "collective-permute":
        seconds = op.ring_bytes / (chip.dcn_bandwidth if across > 1 else chip.link_bandwidth)
    elif op.kind == "all-to-all":
        seconds = chip.exchange_seconds(op.ring_bytes, inside, across)
    else:
        seconds = chip.ring_seconds(op.ring_bytes, inside, across, chip.link_bandwidth)
    return int(across == 1), seconds


def _strategy(op, config):
    """(directions in which parts of the array travel at once, chips along each axis)."""
    if said := _COLORS.search(config):
        ways = 1 if op.strategy.startswith("UniDirection") else 2
        return int(said[1]) * ways, [*map(float, said[2].split())]
    size, dimensions = op.group_size or 1, re.match(r"(\d)D", op.strategy)
    axes = int(dimensions[1]) if dimensions else 1
    return 2 * axes, [round(size ** (1 / axes), 9)] * axes  # their mean: it does not say them
