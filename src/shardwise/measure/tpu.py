"""Forms that only the TPU's compiler writes: carried collectives, fused scatters, strategies.

And transfers between slices, over the data centre's network.
"""

import re
from collections import Counter
from typing import Any

from .counts import BETWEEN_SLICES, KINDS, Op
from .hlo import Groups
from .program import Frame, Instruction

CARRIED = '"async_collective_fusion_config"'
_PASSES_ON = ("copy", "copy-start", "copy-done", "bitcast", "reshape", "get-tuple-element",
              "convert", "opt-barrier")  # fmt: skip
# What a transfer's type is called here.
_KINDS = {kind.upper().replace("-", "_"): kind for kind in KINDS[:4]}
_KINDS["ONE_TO_ONE"] = "collective-permute"
_SLICE = 100_000  # in a device's number, where slices are counted from 1
_STRATEGY = re.compile(
    r'"collective_algorithm_config":\{(?:"emitter":"([^"]*)")?,?(?:"strategy":"([^"]*)")?'
)
# Of the first color: how many chips it passes along each axis, one axis in each phase.
_COLORS = re.compile(r"colors:(\d+) phases:\d+ cores:\{([\d ]+)\}")


def starts(frame: Frame, op: Instruction) -> bool | None:
    """Whether `op` starts an asynchronous collective; None for a later piece of one.

    A carried collective stands in the fusion that starts it, in each that it runs beside, and in
    the one that ends it: in all of them it is written out, and in the first alone it begins. Of
    GPUs each is written as a start and a done, and says by itself where nothing may run between.
    """
    start = frame.site if frame.within("async-start") else op
    if start.opcode.endswith("-start"):
        return '"is_sync":true' not in start.says("backend_config")
    if CARRIED not in op.says("backend_config"):
        return False
    begins = (x for x in frame if x.says("custom_call_target") == '"AsyncCollectiveStart"')
    return True if any(op.name in _needed(frame, start) for start in begins) else None


def _needed(frame, op):
    """The names of all that `op` is computed from, in the same computation."""
    waiting, seen = list(op.operands), set()
    while waiting:
        name = waiting.pop()
        if name not in seen and name in frame.computation.instructions:
            seen.add(name)
            waiting += frame.computation.instructions[name].operands
    return seen


def is_scatter(frame: Frame, op: Instruction) -> bool:
    """Whether an all-reduce is one half of a fused reduce-scatter: of its sum a share is kept."""
    if op.opcode != "all-reduce" or not frame.within("fusion"):
        return False
    return _is_cut(frame, op.name, lambda n: n < op.arrays[0].elements)


def written_as(frame: Frame, op: Instruction, size: int) -> tuple[str, ...]:
    """The kind whose work an all-reduce among `size` devices does, of each of its arrays.

    A gather becomes one where each device adds its share into zeros; a scatter, where each device
    keeps its share of the sum and nothing else is made of it. Empty where all are sums.
    """
    if op.opcode != "all-reduce":
        return ()
    found = tuple(_work(frame, op, i, size) for i in range(len(op.operands)))
    return found if set(found) != {"all-reduce"} else ()


def _work(frame, op, index, size):
    share = op.arrays[index].elements / size
    inner, made = frame.trace(op.operands[index])
    if made.opcode == "dynamic-update-slice":
        at, base = inner.trace(made.operands[0])
        update = inner.find(made.operands[1])[1]
        if base.opcode == "broadcast" and update.arrays[0].elements == share:
            _, value = at.trace(base.operands[0])
            return "all-gather" if value.operands in (("0",), ("-0",)) else "all-reduce"
    outputs = [op.name]
    if len(op.arrays) > 1:
        elements = (x for x in frame if x.operands == (op.name,) and x.says("index") == str(index))
        outputs = [element.name for element in elements]
    kept = [_is_cut(frame, name, lambda n: n == share) for name in outputs]
    return "reduce-scatter" if kept and all(kept) else "all-reduce"


def _is_cut(frame, name, fits):
    """Whether every reader of a value takes a part of it, of a number of elements that fits."""
    readers = list(_readers(frame, name))
    return bool(readers) and all(_takes_part(frame, *reader, fits) for reader in readers)


