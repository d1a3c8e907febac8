"""A TPU's program as the schedule that its text is: where collectives begin, and where they end."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from . import communication, hlo, matmuls, tpu
from .counts import Op
from .program import Computation, Frame, Instruction
from .trips import executed

_HANDS_ON = ("tuple", "bitcast", "copy", "opt-barrier", "optimization-barrier")


class Begun(NamedTuple):
    """A collective where it begins: `start` of a `frame`, which runs so many `times`."""

    op: Op
    frame: Frame
    start: Instruction
    times: int | float


def begun(who: str, program: Any) -> list[list[Begun]]:
    """Every collective of a scheduled program where it begins, by the computation it stands in."""
    program = hlo.read(who, program)
    if not program.scheduled:
        raise ValueError(
            f"measure.{who}: the order of this program's instructions is no schedule; compile it "
            f"for TPUs, by topology.compile."
        )
    groups: dict[int, list[Begun]] = {}

    def read(frame, op):
        found = communication.read(frame, op)
        # What a fusion starts or runs, it does in the order of the computation around it.
        inner = frame.within("fusion", "async-start")
        return found and (found, frame.caller if inner else frame, frame.site if inner else op)

    for (found, frame, start), times in executed(program.main, read, lambda f: f[0].ring_bytes)[0]:
        groups.setdefault(id(frame), []).append(Begun(found, frame, start, times))
    return list(groups.values())


def until(begun: Begun) -> tuple[list[Instruction], str | None]:
    """(the instructions that run beside a collective, the name of the one that waits for it).

    A collective that ends in the next trip of its loop runs beside the rest of the body, and its
    beginning; one that is handed to a loop counts as waited for there. None where nothing waits.
    """
    frame, order = begun.frame, list(begun.frame)
    after = order[order.index(begun.start) + 1 :]
    end, leaves_as = _follow(frame, after, {begun.start.name})
    if end is None and leaves_as is not None and frame.within("while"):
        carried = (op for op in order if op.opcode == "get-tuple-element")
        held = {op.name for op in carried if op.attributes["index"] == str(leaves_as)}
        end, _ = _follow(frame, order, held)
        after = [*after, *order] if end else after
    return (after[: after.index(end)], end.name) if end else (after, None)


def _follow(frame, order, held):
    """(what waits for the collective, or None; the element of the result that it leaves as)."""
    for op in order:
        holding = [name for name in op.operands if name in held]
        if not holding:
            continue
        if op.opcode.endswith("-done") or op.opcode == "while":
            return op, None
        if op.opcode == "fusion":
            body = frame.enter(op.called[0], op)
            if _waits(body, held):
                return op, None
            if any(tpu.CARRIED in inner.says("backend_config") for inner in body):
                held.add(op.name)
        elif op.opcode == "tuple" and op.name == frame.computation.root:
            return None, op.operands.index(holding[0])
        elif op.opcode in _HANDS_ON or _is_signal(op):
            held.add(op.name)
    return None, None


def _is_signal(op):
    """Whether `op` is the signal of a carried collective, or a start itself, handed on."""
    return op.opcode == "get-tuple-element" and (op.arrays == (("u32", ()),) or len(op.arrays) > 1)


def _waits(body, held):
    """Whether a fusion ends a carried collective that it reads."""
    for done in (op for op in body if op.says("custom_call_target") == '"AsyncCollectiveDone"'):
        read = [body.find(name)[1] for name in done.operands]
        places = [int(op.operands[0]) for op in read if op.opcode == "parameter"]
        if any(body.site.operands[place] in held for place in places):
            return True
    return False


def flops(frame: Frame, op: Instruction, kernels: Mapping[str, int]) -> int | float:
    """FLOPs of the products in one instruction, and in what it runs."""
    alone = Computation(op.name, {op.name: op}, op.name)
    return matmuls.within(Frame(frame.program, alone, frame), kernels)
