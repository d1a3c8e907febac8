"""The share of what is sent that can run beside products: by the schedule and a model of time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from . import communication, hlo, schedule
from .counts import Op
from .links import lanes_of, link_seconds
from .program import Frame, Instruction, Program, is_compiled
from .trips import executed

_SHOWN = 16  # of the collectives in the table
Begun = tuple[Op, Frame, Instruction, int]
_NOTE = "a schedule and a model of time, not a measurement"


@dataclass(frozen=True)
class Beside:
    """One collective instruction, in one of its `times` runs; times in seconds.

    `seconds` is `op.ring_bytes` over `lanes` directions of links at the chip's bandwidth.
    `products` are the instructions with products that stand between its start and its end, and
    `arithmetic` is their time at the chip's peak; `covered` is what this collective has of it, no
    second given to two. `cycles` are the compiler's own estimate of all that stands between.
    """

    op: Op
    times: int
    lanes: int
    seconds: float
    products: tuple[str, ...] = ()
    arithmetic: float = 0.0
    covered: float = 0.0
    cycles: int = 0


@dataclass(frozen=True)
class Overlap:
    """Every collective of a program with what stands beside it, and the sums over all runs."""

    found: tuple[Beside, ...]

    @property
    def seconds(self) -> float:
        return sum(b.seconds * b.times for b in self.found)

    @property
    def exposed(self) -> float:
        """Seconds of communication with no arithmetic beside them."""
        return self.seconds - sum(b.covered * b.times for b in self.found)

    @property
    def share(self) -> float:
        """The share of the bytes sent that is covered; 1 where nothing is sent."""
        sent = sum(b.op.ring_bytes * b.times for b in self.found)
        if not sent:
            return 1.0
        hidden = (
            b.op.ring_bytes * b.times * b.covered / b.seconds for b in self.found if b.seconds
        )
        return sum(hidden) / sent

    def __repr__(self) -> str:
        lines = [
            f"{self.share:.0%} of the bytes sent can be covered, {self.exposed * 1e6:,.1f} of "
            f"{self.seconds * 1e6:,.1f} µs are exposed ({_NOTE})"
        ]
        longest = sorted(self.found, key=lambda b: -b.seconds * b.times)
        for b in longest[:_SHOWN]:
            how = "asynchronous" if b.op.asynchronous else "synchronous"
            lines.append(
                f"  {b.op.kind:20} {b.times:4} × {b.seconds * 1e6:9,.1f} µs  covered "
                f"{b.covered * 1e6:9,.1f}  {how}, {len(b.products)} products  {b.op.source}"
            )
        more = len(longest) - _SHOWN
        return "\n".join([*lines, *([f"  and {more} more, shorter ones"] if more > 0 else [])])


def overlap(program: Any, chip: Any, kernels: Mapping[str, int] | None = None) -> Overlap:
    """The `Overlap` of a program compiled for TPUs, on a `chip` of `topology.CHIPS`.

    A TPU's program is printed in the order in which it runs. What stands there between the start
    of a collective and its end can run beside it; synchronous collectives are exposed. How long
    each takes is a model: bytes over the links that the compiler's strategy uses, as its text and
    the torus let us infer (below); FLOPs over the peak in bfloat16, Pallas kernels' by `kernels` as
    in `flops`. Other work is not counted.

    A strategy has colors, parts of the array that travel at once. Where its name begins with
    `UniDirection` each counts for one direction, else (`StrategyRing`, `StrategyND`) for two: for
    the same axes the compiler then has half as many. The text does not say so. No more links count
    than there are: along each of several axes two where it closes into a ring, one where it is a
    line, or two chips; along one axis two, as if the chips lay on a ring. A permute goes one way.

    Raises:
      TypeError: `program` is no compiled program.
      ValueError: it is not scheduled, as those for CPUs are not; what `collectives` raises.
    """
    return Overlap(tuple(_beside(scheduled("overlap", program), chip, kernels or {})))


def scheduled(who: str, program: Any) -> Program:
    """A compiled program whose text is its schedule; TypeError or ValueError for another."""
    if not is_compiled(program) and not isinstance(program, str):
        raise TypeError(
            f"measure.{who} takes a compiled program, and got {type(program).__name__}; pass "
            f"what topology.compile returns."
        )
    text = program if isinstance(program, str) else program.as_text()
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError(
            f"measure.{who}: the order of this program's instructions is no schedule; compile it "
            f"for TPUs, by topology.compile."
        )
    return hlo.parse(text)


def begun(program: Program) -> list[list[Begun]]:
    """Every collective where it begins, those of one computation together, and its times run."""
    groups: dict[int, list[Begun]] = {}

    def read(frame, op):
        found = communication.read(program, frame, op)
        # What a fusion starts or runs, it does in the order of the computation around it.
        inner = frame.site is not None and frame.site.opcode in ("fusion", "async-start")
        return found and (found, frame.caller if inner else frame, frame.site if inner else op)

    for (found, frame, start), times in executed(program, read, lambda f: f[0].ring_bytes):
        groups.setdefault(id(frame), []).append((found, frame, start, times))
    return list(groups.values())


def _beside(program: Program, chip: Any, kernels: Mapping[str, int]) -> Iterator[Beside]:
    # Innermost first: what is beside a collective of a loop is beside none around the loop.
    taken: dict[tuple[int, str], float] = {}
    for group in sorted(begun(program), key=lambda group: -len(_around(group[0][1]))):
        yield from _shared(program, chip, group, taken, kernels)


def _shared(program, chip, group, taken, kernels):
    """The `Beside` of each collective of one computation; no product's time is given to two."""
    for found, frame, start, times in group:
        lanes = lanes_of(found, chip, start)
        seconds = link_seconds(found, chip, start)
        if not found.asynchronous:
            yield Beside(found, times, lanes, seconds)
            continue
        beside = schedule.between(program, frame, start)
        count = (schedule.flops(program, frame, op, kernels) for op in beside)
        work = {op.name: n / chip.peak() for op, n in zip(beside, count, strict=True)}
        products, covered = tuple(name for name, time in work.items() if time), 0.0
        for name in products:
            left = work[name] - taken.get((id(frame), name), 0.0) / times
            used = max(0.0, min(left, seconds - covered))
            covered += used
            for at, site in [(frame, name), *_around(frame)]:
                taken[id(at), site] = taken.get((id(at), site), 0.0) + used * times
        cycles = sum(schedule.cycles(program, frame, op) for op in beside)
        arithmetic = sum(work.values())
        yield Beside(found, times, lanes, seconds, products, arithmetic, covered, cycles)


def _around(frame: Frame) -> list[tuple[Frame, str]]:
    """The frames around one, each with the name of its instruction that runs it."""
    found = []
    while frame.caller is not None and frame.site is not None:
        found.append((frame.caller, frame.site.name))
        frame = frame.caller
    return found