def _takes_part(frame, reader, name, fits):
    if reader.opcode == "dynamic-slice":
        return reader.operands[0] == name and fits(reader.arrays[0].elements)
    if reader.opcode != "fusion" or reader.operands.count(name) != 1:
        return False
    inside, position = frame.enter(reader.called[0], reader), str(reader.operands.index(name))
    (parameter,) = (
        op.name for op in inside if op.opcode == "parameter" and op.operands == (position,)
    )
    return _is_cut(inside, parameter, fits)


def _readers(frame, name):
    """(instruction that reads a value, the value's name there), seen through what passes it on."""
    for reader in frame:
        if name in reader.operands:
            if reader.opcode in _PASSES_ON:
                yield from _readers(frame, reader.name)
            else:
                yield reader, name


def notes(frame: Frame, op: Instruction) -> tuple[str, ...]:
    """The notes of a collective, see `Op`; a permute of a product's shares is named after it."""
    shares = op.source.rsplit("/", 1)[-1].startswith(("dot_general", "conv_general"))
    found = {
        "padded": any(frame.find(name)[1].opcode == "pad" for name in op.operands),
        "windowed": shares and op.opcode.startswith("collective-permute"),
        "combined": len(op.operands) > 1 and not op.opcode.startswith("all-to-all"),
    }
    return tuple(note for note, holds in found.items() if holds)


def strategy(frame: Frame, op: Instruction) -> str:
    """The compiler's name for how the chips exchange, "" where it does not say."""
    for at in (op, frame.site) if frame.site else (op,):
        said = _STRATEGY.search(at.says("backend_config"))
        if said and (said[1] or said[2]):
            return said[2] or said[1]
    return ""


def between_slices(op: Instruction, devices: int) -> tuple[str, int, Groups] | None:
    """(kind, how many take part, who takes part) of a send to another slice; None for another send.

    `devices` are those of one slice. Numbers of devices are known where every device of each
    slice takes part; elsewhere they are told by their places, and the groups are empty.
    """
    said = op.says("frontend_attributes")
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
    """(groups in any numbering, groups in the program's or none); None if they cannot be read."""
    if crossed := re.fullmatch(r"\{([\d,]+)\}x\{(\d+):(\d+)\}", target):
        slices = [int(number) - 1 for number in crossed[1].split(",")]
        places = range(int(crossed[2]), int(crossed[3]) + 1)
        groups = tuple(tuple(s * devices + place for s in slices) for place in places)
        return groups, groups if len(places) == devices else ()
    listed = re.findall(r"\{(\d+(?:,\d+)*)\}", target)
    found = listed or re.findall(r"\{(\d+->\d+)\}", target)
    groups = tuple(tuple(map(int, re.findall(r"\d+", group))) for group in found)
    slices = sorted({number // _SLICE for group in groups for number in group})
    numbers = tuple(s * devices + i - devices for s in slices for i in range(devices))
    whole = len(listed) == 1 and len(groups[0]) == len(numbers)
    return (groups, (numbers,) if whole else ()) if groups else None


def links(op: Op, chip: Any, start: Instruction) -> tuple[int, float]:
    """(directions of links along which a collective sends at once, seconds that one run takes).

    By the links that its strategy uses, or of GPUs by the nodes that its groups lie in; 0
    directions between slices or nodes.
    """
    if chip.node:
        return _switched(op, chip)
    if op.kind.endswith(BETWEEN_SLICES):
        return 0, op.ring_bytes / chip.dcn
    lanes = {"collective-permute": 1, "all-to-all": chip.links}.get(op.kind)
    if lanes is None:
        ways, sizes = _strategy(op, start.says("backend_config"))
        lanes = min(ways, sum(_links(size, len(sizes), chip) for size in sizes), chip.links)
    return lanes, op.ring_bytes / (lanes * chip.link_bandwidth) * chip.devices


def _switched(op, chip):
    nodes = [Counter(i // chip.node for i in group) for group in op.groups]
    # The fewest of a node take in what that node has not: of uneven parts they are the slowest.
    inside, across = max(
        ((min(n.values()), sum(n.values()) / min(n.values())) for n in nodes),
        key=lambda pair: pair[1],
        default=(1, 1),
    )
    if op.kind == "collective-permute":
        seconds = op.ring_bytes / (chip.dcn if across > 1 else chip.link_bandwidth)
    elif op.kind == "all-to-all":
        seconds = chip.exchange_seconds(op.ring_bytes, inside, across)
    else:
        seconds = chip.ring_seconds(op.ring_bytes, inside, across, chip.link_bandwidth)
    return int(across == 1), seconds


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
