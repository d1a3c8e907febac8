"""A step of several programs, compiled stage by stage for the part of the slice that each has."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from shardwise.measure import Collectives, Differences, Fit, by_axis, collectives, fits
from shardwise.measure.counts import Op, table
from shardwise.measure.differences import became
from shardwise.topology.compiling import Compiled, compile
from shardwise.topology.lowering import program_text
from shardwise.topology.slices import ChipMesh

_COLUMNS = ("rank", "stages", "needed", "in", "live", "beyond", "sent along")


class Rank(NamedTuple):
    """The devices at one place along the stage axis, each alike: bytes of one of them.

    It needs most while `stage` runs the program `name`: what is `live`, by the schedule, and what
    the program needs `beyond` its arguments. `sent` is of a step, by mesh axes.
    """

    stages: tuple[int, ...]
    stage: int
    name: str
    live: int
    beyond: int
    sent: dict[tuple[str, ...], float]

    @property
    def needed(self) -> int:
        return self.live + self.beyond


@dataclasses.dataclass(frozen=True)
class Stages:
    """A step as the compiler made it: `programs[stage, name]`, and what each rank needs and sends.

    A program runs so many `times` in a step; `written` are its collectives by hand, before any
    compiler. A schedule and a compiler's account, not a measurement. Not counted: the few numbers
    that an optimizer exchanges between stages, and the count of the loss, which the last stage
    computes.
    """

    mesh: ChipMesh
    axis: str
    programs: dict[tuple[int, str], Compiled] = dataclasses.field(repr=False)
    times: dict[tuple[int, str], int] = dataclasses.field(repr=False)
    written: dict[tuple[int, str], Collectives] = dataclasses.field(repr=False)
    ranks: tuple[Rank, ...]

    @property
    def fit(self) -> Fit:
        """The `Fit` of the rank that needs most."""
        fullest = max(self.ranks, key=lambda rank: rank.needed)
        program = self.programs.get((fullest.stage, fullest.name))
        buffers = program.buffers if program else ()
        return Fit(fullest.needed, self.mesh.chips.chip.usable_hbm, buffers=buffers)

    @property
    def sent(self) -> dict[tuple[str, ...], float]:
        """A dict from mesh axes to ring bytes of a device in a step, the most of any rank."""
        every = {axes for rank in self.ranks for axes in rank.sent}
        return {a: max(rank.sent.get(a, 0) for rank in self.ranks) for a in sorted(every)}

    @property
    def sent_by_kind(self) -> dict[str, float]:
        """A dict from kind of collective, or "between stages", to ring bytes, counted as `sent`."""
        found: dict[str, float] = {}
        for rank in self.ranks:
            totals = Counter({"between stages": rank.sent.get((self.axis,), 0)})
            for key, times in self._runs(rank):
                for kind, counted in collectives(self.programs[key]).items():
                    totals[kind] += counted.ring_bytes * times
            found = {k: max(totals[k], found.get(k, 0)) for k in (*found, *totals)}
        return {kind: size for kind, size in found.items() if size}

    @property
    def sent_by_hand(self) -> float:
        """The ring bytes that a device sends as written, before any compiler, on the busiest
        rank: of collectives by hand, and between stages.
        """
        return max(map(self._by_hand, self.ranks))

    @property
    def busiest(self) -> int:
        """The place along the stage axis of the rank that `sent_by_hand` is of."""
        return max(range(len(self.ranks)), key=lambda i: self._by_hand(self.ranks[i]))

    def differences(self, rank: int, also: Iterable[Op] = ()) -> Differences:
        """`measure.differences` of a step on one rank, without what goes between stages.

        Args:
          rank: the place along the stage axis.
          also: as `measure.differences` takes it, of this rank.
        """
        runs = self._runs(self.ranks[rank])
        written = [op.repeated(n) for key, n in runs for op in self.written[key].ops]
        made = [op.repeated(n) for key, n in runs for op in collectives(self.programs[key]).ops]
        return became([*written, *also], made)

    def _by_hand(self, rank):
        passed = rank.sent.get((self.axis,), 0)
        return passed + sum(n * self.written[key].ring_bytes for key, n in self._runs(rank))

    def _runs(self, rank):
        return [(key, times) for key, times in self.times.items() if key[0] in rank.stages]

    def __repr__(self) -> str:
        rows = [self._row(i, rank) for i, rank in enumerate(self.ranks)]
        allowed = self.mesh.chips.chip.usable_hbm
        return f"{table(_COLUMNS, rows)}\nBytes of a device, of {allowed:,} allowed."

    def _row(self, i, rank):
        sent = ", ".join(f"{' × '.join(a)} {size:,.0f}" for a, size in rank.sent.items())
        sizes = [f"{size:,}" for size in (rank.needed, rank.live, rank.beyond)]
        stages = ", ".join(map(str, rank.stages))
        return (str(i), stages, sizes[0], f"{rank.name} of {rank.stage}", *sizes[1:], sent)


def compile_stages(step: Any, mesh: ChipMesh, cached: bool = True) -> Stages:
    """The `Stages` that the TPU compiler makes of a step, such as `layouts.lower` returns.

    Each program is compiled for the devices at its stage's place along the stage axis, which have
    to be a box of the torus; those that have the same text, once.

    Raises:
      DoesNotFit: a program alone needs more than a device has.
      ValueError: the mesh is another; a part is no box.
      ImportError, RuntimeError: as `compile`.
    """
    device_of, seen, written = step.schedule.device_of, {}, {}
    if mesh.shape.get(step.axis) != step.schedule.devices:
        raise ValueError(
            f"topology.compile_stages: the step has {step.schedule.devices} ranks along "
            f"{step.axis!r}, and the mesh is {mesh.shape}; lower it with this mesh's .abstract."
        )

    def one(stage, name, lowered):
        text = program_text(lowered)
        written[stage, name] = collectives(lowered)
        if text not in seen:
            part = mesh.part(**{step.axis: device_of[stage]})
            seen[text] = compile(lowered, part, cached=cached)
        return seen[text]

    programs, held = step.compiled(one)
    tasks = Counter((t.stage, t.kind) for order in step.schedule.tasks for t in order)
    times = {key: tasks.get(key, 1) for key in programs}
    ranks = _ranks(step, mesh, programs, times, held)
    return Stages(mesh, step.axis, programs, times, written, ranks)


def _ranks(step, mesh, programs, times, held):
    fullest = _fullest(step, programs, held)
    found = []
    for device, passed in enumerate(step.transfers(held)):
        part = mesh.part(**{step.axis: device}).abstract
        sent: dict[tuple[str, ...], float] = {(step.axis,): passed} if passed else {}
        for (stage, name), program in programs.items():
            if step.schedule.device_of[stage] == device:
                for axes, counted in by_axis(collectives(program), part).items():
                    size = counted.ring_bytes * times[stage, name]
                    sent[axes] = sent.get(axes, 0) + size
        mine = tuple(s for s, d in enumerate(step.schedule.device_of) if d == device)
        found.append(Rank(mine, *fullest[device], sent))
    return tuple(found)


def _fullest(step, programs, held):
    """{device: (stage, name, live, beyond) of its fullest moment}."""
    found: dict[int, tuple[int, str, int, int]] = {}
    for stage, name, live in step.moments(held):
        beyond, device = _beyond(programs.get((stage, name))), step.schedule.device_of[stage]
        if live + beyond > sum(found.get(device, (0, "", -math.inf, 0))[2:]):
            found[device] = stage, name, live, beyond
    return found


def _beyond(program: Compiled | None) -> int:
    """The bytes of HBM that a program needs beside its arguments, padding of these too."""
    if program is None:
        return 0
    return fits(program).needed - program.memory_analysis().argument_size_in_bytes
