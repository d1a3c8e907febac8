"""Collectives in a program, in the forms of every backend: how many, how often, how many bytes."""

import dataclasses
import re
from typing import Any

import jax

from . import hlo
from .counts import BETWEEN_SLICES, KINDS, Collectives, Op
from .hlo import Array, Groups, Instruction
from .trips import SAME_VALUE, Frame, executed

_UNCOUNTED = ("collective-broadcast", "ragged-all-to-all", "send")
CARRIED = '"async_collective_fusion_config"'
_PASSES_ON = (*SAME_VALUE, "get-tuple-element")
# What a transfer's type is called here.
_TRANSFERS = {k.upper().replace("-", "_"): k for k in KINDS[:-1]} | {"ONE_TO_ONE": KINDS[-1]}
_SLICE = 100_000  # in a device's number, where slices are counted from 1
_STRATEGY = re.compile(
    r'"collective_algorithm_config":\{(?:"emitter":"([^"]*)")?,?(?:"strategy":"([^"]*)")?'
)


def collectives(program: Any, device: int | None = None) -> Collectives:
    """The `Collectives` of a lowered program, of a compiled one, or of its optimized HLO text.

    A compiled program (a `jax.stages.Compiled`, or what `topology.compile` returns) holds what
    really runs on one device, written by hand or inserted by the compiler, in the dtypes of its
    backend (the CPU's turns bfloat16 into float32). A lowered one holds only those written by hand
    in `jax.shard_map`, in the dtypes written, its arrays not yet divided along axes that are left
    to the compiler; one for several devices without any `shard_map` is an error.

    An asynchronous start and done are one collective, a group of one device sends nothing, and of
    a conditional's branches the one that sends the most is counted. A loop within `marks.turns`
    runs as often as that says for `device`, a place in its list of numbers; by default for the
    device that sends the most. `.device` of the result tells which.

    In a TPU's program, what is carried by fusions counts once, where it starts; an all-reduce of
    which the same fusion keeps a share is a reduce-scatter, of the padded array; transfers between
    slices are kinds of their own, such as "all-reduce between slices"; and ragged-all-to-all
    counts as if every row left its device, which is a bound.

    Raises:
      TypeError: `program` is none of these.
      ValueError: a collective whose bytes depend on data, one in a loop whose number of trips
        does, replica groups in a form not known here, or, in a lowered program, a custom call
        that may send, or nothing written by hand.
    """
    if isinstance(program, jax.stages.Lowered):
        program = hlo.lowered(program)
        if program.devices > 1 and not program.by_hand:
            raise ValueError(
                f"measure.collectives: nothing in this lowered program is written by hand, in "
                f"jax.shard_map: what its {program.devices} devices send, the compiler has yet to "
                f"decide. Pass what .compile() of it returns."
            )
    program = hlo.read("collectives", program)
    found, device = executed(Frame(program, program.entry), read, lambda op: op.ring_bytes, device)
    return Collectives((dataclasses.replace(x.value, trips=x.times) for x in found), device)


def read(frame: Frame, op: Instruction) -> Op | None:
    """The collective that one instruction is or starts, run once; None for any other."""
    kind, devices = op.opcode.removesuffix("-start"), frame.program.devices
    started, n, notes = _starts(frame, op), None, ()
    if between := _between_slices(op, devices):
        # Its operands are an array and a token.
        (kind, n, groups), started, arrays = between, True, frame.operands(op)[:1]
    elif kind == "ragged-all-to-all" and frame.program.scheduled:
        groups, arrays, notes = hlo.replicas(op, devices), frame.operands(op)[:1], ("bound",)
        kind, n = "all-to-all", max(map(len, groups))
    elif (kind in _UNCOUNTED and op.says("is_host_transfer") != "true") or (
        kind == "collective-permute" and "slice_sizes" in op.attributes
    ):
        raise ValueError(
            f"measure.collectives: cannot count the bytes of {op.name}, a {kind}; known are "
            f"{', '.join(KINDS)}. Measure the part of the program around it by itself."
        )
    elif kind not in KINDS or started is None:
        return None
    elif kind == "collective-permute":
        groups = hlo.lists(op.attributes["source_target_pairs"])
        arrays, notes = frame.operands(op), _notes(frame, op)
    else:
        groups, arrays, notes = hlo.replicas(op, devices), frame.operands(op), _notes(frame, op)
        n = max(map(len, groups))
        # The fusion keeps a share of the sum: one half of a fused reduce-scatter.
        if kind == "all-reduce" and frame.within("fusion") and _is_cut(frame, op.name, arrays[0]):
            kind = "reduce-scatter"
    return Op(
        kind, op.name, arrays, n, 1, op.source, groups, _strategy(frame, op), bool(started), notes
    )


