"""Transfers between slices of TPUs, over the data centre's network."""

import re

from .groups import Groups
from .program import Instruction

# What a transfer's type is called here.
_KINDS = {
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_SLICE = 100_000  # in a device's number, where slices are counted from 1


def read(op: Instruction, devices: int) -> tuple[str, int, Groups] | None:
    """(kind, how many take part, who takes part) of a send to another slice; None for another send.

    `devices` are those of one slice. Numbers of devices are known where every device of each
    slice takes part; elsewhere they are told by their places, and the groups are empty.

    Raises:
      ValueError: a type or a form that is not known here.
    """
    said = op.attributes.get("frontend_attributes", "")
    kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', said)
    if op.opcode != "send" or kind is None:
        return None
    target = re.search(r'_xla_megascale_target="?(.*?)"?,_xla_megascale_transfer_type', said)
    groups = _groups(target[1], devices) if target else None
    if kind[1] not in _KINDS or groups is None:
        raise ValueError(
            f"measure.collectives: cannot read the transfer between slices {op.name}: {said}; "
            f"known are {', '.join(_KINDS)}, to {{1,2}}x{{0:7}} or {{{{100000,200000}}}}."
        )
    return _KINDS[kind[1]], max(map(len, groups[0])), groups[1]


def _groups(target, devices):
    """(groups in any numbering, groups in the program's or none)."""
    crossed = re.fullmatch(r"\{([\d,]+)\}x\{(\d+):(\d+)\}", target)
    if crossed:
        slices = [int(number) - 1 for number in crossed[1].split(",")]
        places = range(int(crossed[2]), int(crossed[3]) + 1)
        groups = tuple(tuple(s * devices + place for s in slices) for place in places)
        return groups, groups if len(places) == devices else ()
    listed = re.findall(r"\{(\d+(?:,\d+)*)\}", target)
    pairs = re.findall(r"\{(\d+)->(\d+)\}", target)
    groups = tuple(tuple(map(int, group.split(","))) for group in listed) or tuple(
        (int(source), int(to)) for source, to in pairs
    )
    if not groups:
        return None
    slices = {number // _SLICE for group in groups for number in group}
    whole = bool(listed) and len(groups) == 1 and len(groups[0]) == len(slices) * devices
    numbers = tuple(s * devices + i - devices for s in sorted(slices) for i in range(devices))
    return groups, (numbers,) if whole else ()
