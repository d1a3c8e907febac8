"""Collectives in a program: how many, how often, and how many bytes each device sends."""

import re
from dataclasses import replace

import jax

from . import groups, hlo, stablehlo
from .counts import KINDS, Collectives, Op
from .program import Frame, Instruction, Program
from .trips import executed

# Times B (n - 1) / n are sent by each of the n devices of a ring; B is the full tensor. In an
# all-to-all that is a device's own; what it forwards for others depends on the links.
_RING_PASSES = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1}
_UNCOUNTED = ("collective-broadcast", "ragged-all-to-all", "send")


def collectives(program: jax.stages.Compiled | jax.stages.Lowered | Program) -> Collectives:
    """The `Collectives` of a `jax.stages.Compiled` or `jax.stages.Lowered`.

    A compiled program holds what really runs on one device: hand-written collectives and those
    that the compiler inserted, in the dtypes of its backend (the CPU's turns bfloat16 into
    float32). A lowered one holds only those written by hand in `jax.shard_map`, in the dtypes
    written, its arrays not yet divided along axes that are left to the compiler.

    An asynchronous start and done are one collective, a group of one device sends nothing, and of
    a conditional's branches the one that sends the most is counted.

    Raises:
      TypeError: `program` is neither.
      ValueError: a collective whose bytes depend on data, one in a loop whose number of trips
        does, replica groups in a form not known here, or, in a lowered program, a custom call
        that may send.
    """
    if isinstance(program, jax.stages.Compiled):
        program = hlo.parse(program.as_text())
    elif isinstance(program, jax.stages.Lowered):
        program = stablehlo.read(program)
    elif not isinstance(program, Program):
        raise TypeError(
            f"measure.collectives takes a lowered or compiled program, and got "
            f"{type(program).__name__}; pass jax.jit(f).lower(*args).compile()."
        )
    found = executed(
        program,
        lambda frame, op: _read(program, frame, op),
        weigh=lambda op: op.ring_bytes,
    )
    return Collectives([_times(op, trips) for op, trips in found])


def _read(program: Program, frame: Frame, op: Instruction) -> Op | None:
    kind = op.opcode.removesuffix("-start")
    if kind in _UNCOUNTED and op.attributes.get("is_host_transfer") != "true":
        raise ValueError(
            f"measure.collectives: cannot count the bytes of {op.name}, a {kind}; known are "
            f"{', '.join(KINDS)}. Measure the part of the program around it by itself."
        )
    if kind not in KINDS:
        return None
    arrays = frame.operands(op)
    size = sum(array.bytes for array in arrays)
    together = _groups(op, program.devices)
    if kind == "collective-permute":
        n, sent = None, size if together else 0
    else:
        n = max(map(len, together))
        size *= n if kind == "all-gather" else 1
        sent = _exact(_RING_PASSES[kind] * size * (n - 1), n)
    source = re.search(r'op_name="([^"]*)"', op.attributes.get("metadata", ""))
    types = tuple((array.dtype, array.dims) for array in arrays)
    return Op(kind, op.name, types, n, 1, size, sent, source[1] if source else "", together)


def _groups(op: Instruction, devices: int) -> groups.Groups:
    if "slice_sizes" in op.attributes:
        raise ValueError(f"measure.collectives: {op.name} sends slices, which are not known here.")
    return groups.read(op, devices)


def _times(op: Op, trips: int) -> Op:
    total = {key: getattr(op, key) * trips for key in ("payload_bytes", "ring_bytes")}
    return replace(op, trips=trips, **total)


def _exact(numerator: int, denominator: int) -> int | float:
    quotient, rest = divmod(numerator, denominator)
    return numerator / denominator if rest else quotient