def _starts(frame: Frame, op: Instruction) -> bool | None:
    """Whether `op` starts an asynchronous collective; None for a later piece of a carried one,
    which stands in the fusion that starts it, in each that it runs beside, and where it ends.
    """
    start = frame.site if frame.within("async-start") else op
    if start.opcode.endswith("-start"):
        return '"is_sync":true' not in start.says("backend_config")
    if CARRIED not in op.says("backend_config"):
        return False
    made = {op.name}  # and all that is computed from it
    for reader in frame:
        if not made.isdisjoint(reader.operands):
            made.add(reader.name)
            if reader.says("custom_call_target") == "AsyncCollectiveStart":
                return True
    return None


def _is_cut(frame: Frame, name: str, whole: Array) -> bool:
    """Whether every reader of a value, seen through what passes it on, takes a part of it."""

    def takes_part(op):
        if op.opcode in _PASSES_ON:
            return _is_cut(frame, op.name, whole)
        if op.opcode == "fusion":
            inside = frame.enter(op.called[0], op)
            given = (x for x in inside if x.opcode == "parameter" and inside.given(x) == name)
            return all(_is_cut(inside, x.name, whole) for x in given)
        return op.opcode == "dynamic-slice" and op.arrays[0].elements < whole.elements

    readers = [op for op in frame if name in op.operands]
    return bool(readers) and all(map(takes_part, readers))


def _notes(frame: Frame, op: Instruction) -> tuple[str, ...]:
    """The notes of a collective, see `Op`; a permute of a product's shares is named after it."""
    shares = op.source.rsplit("/", 1)[-1].startswith(("dot_general", "conv_general"))
    found = {
        "padded": any(frame.find(name).opcode == "pad" for name in op.operands),
        "windowed": shares and op.opcode.startswith("collective-permute"),
        "combined": len(op.operands) > 1 and not op.opcode.startswith("all-to-all"),
    }
    return tuple(note for note, holds in found.items() if holds)


def _strategy(frame: Frame, op: Instruction) -> str:
    """The compiler's name for how the chips exchange, "" where it does not say."""
    configs = (at.says("backend_config") for at in (op, frame.site) if at)
    said = (_STRATEGY.search(config) for config in configs)
    return next((found[2] or found[1] for found in said if found and any(found.groups())), "")


def _between_slices(op: Instruction, devices: int) -> tuple[str, int | None, Groups] | None:
    """(kind, how many take part, who takes part) of a send to another slice; None for another op.

    How many is None of a send to one device. Where not all `devices` of a slice take part, they are
    told by their places, not by numbers, and the groups are empty.
    """
    said = op.says("frontend_attributes")
    kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', said)
    if op.opcode != "send" or kind is None:
        return None
    target = re.search(r'_xla_megascale_target="?(.*?)"?,_xla_megascale_transfer_type', said)
    groups = target and _groups(target[1], devices)
    if kind[1] not in _TRANSFERS or not groups:
        raise ValueError(
            f"measure.collectives: cannot read the transfer between slices {op.name}: {said}; "
            f"known are {', '.join(_TRANSFERS)}, to {{1,2}}x{{0:7}} or {{{{100000,200000}}}}."
        )
    n = None if kind[1] == "ONE_TO_ONE" else max(map(len, groups[0]))
    return _TRANSFERS[kind[1]] + BETWEEN_SLICES, n, groups[1]


def _groups(target, devices):
    """(groups in any numbering, groups in the program's or none); None if they cannot be read."""
    if crossed := re.fullmatch(r"\{([\d,]+)\}x\{(\d+):(\d+)\}", target):
        slices = [int(number) - 1 for number in crossed[1].split(",")]
        places = range(int(crossed[2]), int(crossed[3]) + 1)
        groups = tuple(tuple(s * devices + place for s in slices) for place in places)
        return groups, groups if len(places) == devices else ()
    groups = hlo.lists(target)
    slices = sorted({number // _SLICE for group in groups for number in group})
    numbers = tuple(s * devices + i - devices for s in slices for i in range(devices))
    whole = len(groups) == 1 and "->" not in target and len(groups[0]) == len(numbers)
    return (groups, (numbers,) if whole else ()) if groups else None
