"""A TPU's schedule as two lanes: when products run and when bytes are sent, in model time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import schedule
from .overlap import begun, link_seconds, scheduled
from .program import Frame, Instruction, Program


@dataclass(frozen=True)
class Span:
    """The time from `start` to `end`, in seconds, in which instruction `name` occupies its lane.

    A lane is "products" or, of a collective, "links"; `kind` is then which, and `asynchronous`
    tells whether products may run beside it.
    """

    lane: str
    name: str
    start: float
    end: float
    kind: str = ""
    asynchronous: bool = False


def lanes(
    program: Any, chip: Any, kernels: Mapping[str, int] | None = None, trips: int = 2
) -> tuple[Span, ...]:
    """The spans of that computation of a program which sends the most: a loop's body, in general.

    Its instructions run in the order in which they stand, products for their FLOPs over the peak,
    collectives for what `overlap` takes them to last, one after the other. A synchronous one lets
    nothing else run; an asynchronous one is waited for where it ends. Other work takes no time, so
    this is a schedule and a model, not a measurement. Of a loop, the first `trips` are shown.

    Raises:
      TypeError: `program` is no compiled program.
      ValueError: it is not scheduled; what `collectives` raises.
    """
    parsed = scheduled("lanes", program)
    groups = begun(parsed)
    if not groups:
        return ()
    most = max(groups, key=lambda group: sum(found.ring_bytes * n for found, *_, n in group))
    frame = most[0][1]
    known = {start.name: _sending(parsed, chip, each) for each in most for start in [each[2]]}
    in_loop = frame.site is not None and frame.site.opcode == "while"
    return tuple(_run(parsed, chip, frame, known, kernels or {}, trips if in_loop else 1))


def _sending(program: Program, chip: Any, each: tuple) -> tuple[Any, float, str | None]:
    """The collective, the seconds it takes, and what waits for it."""
    found, frame, start, _ = each
    seconds = link_seconds(found, chip, start)
    return found, seconds, schedule.end(program, frame, start) if found.asynchronous else None


def _run(program, chip, frame: Frame, known, kernels, trips):
    now, free, awaited = 0.0, 0.0, {}
    for op in [*frame.computation.instructions.values()] * trips:
        now = max(now, awaited.pop(op.name, 0.0))
        if op.name in known:
            found, seconds, end = known[op.name]
            begin = max(now, free)
            free = begin + seconds
            yield Span("links", op.name, begin, free, found.kind, found.asynchronous)
            if not found.asynchronous:
                now = free
            elif end is not None:
                awaited[end] = max(free, awaited.get(end, 0.0))
        if work := _work(program, chip, frame, op, kernels):
            yield Span("products", op.name, now, now + work)
            now += work


def _work(program, chip, frame: Frame, op: Instruction, kernels) -> float:
    return schedule.flops(program, frame, op, kernels) / chip.peak()
