"""The number of times that each instruction of a program runs."""

import operator
import re
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from shardwise.marks import turns_said

from .program import Frame, Instruction

Found = TypeVar("Found")


def executed(
    frame: Frame,
    read: Callable[[Frame, Instruction], Found | None],
    weigh: Callable[[Found], float] = lambda value: value,
    device: int | None = None,
) -> tuple[list[tuple[Found, int | float]], int]:
    """([(a value that `read` finds in one run of `frame`, how often it runs)], on which device).

    `read(frame, op)` returns a value, or None for an instruction that is of no interest. A loop's
    body counts once for each trip. Of a conditional's branches the heaviest counts alone, by
    the sum of `weigh(value)` times its runs: an upper bound. Of devices that `marks.turns` tells
    apart, it is the heaviest, or the one of that number.

    Raises:
      ValueError: something found stands in a loop whose number of trips cannot be known.
    """
    found = _executed(frame, read, weigh)
    device = int(np.argmax(_weight(found, weigh))) if device is None else device
    on_it = ((value, n if isinstance(n, int) else n[device % n.size] or None) for value, n in found)
    return [(v, int(n) if n == int(n) else float(n)) for v, n in on_it if n is not None], device


def _weight(found, weigh):
    """The weight of all that is found, on each device where they differ."""
    return sum(weigh(value) * times for value, times in found)


def _executed(frame, read, weigh) -> list[tuple]:
    """The result of `executed`; numbers of times are ints, or arrays of fractions by device."""
    found = []
    for op in frame:

        def enter(name, op=op):
            return _executed(frame.enter(name, op), read, weigh)

        value = read(frame, op)
        if value is not None:
            found.append((value, 1))
        elif op.opcode == "while":
            body, condition = enter(op.attributes["body"]), enter(op.attributes["condition"])
            # Where nothing is found, its trips may be unknown. The condition runs once more than
            # the body, to find that the loop is over.
            trips = trip_count(frame, op) if body or condition else 0
            found += [(v, n * trips) for v, n in body]
            found += [(v, n * (trips + 1)) for v, n in condition]
        elif op.branches:
            ways = map(enter, op.branches)
            found += max(ways, key=lambda way: (np.max(_weight(way, weigh)), len(way)))
        else:
            found += [item for name in op.called for item in enter(name)]
    return found


def trip_count(frame: Frame, loop: Instruction) -> int | np.ndarray:
    """The number of times that the body of a while loop runs; ValueError if it depends on data.

    As the compiler has noted it, or as `marks.turns` says, a mean over its runs for each device, or
    else from a counter that starts at a constant, grows by a constant and is compared with a
    constant.
    """
    known = re.search(r'"known_trip_count":\s*\{\s*"n":\s*"(\d+)"', loop.says("backend_config"))
    if known:
        return int(known[1])
    if (said := turns_said(loop.source)) is not None:
        return np.array(said, object)
    try:
        return _counted(frame, loop)
    except _Unknown as reason:
        raise ValueError(
            f"measure: how often the loop {loop.name} in {frame.computation.name} runs is not "
            f"known before the program runs: {reason}. Use jax.lax.scan, or fori_loop with "
            f"Python numbers as bounds, or say how often by marks.turns around the loop."
        ) from None


class _Unknown(Exception):
    pass


_HOLDS = {name: getattr(operator, name.lower()) for name in ("LT", "LE", "GT", "GE", "NE")}
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


def _counted(frame, loop) -> int:
    """The trips of a loop by the counter that its condition compares."""
    test, body = (frame.enter(loop.attributes[key], loop) for key in ("condition", "body"))
    at, op = test.trace(test.computation.root)
    direction = op.says("direction")
    if op.opcode != "compare" or direction not in _HOLDS:
        raise _Unknown(f"its condition {test.computation.name} is no comparison of a counter")
    (index, offset), (other, bound) = (_sum(test, at, name) for name in op.operands)
    if index is None:
        index, offset, other, bound = other, bound, index, offset
        direction = _MIRRORED[direction]
    if index is None or other is not None:
        raise _Unknown(
            f"what its condition {test.computation.name} asks of a counter is no constant"
        )
    bound -= offset
    at, carry = frame.trace(loop.operands[0])
    if carry.opcode != "tuple":
        raise _Unknown("its first values are not written beside it")
    outer, start = _sum(frame, at, carry.operands[index])
    if outer is not None:
        raise _Unknown(f"{carry.operands[index]} is no constant")
    at, result = body.trace(body.computation.root)
    if result.opcode != "tuple":
        raise _Unknown(f"its body {body.computation.name} does not write what it carries")
    counter, step = _sum(body, at, result.operands[index])
    if counter != index:
        raise _Unknown(f"its body {body.computation.name} does not add to the counter")
    holds = _HOLDS[direction]
    if not holds(start, bound):
        return 0
    away = {"L": step <= 0, "G": step >= 0, "N": not step or (bound - start) % step}[direction[0]]
    if away:
        raise _Unknown(f"it counts from {start} by {step} and never passes {bound}")
    steps, rest = divmod(bound - start, step)
    return steps + (1 if rest or holds(bound, bound) else 0)


def _sum(loop: Frame, frame: Frame, name: str) -> tuple[int | None, int]:
    """(the index of a value in the loop's carry, what is added to it); a constant has no index."""
    at, op = frame.trace(name)
    if op.opcode == "constant" and op.operands and re.fullmatch(r"-?\d+", op.operands[0]):
        return None, int(op.operands[0])
    if op.opcode == "get-tuple-element":
        holder, source = at.find(op.operands[0])
        if source.opcode == "parameter" and holder.computation is loop.computation:
            return int(op.attributes["index"]), 0
    if op.opcode in ("add", "subtract"):
        (left, a), (right, b) = (_sum(loop, at, name) for name in op.operands)
        if right is None:
            return left, a + b if op.opcode == "add" else a - b
        if left is None and op.opcode == "add":
            return right, a + b
    raise _Unknown(f"{op.name} is no counter, and is no constant")
