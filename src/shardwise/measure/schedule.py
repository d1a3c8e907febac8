"""A TPU's program as the schedule that its text is: where collectives begin, and where they end."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from . import communication, hlo, matmuls
from .counts import Op
from .program import Computation, Frame, Instruction, Program
from .trips import executed

_HANDS_ON = ("tuple", "bitcast", "copy", "opt-barrier", "optimization-barrier")


class Begun(NamedTuple):
    """A collective where it begins: `start` of a `frame`, which runs so many `times`."""

    op: Op
    frame: Frame
    start: Instruction
    times: int | float


def scheduled(who: str, program: Any) -> Program:
    """A compiled program whose text is its schedule; TypeError or ValueError for another."""
    text = hlo.text(who, program)
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError(
            f"measure.{who}: the order of this program's instructions is no schedule; compile it "
            f"for TPUs, by topology.compile."
        )
    return hlo.parse(text)


def begun(program: Program) -> list[list[Begun]]:
    """Every collective where it begins, those of one computation together."""
    groups: dict[int, list[Begun]] = {}

    def read(frame, op):
        found = communication.read(program, frame, op)
        # What a fusion starts or runs, it does in the order of the computation around it.
        inner = frame.site is not None and frame.site.opcode in ("fusion", "async-start")
        return found and (found, frame.caller if inner else frame, frame.site if inner else op)

    for (found, frame, start), times in executed(program, read, lambda f: f[0].ring_bytes):
        groups.setdefault(id(frame), []).append(Begun(found, frame, start, times))
    return list(groups.values())


def between(program: Program, begun: Begun) -> list[Instruction]:
    """The instructions that run after a collective has begun and before it is waited for.

    A collective that ends in the next trip of its loop runs beside the rest of the body, and its
    beginning; one that is handed to a loop counts as waited for there.
    """
    after, order, place = _end(program, begun.frame, begun.start)
    return after if place is None else [*after, *order][:place]


def end(program: Program, begun: Begun) -> str | None:
    """The name of what waits for a collective, in this trip or the next; None for nothing."""
    after, order, place = _end(program, begun.frame, begun.start)
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


def _follow(program, frame, order, held):
    """(what waits for the collective, or None; the element of the result that it leaves as)."""
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
        elif op.opcode == "tuple" and op.name == frame.computation.root:
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


def flops(
    program: Program, frame: Frame, op: Instruction, kernels: Mapping[str, int]
) -> int | float:
    """FLOPs of the products in one instruction, and in what it runs."""
    return _sum(program, frame, op, lambda frame, op: matmuls.read(frame, op, kernels))


def cycles(program: Program, frame: Frame, op: Instruction) -> int | float:
    """Cycles that the compiler estimates for one instruction, and for what it runs."""
    return _sum(program, frame, op, _estimate)


def _estimate(frame: Frame, op: Instruction) -> int | None:
    said = re.search(r'"estimated_cycles":"(\d+)"', op.attributes.get("backend_config", ""))
    return int(said[1]) if said else None


def _sum(program: Program, frame: Frame, op: Instruction, read: Callable) -> int | float:
    alone = Frame(Computation(op.name, {op.name: op}, op.name), frame)
    return sum(value * times for value, times in executed(program, read, frame=alone))
