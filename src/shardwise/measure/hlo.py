"""A parser of optimized HLO text, as `Compiled.as_text()` prints it on every backend."""

import math
import re

from .program import Array, Computation, Instruction, Program

_COMMENT = re.compile(r"/\*.*?\*/")
# A kernel's metadata may stand on lines of their own, in the middle of its instruction.
_BROKEN = re.compile(r"=\{\n(?:[^\n}][^\n]*\n)*\}")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+)(?: \(.*)? ?\{$")
_ASSIGNMENT = re.compile(r"\s*(ROOT )?%?([^\s=]+) = (.*)$")
_OPCODE = re.compile(r" ?([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([^\]]*)\]")
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[()\[\]{},]')


def parse(text: str) -> Program:
    """The program in an HLO module's text.

    Raises:
      ValueError: the text is no HLO module, or holds a line that is no instruction.
    """
    computations, entry, current = {}, None, None
    text = _BROKEN.sub(lambda found: found[0].replace("\n", " "), text)
    for line in _COMMENT.sub("", text).splitlines():
        header = _HEADER.match(line)
        if current is None and header and not line.startswith("HloModule"):
            current, root = {}, None
            name = header[2]
            entry = name if header[1] else entry
        elif current is not None and line.startswith("}"):
            computations[name] = Computation(name, current, root or list(current)[-1])
            current = None
        elif current is not None and line.strip():
            is_root, op = _instruction(line)
            current[op.name] = op
            root = op.name if is_root else root
    if entry is None:
        raise ValueError(
            f"measure: no ENTRY computation in this text, which starts {text[:60]!r}; expected an "
            f"HLO module, such as jax.jit(f).lower(*args).compile().as_text()."
        )
    return Program(computations, entry, _devices(text))


def _devices(text: str) -> int:
    header = text.split("\n", 1)[0]
    counts = re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", header)
    return math.prod(int(count) for count in counts)


def _instruction(line: str) -> tuple[bool, Instruction]:
    assignment = _ASSIGNMENT.match(line)
    if assignment is None:
        raise ValueError(f"measure: this line of the HLO is no instruction: {line.strip()!r}")
    is_root, name, rest = assignment.groups()
    # A tuple's type stands in parentheses and holds spaces; any other type holds none.
    end = _closing(rest) if rest.startswith("(") else len(rest.partition(" ")[0])
    opcode = _OPCODE.match(rest, end)
    if opcode is None:
        raise ValueError(f"measure: no opcode in this line of the HLO: {line.strip()!r}")
    close = _closing(rest, opcode.end() - 1)
    attributes = dict(part.split("=", 1) for part in _split(rest[close:]) if "=" in part)
    inputs = _split(rest[opcode.end() : close - 1])
    operands = tuple(part.split()[-1].lstrip("%") for part in inputs)
    return bool(is_root), Instruction(name, opcode[1], _arrays(rest[:end]), operands, attributes)


def _arrays(text: str) -> tuple[Array, ...]:
    return tuple(
        Array(dtype, tuple(int(size.lstrip("<= ")) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(text)
    )


def _closing(text: str, start: int = 0) -> int:
    """The position after the bracket that closes the one at `start`."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if depth == 0:
            return token.end()
    raise ValueError(f"measure: unbalanced brackets in this line of the HLO: {text.strip()!r}")


def _split(text: str) -> list[str]:
    """The parts between the commas that stand in no bracket and no string."""
    parts, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if token[0] == "," and depth == 0:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    return [part for part in [*parts, text[start:].strip()] if part]
