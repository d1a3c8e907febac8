"""What runs in a program, and how often: its call tree, and the trips of its loops."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardwise.marks import turns_said

from .hlo import Array, Computation, Instruction, Program

SAME_VALUE = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "opt-barrier")


@dataclass(frozen=True)
class Frame:
    """A computation at one place in the call tree: which instruction of which frame runs it."""

    program: Program
    computation: Computation
    caller: "Frame | None" = None
    site: Instruction | None = None

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.computation.instructions.values())

    def around(self) -> "list[tuple[Frame, str]]":
        """The frames around this one, each with the name of its instruction that runs it."""
        return [(self.caller, self.site.name), *self.caller.around()] if self.caller else []

    def within(self, *opcodes: str) -> bool:
        """Whether an instruction of these opcodes runs this computation."""
        return self.site is not None and self.site.opcode in opcodes

    def enter(self, name: str, site: Instruction) -> "Frame":
        """The frame of a computation that `site`, an instruction of this one, runs."""
        return Frame(self.program, self.program.computations[name.lstrip("%")], self, site)

    def given(self, parameter: Instruction) -> str:
        """The name, in the frame around this one, of what a parameter is."""
        return self.site.operands[int(parameter.operands[0])]

    def find(self, name: str) -> Instruction:
        """The instruction called `name`."""
        if found := self.computation.instructions.get(name):
            return found
        raise ValueError(
            f"measure: {self.computation.name} uses {name}, which no instruction defines; "
            f"expected a whole module, as compiled.as_text() prints it."
        )

    def operands(self, op: Instruction) -> tuple[Array, ...]:
        """The arrays that `op` reads."""
        return tuple(array for name in op.operands for array in self.find(name).arrays)

    def trace(self, name: str) -> "tuple[Frame, Instruction]":
        """The instruction that computes `name`, seen through calls, fusions, tuples and copies, but
        not a loop's parameter, whose value differs from trip to trip.
        """
        frame, op = self, self.find(name)
        while True:
            if op.opcode == "parameter" and frame.within("call", "fusion"):
                frame, name = frame.caller, frame.given(op)
            elif op.opcode in ("call", "fusion"):
                frame = frame.enter(op.called[0], op)
                name = frame.computation.root
            elif op.opcode == "get-tuple-element":
                inner, source = frame.trace(op.operands[0])
                if source.opcode != "tuple":
                    return frame, op
                frame, name = inner, source.operands[int(op.attributes["index"])]
            elif op.opcode in SAME_VALUE or op.says("custom_call_target") == "Sharding":
                name = op.operands[0]
            else:
                return frame, op
            op = frame.find(name)


class Found(NamedTuple):
    """A value that was read off `op`, an instruction of `frame`, and how often that runs."""

    value: Any
    frame: Frame
    op: Instruction
    times: Any = 1  # while it is found, an int or an array of fractions by device


def executed(
    frame: Frame,
    read: Callable[[Frame, Instruction], Any],
    weigh: Callable[[Any], float] = lambda value: value,
    device: int | None = None,
    only: Instruction | None = None,
) -> tuple[list[Found], int]:
    """(all that `read` finds in one run of `frame`, or of one instruction of it, on which device).

    `read` returns None where nothing is of interest. Of branches and devices that counts which has
    the largest sum of `weigh(value)` times its runs. A ValueError where something found stands in a
    loop whose number of trips cannot be known.
    """

    def weight(found):  # of each device, where they differ
        return sum(weigh(each.value) * each.times for each in found)

    def within(frame, op):
        def enter(name):
            inner = frame.enter(name, op)
            return [found for op in inner for found in within(inner, op)]

        if (value := read(frame, op)) is not None:
            return [Found(value, frame, op)]
        if op.opcode == "while":
            # Where nothing is found, its trips may be unknown. The condition runs once more than
            # the body, to find that the loop is over.
            body, test = (enter(op.attributes[key]) for key in ("body", "condition"))
            trips = trip_count(frame, op) if body or test else 0
            found = [each._replace(times=each.times * trips) for each in body]
            return found + [each._replace(times=each.times * (trips + 1)) for each in test]
        if op.branches:
            ways = map(enter, op.branches)
            return max(ways, key=lambda way: (np.max(weight(way)), len(way)))
        return [found for name in op.called for found in enter(name)]

    found = [each for op in ([only] if only else frame) for each in within(frame, op)]
    device = int(np.argmax(weight(found))) if device is None else device
    runs = []
    for each in found:
        times = np.ravel(each.times)
        n = times[device % times.size]
        if n or not np.ndim(each.times):
            runs.append(each._replace(times=int(n) if n == int(n) else float(n)))
    return runs, device


def trip_count(frame: Frame, loop: Instruction) -> int | np.ndarray:
    """The trips of a while loop: as the compiler noted them, or as `marks.turns` says, a mean over
    its runs for each device, or by its counter; ValueError where they depend on data.
    """
    config = loop.says("backend_config")
    if known := re.search(r'"known_trip_count":\s*\{\s*"n":\s*"(\d+)"', config):
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


_NO_CONSTANT = "what its counter starts from, is raised by or compared with is no constant"
# Which way a counter goes by its condition, 0 for either, and how far past the bound.
_WAYS = {"LT": (1, 0), "LE": (1, 1), "GT": (-1, 0), "GE": (-1, 1), "NE": (0, 0)}


def _counted(frame, loop) -> int:
    """The trips of a loop by the counter that its condition compares."""
    test, body = (frame.enter(loop.attributes[key], loop) for key in ("condition", "body"))
    at, op = test.trace(test.computation.root)
    direction = op.says("direction")
    if op.opcode != "compare" or direction not in _WAYS:
        raise _Unknown(f"its condition {test.computation.name} is no comparison of a counter")
    way, past = _WAYS[direction]
    (index, offset), (other, bound) = (_sum(test, at, name) for name in op.operands)
    if index is None:
        index, offset, other, bound, way = other, bound, index, offset, -way
    if index is None or other is not None:
        raise _Unknown(_NO_CONSTANT)
    outer, start = _element(frame, loop.operands[0], index)
    counted, step = _element(body, body.computation.root, index)
    if outer is not None or counted != index:
        raise _Unknown(_NO_CONSTANT)
    bound -= offset
    way = way or (1 if start < bound else -1)
    left, each = way * (bound - start) + past, way * step
    if left > 0 and (each <= 0 or (direction == "NE" and left % each)):
        raise _Unknown(f"it counts from {start} by {step} and never passes {bound}")
    return -(-left // each) if left > 0 else 0


def _element(frame, name, index):
    """The `_sum` of one element of a tuple."""
    at, made = frame.trace(name)
    if made.opcode != "tuple":
        where = at.computation.name
        raise _Unknown(f"{where} does not write what it carries: {made.name}, a {made.opcode}")
    return _sum(frame, at, made.operands[index])


def _sum(loop: Frame, frame: Frame, name: str) -> tuple[int | None, int]:
    """(the index of a value in the loop's carry, what is added to it); a constant has no index."""
    at, op = frame.trace(name)
    if op.opcode == "constant" and op.operands and re.fullmatch(r"-?\d+", op.operands[0]):
        return None, int(op.operands[0])
    if op.opcode == "get-tuple-element":
        if at.find(op.operands[0]).opcode == "parameter" and at.computation is loop.computation:
            return int(op.attributes["index"]), 0
    if op.opcode in ("add", "subtract"):
        (left, a), (right, b) = (_sum(loop, at, name) for name in op.operands)
        if right is None:
            return left, a + b if op.opcode == "add" else a - b
        if left is None and op.opcode == "add":
            return right, a + b
    raise _Unknown(f"{op.name} is no counter, and is no constant")
