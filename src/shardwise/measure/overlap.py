"""The share of what is sent that can run beside products: by the schedule and a model of time."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import communication, hlo, links, matmuls
from .counts import Op, parted
from .hlo import Instruction
from .trips import Found, Frame, executed

_SHOWN = 16  # of the collectives in the table
_HANDS_ON = ("tuple", "bitcast", "copy", "opt-barrier")


@dataclass(frozen=True)
class Beside:
    """One collective instruction, with the products that can run beside it.

    Fields:
      op: the collective, an `Op`.
      times: how often it runs; the seconds below are those of one run.
      lanes: the directions of links that it takes, 1 in a node of GPUs, 0 between slices or nodes.
      seconds: how long it takes; of several that share links at once, its part of their time.
      products: the names of the instructions that multiply between its start and its end.
      arithmetic: the seconds of these products at the chip's peak.
      covered: the part of `seconds` with arithmetic beside it, of which no second counts twice.
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
    """Every collective of a program, a `Beside` in the tuple `found`, and sums over all their runs;
    `seconds` is the time of all communication.
    """

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
        sending = [(b.op.ring_bytes * b.times, b) for b in self.found if b.seconds]
        covered = sum(size * (b.covered / b.seconds) for size, b in sending)
        return covered / sum(size for size, _ in sending) if sending else 1.0

    def __repr__(self) -> str:
        lines = [
            f"{self.share:.0%} of the bytes sent can be covered, {self.exposed * 1e6:,.1f} of "
            f"{self.seconds * 1e6:,.1f} µs are exposed (a schedule and a model of time, not a "
            f"measurement)"
        ]
        for b in sorted(self.found, key=lambda b: -b.seconds * b.times)[:_SHOWN]:
            took = f"{b.times:4} × {b.seconds * 1e6:9,.1f} µs, {b.covered * 1e6:9,.1f} covered"
            lines.append(f"  {b.op.kind:20} {took}  {b.op.source}")
        return "\n".join(lines)


def overlap(program: Any, chip: Any) -> Overlap:
    """The `Overlap` of communication and products in a program for TPUs or GPUs.

    `program` is a compiled one, or its text, and `chip` a `Chip`, as `topology.CHIPS["v5e"]`. These
    programs are printed in the order in which they run. What stands between the start of a
    collective and its end can run beside it; synchronous collectives are exposed. How long each
    takes is a model: bytes over the links that the compiler's strategy uses, as its text and the
    torus let us infer, of GPUs over NVLink or the network; FLOPs, as `flops` counts them, over the
    peak in bfloat16; nothing else.

    A TPU's strategy has colors, parts of the array that travel at once. If its name begins with
    `UniDirection`, a color uses one direction of a link, in others (`StrategyRing`, `StrategyND`)
    two. The text does not say so: we infer it, since these have half as many colors for the same
    axes. No more links count than there are: along each of several axes two if it closes into a
    ring, one if it is a line or two chips; along one axis two, as if the chips lay on a ring.

    Permutes, all-to-alls and sums between two devices go from link to link between their places,
    the shorter way along one axis after another, and the link with the most bytes tells the time.
    Those that begin before any of them is awaited run at once, and take as long as the busiest
    link. Where places are not known, as in text, devices share no link, and a permute uses one.

    Raises:
      TypeError: `program` is neither a compiled program nor its text.
      ValueError: it is not scheduled, as those for CPUs are not; what `collectives` raises.
    """
    # Innermost first: what is beside a collective of a loop is beside none around the loop.
    groups = sorted(_begun("overlap", program), key=lambda group: -len(group[0].frame.around()))
    taken: Counter[Any] = Counter()  # seconds of each instruction that collectives have
    timed = (each for group in groups for each in _timed(chip, group))
    return Overlap(tuple(_beside(chip, taken, *each) for each in timed))


def _begun(who: str, program: Any) -> list[list[Found]]:
    """Every collective of a scheduled program where it begins, by the computation it stands in."""
    program = hlo.read(who, program)
    if not program.scheduled:
        raise ValueError(
            f"measure.{who}: the order of this program's instructions is no schedule; compile it "
            f"for TPUs, by topology.compile."
        )
    whole = Frame(program, program.entry)
    found, _ = executed(whole, communication.read, lambda op: op.ring_bytes)
    for i, begun in enumerate(found):
        # What a fusion starts or runs, it does in the order of the computation around it.
        if begun.frame.within("fusion", "async-start"):
            found[i] = begun._replace(frame=begun.frame.caller, op=begun.frame.site)
    return list(parted(found, lambda begun: id(begun.frame)).values())


def _timed(chip, group: list[Found]) -> list[tuple[Found, int, float]]:
    """(where it begins, directions of links, seconds) of each collective of one computation."""
    alone = (links.taken(begun, chip) for begun in group)
    directions, seconds, loads = map(list, zip(*alone, strict=True))
    # What the busiest link takes of those that run at once, in parts by what each takes alone.
    for those in _at_once(group, [i for i, load in enumerate(loads) if load]):
        busiest = max(sum((loads[i] for i in those), Counter()).values())
        in_turn = sum(max(loads[i].values()) for i in those)
        for i in those:
            seconds[i] *= busiest / in_turn
    return [*zip(group, directions, seconds, strict=True)]


