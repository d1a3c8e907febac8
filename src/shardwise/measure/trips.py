"""The number of times that each instruction of a program runs."""

import re
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from shardwise.marks.counting import turns_said

from .program import Frame, Instruction, Program, trace

Found = TypeVar("Found")


def executed(
    program: Program,
    read: Callable[[Frame, Instruction], Found | None],
    weigh: Callable[[Found], float] = lambda value: value,
    frame: Frame | None = None,
) -> list[tuple[Found, int | float]]:
    """The values that `read` finds in the program, each with the number of times that it runs.

    `read(frame, op)` returns a value, or None for an instruction that is of no interest. A loop's
    body counts once for each trip. Of a conditional's branches the heaviest counts alone, by
    the sum of `weigh(value)` times its runs: an upper bound. Of devices that `marks.turns` tells
    apart, it is the heaviest. `frame` is the part of the program that is run once, the whole if
    None.

    Returns:
      A list of (value, times).
    Raises:
      ValueError: something found stands in a loop whose number of trips cannot be known.
    """
    frame = frame or Frame(program.computations[program.entry])
    found = _executed(program, frame, read, weigh)
    device = np.argmax(_weight(found, weigh))
    on_it = ((value, n if isinstance(n, int) else n[device % n.size] or None) for value, n in found)
    return [(v, int(n) if n == int(n) else float(n)) for v, n in on_it if n is not None]


def _weight(found, weigh):
    """The weight of all that is found, on each device where they differ."""
    return sum(weigh(value) * times for value, times in found)


def _executed(program, frame, read, weigh) -> list[tuple]:
    """The result of `executed`; numbers of times are ints, or arrays of fractions by device."""
    found = []

    def enter(name, op):
        return _executed(program, Frame(program.computations[name], frame, op), read, weigh)

    def weight(branch):
        return np.max(_weight(branch, weigh)), len(branch)

    for op in frame.computation.instructions.values():
        value = read(frame, op)
        if value is not None:
            found.append((value, 1))
        elif op.opcode == "while":
            found += _loop(program, frame, op, enter)
        elif op.branches:
            found += max((enter(name, op) for name in op.branches), key=weight)
        else:
            found += [item for name in op.called for item in enter(name, op)]
    return found


def _loop(program: Program, frame: Frame, loop: Instruction, enter: Callable) -> list[tuple]:
    body, condition = (enter(loop.attributes[k].lstrip("%"), loop) for k in ("body", "condition"))
    if not body and not condition:
        return []  # Its trips do not matter, and may be unknown.
    trips = trip_count(program, frame, loop)
    # The condition runs once more than the body, to find that the loop is over.
    return [(v, n * trips) for v, n in body] + [(v, n * (trips + 1)) for v, n in condition]


def trip_count(program: Program, frame: Frame, loop: Instruction) -> int | np.ndarray:
    """The number of times that the body of a while loop runs.

    As the compiler has noted it, or as `marks.turns` says, a mean over its runs for each device, or
    else from a counter that starts at a constant, grows by a constant and is compared with a
    constant.

    Raises:
      ValueError: the number depends on data.
    """
    known = re.search(
        r'"known_trip_count":\s*\{\s*"n":\s*"(\d+)"', loop.attributes.get("backend_config", "")
    )
    if known:
        return int(known[1])
    if (said := turns_said(loop.source)) is not None:
        return np.array(said, object)
    try:
        return _counted(program, frame, loop)
    except _Unknown as reason:
        raise ValueError(
            f"measure: how often the loop {loop.name} in {frame.computation.name} runs is not "
            f"known before the program runs: {reason}. Use jax.lax.scan, or fori_loop with "
            f"Python numbers as bounds, or say how often by marks.turns around the loop."
        ) from None


class _Unknown(Exception):
    pass


_HOLDS = {
    "LT": lambda value, bound: value < bound,
    "LE": lambda value, bound: value <= bound,
    "GT": lambda value, bound: value > bound,
    "GE": lambda value, bound: value >= bound,
    "NE": lambda value, bound: value != bound,
}
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


def _counted(program: Program, frame: Frame, loop: Instruction) -> int:
    index, direction, bound = _condition(program, frame, loop)
    inner, carry = trace(program, frame, loop.operands[0])
    if carry.opcode != "tuple":
        raise _Unknown("its first values are not written beside it")
    start = _constant(program, inner, carry.operands[index])
    step = _step(program, frame, loop, index)
    holds = _HOLDS[direction]
    if not holds(start, bound):
        return 0
    away = {"L": step <= 0, "G": step >= 0, "N": not step or (bound - start) % step}[direction[0]]
    if away:
        raise _Unknown(f"it counts from {start} by {step} and never passes {bound}")
    steps, rest = divmod(bound - start, step)
    return steps + (1 if rest or holds(bound, bound) else 0)


def _condition(program: Program, frame: Frame, loop: Instruction) -> tuple[int, str, int]:
    computation = program.computations[loop.attributes["condition"].lstrip("%")]
    inside = Frame(computation, frame, loop)
    at, op = trace(program, inside, computation.root)
    direction = op.attributes.get("direction")
    if op.opcode != "compare" or direction not in _HOLDS:
        raise _Unknown(f"its condition {computation.name} is no comparison of a counter")
    counter, bound = op.operands
    if _element(program, inside, at, counter) is None:
        counter, bound, direction = bound, counter, _MIRRORED[direction]
    index = _element(program, inside, at, counter)
    if index is None:
        raise _Unknown(f"its condition {computation.name} compares no carried counter")
    return index, direction, _constant(program, at, bound)


def _step(program: Program, frame: Frame, loop: Instruction, index: int) -> int:
    computation = program.computations[loop.attributes["body"].lstrip("%")]
    inside = Frame(computation, frame, loop)
    at, result = trace(program, inside, computation.root)
    if result.opcode != "tuple":
        raise _Unknown(f"its body {computation.name} does not write what it carries")
    at, op = trace(program, at, result.operands[index])
    if op.opcode not in ("add", "subtract"):
        raise _Unknown(f"its body {computation.name} does not add to the counter")
    counter, step = op.operands
    if op.opcode == "add" and _element(program, inside, at, counter) != index:
        counter, step = step, counter
    if _element(program, inside, at, counter) != index:
        raise _Unknown(f"its body {computation.name} does not add to the counter")
    return _constant(program, at, step) * (1 if op.opcode == "add" else -1)


def _element(program: Program, inside: Frame, frame: Frame, name: str) -> int | None:
    """The index of the value in the carry of the loop `inside`; None if it is not in there."""
    at, op = trace(program, frame, name)
    if op.opcode != "get-tuple-element":
        return None
    at, source = at.find(op.operands[0])
    own = source.opcode == "parameter" and at.computation is inside.computation
    return int(op.attributes["index"]) if own else None


def _constant(program: Program, frame: Frame, name: str) -> int:
    _, op = trace(program, frame, name)
    if op.opcode != "constant" or not op.operands or not re.fullmatch(r"-?\d+", op.operands[0]):
        raise _Unknown(f"{op.name} is no constant")
    return int(op.operands[0])
