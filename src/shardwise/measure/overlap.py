"""The share of what is sent that can run beside products: by the schedule and a model of time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from . import schedule, tpu
from .counts import Op
from .program import Frame
from .schedule import Begun

_SHOWN = 16  # of the collectives in the table


@dataclass(frozen=True)
class Beside:
    """One collective instruction, in one of its `times` runs; times in seconds.

    `seconds` is `op.ring_bytes` over `lanes` directions of links at the chip's bandwidth.
    `products` are the instructions with products that stand between its start and its end, and
    `arithmetic` is their time at the chip's peak; `covered` is what this collective has of it, no
    second given to two.
    """

    op: Op
    times: int | float
    lanes: int
    seconds: float
    products: tuple[str, ...] = ()
    arithmetic: float = 0.0
    covered: float = 0.0


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
        parts = [
            (b.op.ring_bytes * b.times, b.covered / b.seconds) for b in self.found if b.seconds
        ]
        return sum(n * share for n, share in parts) / sum(n for n, _ in parts) if parts else 1.0

    def __repr__(self) -> str:
        lines = [
            f"{self.share:.0%} of the bytes sent can be covered, {self.exposed * 1e6:,.1f} of "
            f"{self.seconds * 1e6:,.1f} µs are exposed (a schedule and a model of time, not a "
            f"measurement)"
        ]
        for b in sorted(self.found, key=lambda b: -b.seconds * b.times)[:_SHOWN]:
            how = "asynchronous" if b.op.asynchronous else "synchronous"
            lines.append(
                f"  {b.op.kind:20} {b.times:4} × {b.seconds * 1e6:9,.1f} µs  covered "
                f"{b.covered * 1e6:9,.1f}  {how}, {len(b.products)} products  {b.op.source}"
            )
        more = len(self.found) - _SHOWN
        return "\n".join(lines + [f"  and {more} more, shorter ones"] * (more > 0))


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
    found = schedule.begun("overlap", program)
    # Innermost first: what is beside a collective of a loop is beside none around the loop.
    groups = sorted(found, key=lambda group: -len(_around(group[0].frame)))
    taken: dict[tuple[int, str], float] = {}  # seconds of an instruction that collectives have
    every = (begun for group in groups for begun in group)
    return Overlap(tuple(_beside(chip, begun, taken, kernels or {}) for begun in every))


def _beside(chip, begun: Begun, taken, kernels) -> Beside:
    op, frame, start, times = begun
    lanes, seconds = tpu.links(op, chip, start)
    if not op.asynchronous:
        return Beside(op, times, lanes, seconds)
    beside, _ = schedule.until(begun)
    work = {x.name: schedule.flops(frame, x, kernels) / chip.peak() for x in beside}
    products, covered = tuple(name for name, time in work.items() if time), 0.0
    for name in products:
        left = work[name] - taken.get((id(frame), name), 0.0) / times
        used = max(0.0, min(left, seconds - covered))
        covered += used
        for at, site in [(frame, name), *_around(frame)]:
            taken[id(at), site] = taken.get((id(at), site), 0.0) + used * times
    return Beside(op, times, lanes, seconds, products, sum(work.values()), covered)


def _around(frame: Frame) -> list[tuple[Frame, str]]:
    """The frames around one, each with the name of its instruction that runs it."""
    found = []
    while frame.caller is not None and frame.site is not None:
        found.append((frame.caller, frame.site.name))
        frame = frame.caller
    return found


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
    groups = schedule.begun("lanes", program)
    if not groups:
        return ()
    most = max(groups, key=lambda group: sum(b.op.ring_bytes * b.times for b in group))
    shown = trips if most[0].frame.within("while") else 1
    return tuple(_spans(chip, most, kernels or {}, shown))


def _spans(chip, group: list[Begun], kernels, trips) -> Iterator[Span]:
    now, free, awaited = 0.0, 0.0, {}
    frame, starts = group[0].frame, {begun.start.name: begun for begun in group}
    for op in [*frame] * trips:
        now = max(now, awaited.pop(op.name, 0.0))
        if begun := starts.get(op.name):
            begin, found = max(now, free), begun.op
            free = begin + tpu.links(found, chip, op)[1]
            yield Span("links", op.name, begin, free, found.kind, found.asynchronous)
            if not found.asynchronous:
                now = free
            elif (end := schedule.until(begun)[1]) is not None:
                awaited[end] = max(free, awaited.get(end, 0.0))
        if work := schedule.flops(frame, op, kernels) / chip.peak():
            yield Span("products", op.name, now, now + work)
            now += work
