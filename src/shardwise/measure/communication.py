"""Collectives in a program: how many, how often, and how many bytes each device sends."""

from dataclasses import replace
from typing import Any

import jax

from . import hlo, stablehlo, tpu
from .counts import BETWEEN_SLICES, KINDS, Collectives, Op
from .program import Frame, Instruction
from .trips import executed

# Times B (n - 1) / n are sent by each of the n devices of a ring; B is the full tensor. In an
# all-to-all that is a device's own; what it forwards for others depends on the links.
_RING_PASSES = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1}
_UNCOUNTED = ("collective-broadcast", "ragged-all-to-all", "send")


def collectives(program: Any, device: int | None = None) -> Collectives:
    """The `Collectives` of a lowered program, a compiled one, or one's optimized HLO text.

    A compiled program holds what really runs on one device: hand-written collectives and those
    that the compiler inserted, in the dtypes of its backend (the CPU's turns bfloat16 into
    float32). A lowered one holds only those written by hand in `jax.shard_map`, in the dtypes
    written, its arrays not yet divided along axes that are left to the compiler.

    An asynchronous start and done are one collective, a group of one device sends nothing, and of
    a conditional's branches the one that sends the most is counted. A loop in the scope of
    `marks.turns` runs as often as that says, on the device that sends the most in all, whose number
    among those told apart is the result's `.device`, or on the `device` asked for.
    A compiled program is a `jax.stages.Compiled` or what `topology.compile` returns.

    In a TPU's program, what is carried by fusions counts once, where it starts; an all-reduce of
    which the same fusion keeps a share is a reduce-scatter, of the padded array; transfers between
    slices are kinds of their own, such as "all-reduce between slices"; and ragged-all-to-all
    counts as if every row left its device: a bound. See `measure.by_form`.

    Raises:
      TypeError: `program` is none of these.
      ValueError: a collective whose bytes depend on data, one in a loop whose number of trips
        does, replica groups in a form not known here, or, in a lowered program, a custom call
        that may send.
    """
    if isinstance(program, jax.stages.Lowered):
        program = stablehlo.read(program)
    program = hlo.read("collectives", program)
    found, device = executed(program.main, read, lambda op: op.ring_bytes, device)
    return Collectives((op.repeated(trips) for op, trips in found), device)


def read(frame: Frame, op: Instruction) -> Op | None:
    """The collective that one instruction is or starts, run once; None for any other."""
    kind, devices = op.opcode.removesuffix("-start"), frame.program.devices
    if between := tpu.between_slices(op, devices):
        kind, n, among = between
        # Its operands are an array and a token; where numbers are not known, devices differ.
        sends = among or ((0, 1),)
        found = _op(kind + BETWEEN_SLICES, op, frame.operands(op)[:1], n, sends, asynchronous=True)
        return replace(found, groups=among)
    strategy = tpu.strategy(frame, op)
    if kind == "ragged-all-to-all" and "replica_groups" in op.attributes:  # as if no row stayed
        among = hlo.replicas(op, devices)
        n, rows = max(map(len, among)), frame.operands(op)[:1]
        started = bool(tpu.starts(frame, op))
        found = _op("all-to-all", op, rows, n, among, strategy, (), started, notes=("bound",))
        return replace(found, ring_bytes=rows[0].bytes if n > 1 else 0)
    if kind in _UNCOUNTED and op.attributes.get("is_host_transfer") != "true":
        raise ValueError(
            f"measure.collectives: cannot count the bytes of {op.name}, a {kind}; known are "
            f"{', '.join(KINDS)}. Measure the part of the program around it by itself."
        )
    started = tpu.starts(frame, op)
    if kind not in KINDS or started is None:
        return None
    if kind == "collective-permute":
        among, n, written = hlo.pairs(op), None, ()
    else:
        among = hlo.replicas(op, devices)
        n = max(map(len, among))
        written = tpu.written_as(frame, op, n)
    if tpu.is_scatter(frame, op):
        kind, written = "reduce-scatter", ()
    notes, arrays = tpu.notes(frame, op), frame.operands(op)
    return _op(kind, op, arrays, n, among, strategy, written, started, notes)


def _op(kind, op, arrays, n, among, strategy="", written=(), asynchronous=False, notes=()) -> Op:
    """The `Op` of one instruction, run once; what leaves a device by the formulas of a ring."""
    size = sum(array.bytes for array in arrays)
    base = kind.removesuffix(BETWEEN_SLICES)
    if base == "collective-permute":
        sent, n = size if any(len(set(pair)) > 1 for pair in among) else 0, None
    else:
        size *= n if base == "all-gather" else 1
        all_sent = _RING_PASSES[base] * size * (n - 1)
        sent = all_sent / n if all_sent % n else all_sent // n
    more = op.source, among, strategy, written, asynchronous, notes
    return Op(kind, op.name, arrays, n, 1, size, sent, *more)
