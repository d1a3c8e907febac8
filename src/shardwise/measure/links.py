"""The number of links that a collective uses at once on a torus, and the time that it takes."""

import re
from typing import Any

from .counts import BETWEEN_SLICES, Op
from .program import Instruction

# Of the first color: how many chips it passes along each axis, one axis in each phase.
_COLORS = re.compile(r"colors:(\d+) phases:\d+ cores:\{([\d ]+)\}")


def link_seconds(op: Op, chip: Any, start: Instruction) -> float:
    """The seconds that one run of a collective takes, by the links that its strategy uses."""
    lanes = lanes_of(op, chip, start)
    bandwidth = lanes * chip.link_bandwidth if lanes else chip.dcn_bandwidth
    return op.ring_bytes / bandwidth * chip.devices


def lanes_of(op: Op, chip: Any, start: Instruction) -> int:
    """Directions of links that a strategy sends along at once; 0 between slices."""
    if op.kind.endswith(BETWEEN_SLICES):
        return 0
    if op.kind == "collective-permute":
        return 1
    if op.kind == "all-to-all":
        return chip.links
    ways, sizes = _strategy(op, start.attributes.get("backend_config", ""))
    return min(ways, sum(_links(size, len(sizes), chip) for size in sizes), chip.links)


def _strategy(op, config):
    """(directions in which parts of the array travel at once, chips along each axis)."""
    if said := _COLORS.search(config):
        one_way = op.strategy.startswith("UniDirection")
        return int(said[1]) * (1 if one_way else 2), [float(n) for n in said[2].split()]
    size, dimensions = op.group_size or 1, re.match(r"(\d)D", op.strategy)
    axes = int(dimensions[1]) if dimensions else 1
    return 2 * axes, [round(size ** (1 / axes), 9)] * axes  # their mean: it does not say them


def _links(size, axes, chip):
    """Links of a chip along one of so many axes: two on a ring, one on a line or to one other."""
    if size <= 2:
        return 1
    return 2 if axes == 1 or size >= (chip.ring_from or 0) else 1