def _at_once(group, chosen: Iterable[int]) -> list[list[int]]:
    """The `chosen` of a computation's collectives, in sets: all begin before one of them ends."""
    place = {op.name: i for i, op in enumerate(group[0].frame)}
    sets, first = [], 0  # where the first of the last set ends
    for i in chosen:
        start = place[group[i].op.name]
        end = start + 1
        if group[i].value.asynchronous:
            end = place.get(_until(group[i])[1], 0)
            end = end if end > start else len(place)  # or in the next trip
        if start >= first:
            sets, first = [*sets, []], len(place)
        sets[-1].append(i)
        first = min(first, end)
    return sets


def _beside(chip, taken, begun: Found, lanes, seconds) -> Beside:
    op, frame, _, times = begun
    beside = _until(begun)[0] if op.asynchronous else ()
    work = {x.name: matmuls.within(frame, x) / chip.peak() for x in beside}
    products, covered = tuple(name for name, time in work.items() if time), 0.0
    for name in products:
        left = work[name] - taken[id(frame), name] / times
        used = max(0.0, min(left, seconds - covered))
        covered += used
        for at, site in [(frame, name), *frame.around()]:
            taken[id(at), site] += used * times
    return Beside(op, times, lanes, seconds, products, sum(work.values(), 0.0), covered)


def _until(begun: Found) -> tuple[list[Instruction], str | None]:
    """(instructions that run beside a collective, the name of that which waits for it, or None)."""
    frame, order = begun.frame, list(begun.frame)
    after = order[order.index(begun.op) + 1 :]
    end, leaves_as = _follow(frame, after, {begun.op.name})
    if end is None and leaves_as is not None and frame.within("while"):  # until the next trip
        carried = (op for op in order if op.opcode == "get-tuple-element")
        held = {op.name for op in carried if op.attributes["index"] == str(leaves_as)}
        end, _ = _follow(frame, order, held)
        after = [*after, *order] if end else after
    return (after[: after.index(end)], end.name) if end else (after, None)


def _follow(frame, order, held):
    """(what waits for the collective, or None; the element of the result that it leaves as)."""
    for op in order:
        holding = [name for name in op.operands if name in held]
        if not holding:
            continue
        if op.opcode.endswith("-done") or op.opcode == "while":
            return op, None
        if op.opcode == "fusion":
            body = frame.enter(op.called[0], op)
            ends = (x for x in body if x.says("custom_call_target") == "AsyncCollectiveDone")
            read = (body.find(name) for x in ends for name in x.operands)
            if any(x.opcode == "parameter" and body.given(x) in held for x in read):
                return op, None
            if any(communication.CARRIED in x.says("backend_config") for x in body):
                held.add(op.name)
        elif op.opcode == "tuple" and op.name == frame.computation.root:
            return None, op.operands.index(holding[0])
        elif op.opcode in _HANDS_ON:
            held.add(op.name)
        elif op.opcode == "get-tuple-element":
            # The signal of a carried collective, or a start itself, handed on.
            if op.arrays == (("u32", ()),) or len(op.arrays) > 1:
                held.add(op.name)
    return None, None


class Span(NamedTuple):
    """The time of instruction `name`, from `start` to `end` in seconds. Its `lane` is "products",
    or "links" for a collective of that `kind`; products may run beside `asynchronous` ones.
    """

    lane: str
    name: str
    start: float
    end: float
    kind: str = ""
    asynchronous: bool = False


def lanes(program: Any, chip: Any, trips: int = 2) -> tuple[Span, ...]:
    """A timeline, a tuple of `Span`s, of the computation that sends most, usually a loop's body.

    `program` and `chip` are as for `overlap`. A `Span` is a product or a collective, in the order
    of the program and for as long as `overlap` estimates. Collectives follow each other; beside a
    synchronous one nothing runs, an asynchronous one is awaited where it ends. Of a loop the first
    `trips` are shown. Raises what `overlap` does.
    """
    groups = _begun("lanes", program)
    most = max(groups, key=lambda g: sum(b.value.ring_bytes * b.times for b in g), default=())
    return tuple(_spans(chip, most, trips)) if most else ()


def _spans(chip, group: list[Found], trips) -> Iterator[Span]:
    frame, now, free, awaited = group[0].frame, 0.0, 0.0, {}
    starts = {begun.op.name: (begun, seconds) for begun, _, seconds in _timed(chip, group)}
    for op in [*frame] * (trips if frame.within("while") else 1):
        now = max(now, awaited.pop(op.name, 0.0))
        if op.name in starts:
            begun, seconds = starts[op.name]
            begin, found = max(now, free), begun.value
            free = begin + seconds
            yield Span("links", op.name, begin, free, found.kind, found.asynchronous)
            if not found.asynchronous:
                now = free
            elif (end := _until(begun)[1]) is not None:
                awaited[end] = max(free, awaited.get(end, 0.0))
        if work := matmuls.within(frame, op) / chip.peak():
            yield Span("products", op.name, now, now + work)
            now += work
