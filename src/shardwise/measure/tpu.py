"""Forms that only the TPU's compiler writes: carried collectives, fused scatters, strategies."""

import re

from .program import Frame, Instruction, Program, trace

_CARRIED = '"async_collective_fusion_config"'
_COPIES = ("copy", "copy-start", "copy-done")
_PASSES_ON = (*_COPIES, "bitcast", "reshape", "get-tuple-element", "convert", "opt-barrier")


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
