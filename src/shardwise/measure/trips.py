"""The number of times that each instruction of a program runs."""

import operator
import re
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from shardwise.marks.counting import turns_said

from .program import Frame, Instruction

Found = TypeVar("Found")


def executed(
    frame: Frame,
    read: Callable[[Frame, Instruction], Found | None],
    weigh: Callable[[Found], float] = lambda value: value,
) -> list[tuple[Found, int | float]]:
    """The values that `read` finds in one run of `frame`, each with how often it runs.

    `read(frame, op)` returns a value, or None for an instruction that is of no interest. A loop's
    body counts once for each trip. Of a conditional's branches the heaviest counts alone, by
    the sum of `weigh(value)` times its runs: an upper bound. Of devices that `marks.turns` tells
    apart, it is the heaviest.

    Raises:
      ValueError: something found stands in a loop whose number of trips cannot be known.
    """
    found = _executed(frame, read, weigh)
    device = np.argmax(_weight(found, weigh))
    on_it = ((value, n if isinstance(n, int) else n[device % n.size] or None) for value, n in found)
    return [(v, int(n) if n == int(n) else float(n)) for v, n in on_it if n is not None]


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
    index, direction, bound = _condition(frame.enter(loop.attributes["condition"], loop))
    at, carry = frame.trace(loop.operands[0])
    if carry.opcode != "tuple":
        raise _Unknown("its first values are not written beside it")
    start = _constant(at, carry.operands[index])
    step = _step(frame.enter(loop.attributes["body"], loop), index)
    holds = _HOLDS[direction]
    if not holds(start, bound):
        return 0
    away = {"L": step <= 0, "G": step >= 0, "N": not step or (bound - start) % step}[direction[0]]
    if away:
        raise _Unknown(f"it counts from {start} by {step} and never passes {bound}")
    steps, rest = divmod(bound - start, step)
    return steps + (1 if rest or holds(bound, bound) else 0)


def _condition(loop: Frame) -> tuple[int, str, int]:
    """(the counter's index in the carry, how it is compared, with what)."""
    at, op = loop.trace(loop.computation.root)
    direction = op.says("direction")
    if op.opcode == "compare" and direction in _HOLDS:
        left, right = op.operands
        if (index := _index(loop, at, left)) is not None:
            return index, direction, _constant(at, right)
        if (index := _index(loop, at, right)) is not None:
            return index, _MIRRORED[direction], _constant(at, left)
    raise _Unknown(f"its condition {loop.computation.name} is no comparison of a counter")


def _step(loop: Frame, index: int) -> int:
    """What a trip adds to the counter."""
    at, result = loop.trace(loop.computation.root)
    if result.opcode != "tuple":
        raise _Unknown(f"its body {loop.computation.name} does not write what it carries")
    at, op = at.trace(result.operands[index])
    if op.opcode in ("add", "subtract"):
        left, right = op.operands
        if _index(loop, at, left) == index:
            return _constant(at, right) * (1 if op.opcode == "add" else -1)
        if op.opcode == "add" and _index(loop, at, right) == index:
            return _constant(at, left)
    raise _Unknown(f"its body {loop.computation.name} does not add to the counter")


def _index(loop: Frame, frame: Frame, name: str) -> int | None:
    """The index of the value in the carry of the loop; None if it is not in there."""
    at, op = frame.trace(name)
    if op.opcode != "get-tuple-element":
        return None
    at, source = at.find(op.operands[0])
    own = source.opcode == "parameter" and at.computation is loop.computation
    return int(op.attributes["index"]) if own else None


def _constant(frame: Frame, name: str) -> int:
    _, op = frame.trace(name)
    if op.opcode != "constant" or not op.operands or not re.fullmatch(r"-?\d+", op.operands[0]):
        raise _Unknown(f"{op.name} is no constant")
    return int(op.operands[0])
