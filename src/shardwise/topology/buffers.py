"""The arrays that a compiled program holds, from what the compiler says of its buffers."""

import re
from typing import NamedTuple

_ALLOCATION = re.compile(r"allocation \d+: size \d+,?(.*)")
_VALUE = re.compile(
    r" value: <\d+ (\S+) @\d+> \(size=(\d+),offset=(\d+)\): (\(?[a-z]\w*\[[^\]]*\])"
)


class Buffer(NamedTuple):
    """An array in HBM: bytes with padding, "argument", "output" or "temporary", and its origin.

    `source` is the operation that JAX named, or the argument's path; empty where the compiler
    made the array for itself.
    """

    bytes: int
    kind: str
    array: str
    name: str
    source: str


def largest(assignment: str, text: str, number: int = 16) -> tuple[Buffer, ...]:
    """The largest arrays of a buffer assignment, those at one place counted once; largest first.

    Temporaries at different places may be held at different times.
    """
    found, kind = {}, None
    for line in assignment.splitlines():
        if allocation := _ALLOCATION.match(line):
            kind, place = _kind(allocation[1]), line
        elif not line.startswith(" value:"):
            if line.strip() and found:
                break
        elif kind and (value := _VALUE.match(line)):
            at = place, int(value[3])
            array = "tuple" if value[4].startswith("(") else value[4]
            buffer = int(value[2]), kind, array, value[1].split("{")[0]
            found[at] = max(found.get(at, buffer), buffer, key=lambda buffer: buffer[0])
    chosen = sorted(found.values(), key=lambda buffer: -buffer[0])[:number]
    return tuple(Buffer(*buffer, _source(text, buffer[-1])) for buffer in chosen)


def _kind(attributes):
    """The kind of an allocation; None for what lies in no HBM, or in no program's."""
    if "thread-local" in attributes or re.search(r"color [1-9]", attributes):
        return None
    if "parameter" in attributes:
        return "argument"
    return "output" if "maybe-live-out" in attributes else "temporary"


def _source(text, name):
    line = re.search(rf"^\s*(?:ROOT )?%?{re.escape(name)} = .*$", text, re.MULTILINE)
    source = re.search(r'op_name="([^"]*)"', line[0]) if line else None
    return source[1].replace("\\'", "'") if source else ""


def total(report: str) -> int | None:
    """The bytes of HBM in all, from a memory usage report; None where it does not say.

    The report of libtpu 0.0.23 does not: its one total counts VMEM too.
    """
    said = re.search(r"Memory Space: default.*\nTotal bytes: (\d+)", report)
    return int(said[1]) if said else None
