"""One form for programs, whether read from optimized HLO or from lowered StableHLO.

The words are HLO's: a program is a set of computations, a computation a list of instructions,
and a while loop, a call, a fusion or a conditional names the computations that it runs.
"""

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax


def checked(who: str, program: Any) -> Any:
    """`program`, a `jax.stages.Compiled` or what has its methods; TypeError of `measure.who`."""
    says = hasattr(program, "as_text") and hasattr(program, "memory_analysis")
    if not says or isinstance(program, jax.stages.Lowered | type):
        raise TypeError(
            f"measure.{who} takes a compiled program, and got {type(program).__name__}; pass "
            f"jax.jit(f).lower(*args).compile(), or what topology.compile returns."
        )
    return program


class Array(NamedTuple):
    """An array's type in a program: its dtype as HLO writes it, and its sizes."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        if self.dtype == "pred":
            return self.elements
        width = re.match(r"[a-z]+(\d+)", self.dtype)  # Tokens and opaque handles have none.
        return -(-self.elements * int(width[1]) // 8) if width else 0


@dataclass(frozen=True)
class Instruction:
    """`name = arrays opcode(operands), attributes`, tuples of arrays flattened."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: dict[str, str]

    def says(self, attribute: str) -> str:
        """The text of an attribute, "" if there is none."""
        return self.attributes.get(attribute, "")

    @property
    def source(self) -> str:
        """The operation that JAX named, in its scopes; "" where the program does not say."""
        named = re.search(r'op_name="([^"]*)"', self.says("metadata"))
        return named[1] if named else ""

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that run when a call, fusion or async start runs."""
        if self.opcode not in ("call", "fusion", "async-start"):
            return ()
        return ((self.says("calls") or self.attributes["to_apply"]).lstrip("%"),)

    @property
    def branches(self) -> tuple[str, ...]:
        """Names of the computations of which a conditional runs one."""
        keys = ("branch_computations", "true_computation", "false_computation")
        return tuple(re.findall(r"[^\s%{},]+", ",".join(map(self.says, keys))))


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in program order, and the name of the one that is the result."""

    name: str
    instructions: dict[str, Instruction]
    root: str


@dataclass(frozen=True)
class Program:
    """Computations by name; `devices` run it, and if `scheduled`, in the order of its text."""

    computations: dict[str, Computation]
    entry: str
    devices: int
    scheduled: bool = False

    @property
    def main(self) -> "Frame":
        return Frame(self, self.computations[self.entry])


@dataclass(frozen=True)
class Frame:
    """A computation at one place in the call tree: which instruction of which frame runs it."""

    program: Program
    computation: Computation
    caller: "Frame | None" = None
    site: Instruction | None = None

    def __iter__(self):
        return iter(self.computation.instructions.values())

    def within(self, *opcodes: str) -> bool:
        """Whether an instruction of these opcodes runs this computation."""
        return self.site is not None and self.site.opcode in opcodes

    def enter(self, name: str, site: Instruction) -> "Frame":
        """The frame of a computation that `site`, an instruction of this one, runs."""
        return Frame(self.program, self.program.computations[name.lstrip("%")], self, site)

    def find(self, name: str) -> "tuple[Frame, Instruction]":
        """The instruction called `name` and its frame: here, or in a region around this one."""
        frame = self
        while frame is not None:
            if name in frame.computation.instructions:
                return frame, frame.computation.instructions[name]
            frame = frame.caller
        raise ValueError(
            f"measure: {self.computation.name} uses {name}, which no instruction defines; expected "
            f"a whole module, as compiled.as_text() prints it."
        )

    def operands(self, op: Instruction) -> tuple[Array, ...]:
        """The arrays that `op` reads."""
        return tuple(a for name in op.operands for a in self.find(name)[1].arrays)

    def trace(self, name: str) -> "tuple[Frame, Instruction]":
        """The instruction that computes `name`, seen through calls, fusions, tuples and copies.

        A loop's parameter is where the trace ends: its value differs from trip to trip.
        """
        frame, op = self.find(name)
        while True:
            if op.opcode == "parameter" and frame.within("call", "fusion"):
                frame, op = frame.caller.find(frame.site.operands[int(op.operands[0])])
            elif op.opcode in ("call", "fusion"):
                frame = frame.enter(op.called[0], op)
                _, op = frame.find(frame.computation.root)
            elif op.opcode == "get-tuple-element":
                inner, source = frame.trace(op.operands[0])
                if source.opcode != "tuple":
                    return frame, op
                frame, op = inner.find(source.operands[int(op.attributes["index"])])
            elif op.opcode in _SAME_VALUE and op.operands:
                frame, op = frame.find(op.operands[0])
            else:
                return frame, op


_SAME_VALUE = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "opt-barrier",
               "optimization-barrier", "sharding-constraint")  # fmt: skip
