"""Forms that only the TPU's compiler writes: carried collectives, fused scatters, strategies.

And transfers between slices, over the data centre's network.
"""

import re
from typing import Any

from .counts import BETWEEN_SLICES, Op
from .hlo import Groups
from .program import Frame, Instruction, Program, trace

_CARRIED = '"async_collective_fusion_config"'
_COPIES = ("copy", "copy-start", "copy-done")
_PASSES_ON = (*_COPIES, "bitcast", "reshape", "get-tuple-element", "convert", "opt-barrier")
# What a transfer's type is called here.
_KINDS = {
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_SLICE = 100_000  # in a device's number, where slices are counted from 1
# Of the first color: how many chips it passes along each axis, one axis in each phase.
_COLORS = re.compile(r"colors:(\d+) phases:\d+ cores:\{([\d ]+)\}")


def starts(frame: Frame, op: Instruction) -> bool | None:
    """Whether `op` starts an asynchronous collective; None for a later piece of one.

    A carried collective stands in the fusion that starts it, in each that it runs beside, and in
    the one that ends it: in all of them it is written out, and in the first alone it begins.
    """
    if op.opcode.endswith("-start") or (frame.site and frame.site.opcode == "async-start"):
        return True
    if _CARRIED not in op.attributes.get("backend_config", ""):
        return False
    begins = [
        call
        for call in frame.computation.instructions.values()
        if call.attributes.get("custom_call_target") == '"AsyncCollectiveStart"'
    ]
    return True if any(_reaches(frame, call, op.name) for call in begins) else None


def is_scatter(frame: Frame, op: Instruction) -> bool:
    """Whether an all-reduce is one half of a fused reduce-scatter: of its sum a share is kept."""
    if op.opcode != "all-reduce" or frame.site is None or frame.site.opcode != "fusion":
        return False
    return _is_sliced(frame, op.name, op.arrays[0].elements)


def is_padded(frame: Frame, op: Instruction) -> bool:
    """Whether an operand of a collective was padded for it."""
    return any(frame.find(name)[1].opcode == "pad" for name in op.operands)


def written_as(program: Program, frame: Frame, op: Instruction, size: int) -> tuple[str, ...]:
    """The kind whose work an all-reduce among `size` devices does, of each of its arrays.

    A gather becomes one where each device adds its share into zeros; a scatter, where each device
    keeps its share of the sum and nothing else is made of it. Empty where all are sums.
    """
    if op.opcode != "all-reduce":
        return ()
    found = tuple(_work(program, frame, op, i, size) for i in range(len(op.operands)))
    return found if set(found) != {"all-reduce"} else ()


def _work(program, frame, op, index, size):
    share = op.arrays[index].elements / size
    inner, made = trace(program, frame, op.operands[index])
    if made.opcode == "dynamic-update-slice":
        at, base = trace(program, inner, made.operands[0])
        update = inner.find(made.operands[1])[1]
        if base.opcode == "broadcast" and update.arrays[0].elements == share:
            _, value = trace(program, at, base.operands[0])
            return "all-gather" if value.operands in (("0",), ("-0",)) else "all-reduce"
    outputs = [op.name]
    if len(op.arrays) > 1:
        outputs = [
            element.name
            for element in frame.computation.instructions.values()
            if element.operands == (op.name,) and element.attributes.get("index") == str(index)
        ]
    shared_out = [_is_shared_out(program, frame, name, share) for name in outputs]
    return "reduce-scatter" if shared_out and all(shared_out) else "all-reduce"


def is_windowed(op: Instruction) -> bool:
    """Whether a permute passes on the shares of a product's operand, instead of gathering it.

    It is told by its origin: the compiler names such a permute after the product.
    """
    product = op.source.rsplit("/", 1)[-1].startswith(("dot_general", "conv_general"))
    return op.opcode.startswith("collective-permute") and product


def strategy(frame: Frame, op: Instruction) -> str:
    """The compiler's name for how the chips exchange, "" where it does not say."""
    for config in (op.attributes, frame.site.attributes if frame.site else {}):
        said = re.search(
            r'"collective_algorithm_config":\{(?:"emitter":"([^"]*)")?,?(?:"strategy":"([^"]*)")?',
            config.get("backend_config", ""),
        )
        if said and (said[1] or said[2]):
            return said[2] or said[1]
    return ""


def _reaches(frame, start, name):
    """Whether the instruction `start` reads the one called `name`, in the same computation."""
    waiting, seen = list(start.operands), set()
    while waiting:
        current = waiting.pop()
        if current == name:
            return True
        if current not in seen and current in frame.computation.instructions:
            seen.add(current)
            waiting += frame.computation.instructions[current].operands
    return False


def _readers(frame, name):
    """The instructions that read a value, seen through those that only pass it on."""
    for reader in frame.computation.instructions.values():
        if name in reader.operands:
            if reader.opcode in _PASSES_ON:
                yield from _readers(frame, reader.name)
            else:
                yield reader, name


def _is_sliced(frame, name, elements):
    """Whether every reader of a value in this computation takes a smaller part of it."""
    readers = list(_readers(frame, name))
    return bool(readers) and all(
        reader.opcode == "dynamic-slice" and reader.arrays[0].elements < elements
        for reader, _ in readers
    )


def _is_shared_out(program, frame, name, share):
    readers = list(_readers(frame, name))
    return bool(readers) and all(
        _takes_share(program, frame, reader, read, share) for reader, read in readers
    )


def _takes_share(program, frame, reader, name, share):
    if reader.opcode == "dynamic-slice":
        return reader.operands[0] == name and reader.arrays[0].elements == share
    if reader.opcode != "fusion" or reader.operands.count(name) != 1:
        return False
    inside = Frame(program.computations[reader.called[0]], frame, reader)
    position = str(reader.operands.index(name))
    (parameter,) = (
        op.name
        for op in inside.computation.instructions.values()
        if op.opcode == "parameter" and op.operands == (position,)
    )
    return _is_shared_out(program, inside, parameter, share)


def between_slices(op: Instruction, devices: int) -> tuple[str, int, Groups] | None:
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


def links(op: Op, chip: Any, start: Instruction) -> tuple[int, float]:
    """(directions of links along which a collective sends at once, seconds that one run takes).

    By the links that its strategy uses; 0 directions between slices.
    """
    lanes = _lanes(op, chip, start)
    bandwidth = lanes * chip.link_bandwidth if lanes else chip.dcn_bandwidth
    return lanes, op.ring_bytes / bandwidth * chip.devices


def _lanes(op, chip, start):
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
