"""Instructions between the start and the end of a collective, in the order of a TPU's program."""

import re
from collections.abc import Callable, Mapping

from . import matmuls
from .program import Computation, Frame, Instruction, Program
from .trips import executed

_HANDS_ON = ("tuple", "bitcast", "copy", "opt-barrier", "optimization-barrier")


def between(program: Program, frame: Frame, start: Instruction) -> list[Instruction]:
    """The instructions of `frame` that run after `start` has begun and before it is waited for.

    A collective that ends in the next trip of its loop runs beside the rest of the body, and its
    beginning; one that is handed to a loop counts as waited for there.
    """
    after, order, place = _end(program, frame, start)
    return after if place is None else [*after, *order][:place]


def end(program: Program, frame: Frame, start: Instruction) -> str | None:
    """The name of what waits for `start`, in this trip or the next; None where nothing does."""
    after, order, place = _end(program, frame, start)
    return None if place is None else [*after, *order][place].name


def _end(program, frame, start):
    """(what comes after `start`, all in order, how many instructions further it is awaited)."""
    order = list(frame.computation.instructions.values())
    after = order[order.index(start) + 1 :]
    end, leaves_as = _follow(program, frame, after, {start.name})
    if end is not None:
        return after, order, after.index(end)
    if leaves_as is None or frame.site is None or frame.site.opcode != "while":
        return after, order, None
    carried = {
        op.name
        for op in order
        if op.opcode == "get-tuple-element" and op.attributes["index"] == str(leaves_as)
    }
    end, _ = _follow(program, frame, order, carried)
    return after, order, len(after) + order.index(end) if end in order else None


def flops(program: Program, frame: Frame, op: Instruction, kernels: Mapping[str, int]) -> int:
    """FLOPs of the products in one instruction, and in what it runs."""
    return _sum(program, frame, op, lambda frame, op: matmuls.read(frame, op, kernels))


def cycles(program: Program, frame: Frame, op: Instruction) -> int:
    """Cycles that the compiler estimates for one instruction, and for what it runs."""
    return _sum(program, frame, op, _estimate)


def _estimate(frame: Frame, op: Instruction) -> int | None:
    said = re.search(r'"estimated_cycles":"(\d+)"', op.attributes.get("backend_config", ""))
    return int(said[1]) if said else None


def _sum(program: Program, frame: Frame, op: Instruction, read: Callable) -> int:
    alone = Frame(Computation(op.name, {op.name: op}, op.name), frame)
    return sum(value * times for value, times in executed(program, read, frame=alone))


def _follow(program, frame, order, held):
    """(what waits for the collective, or None; the element of the result that it leaves as)."""
    root, held = frame.computation.root, set(held)
    for op in order:
        holding = [name for name in op.operands if name in held]
        if not holding:
            continue
        if op.opcode.endswith("-done") or op.opcode == "while":
            return op, None
        if op.opcode == "fusion":
            body = program.computations[op.called[0]]
            if _waits(body, op, held):
                return op, None
            if _carries(body):
                held.add(op.name)
        elif op.opcode == "tuple" and op.name == root:
            return None, op.operands.index(holding[0])
        elif op.opcode in _HANDS_ON or _is_signal(op):
            held.add(op.name)
    return None, None


def _is_signal(op):
    """Whether `op` is the signal of a carried collective, or a start itself, handed on."""
    scalar = [(array.dtype, array.dims) for array in op.arrays] == [("u32", ())]
    return op.opcode == "get-tuple-element" and (scalar or len(op.arrays) > 1)


def _carries(body):
    return any(
        "async_collective_fusion_config" in op.attributes.get("backend_config", "")
        for op in body.instructions.values()
    )


def _waits(body, fusion, held):
    for op in body.instructions.values():
        if op.attributes.get("custom_call_target") == '"AsyncCollectiveDone"':
            read = [body.instructions[name] for name in op.operands]
            places = [int(p.operands[0]) for p in read if p.opcode == "parameter"]
            if any(fusion.operands[place] in held for place in places):
                return True
    return False
