"""Tables of ticks of a schedule: each device's task at each, and the slots in which arrays lie."""

import dataclasses
import functools

import numpy as np

from shardwise import schedules
from shardwise.schedules import Schedule, Task
from shardwise.schedules.checking import run_order

UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}  # ticks; a whole backward is its two halves
NAMES = ("act", "cot", "kept", "pend")


class Slots:
    """The slots of one device, of which the free one with the lowest number is taken first."""

    def __init__(self):
        self.free: list[int] = []
        self.most = 0

    def take(self) -> int:
        """Take a free slot, until it is given back."""
        if self.free:
            return self.free.pop(0)
        self.most += 1
        return self.most - 1

    def give(self, slot: int) -> None:
        """Give a slot back, which is free again."""
        self.free = sorted([*self.free, slot])


@dataclasses.dataclass(frozen=True)
class Ticks:
    """A table: int32 columns [ticks, devices] by name, and the most slots a device needs of a kind.

    `kind` is 0 without a task, 1 for F, 2 for I, 3 for W; `stage`, `microbatch` and `chunk`, which
    of the device's stages it is, tell the task. `act`, `cot`, `kept` and `pend` are the slots that
    it reads or fills: of an activation or a cotangent that has arrived, of what a forward keeps, of
    what an I leaves to its W. `act+1`, and so on for each of the `rings`, is the slot into which
    what the device that many places before sends at this tick's end goes; -1 for nothing.
    """

    columns: dict[str, np.ndarray]
    slots: dict[str, int]
    rings: dict[str, tuple[int, ...]]


@functools.lru_cache(maxsize=32)
def ticks(schedule: Schedule, backward: bool = True) -> Ticks:
    """The table of a schedule whose tasks take a tick each, and a whole backward two.

    What a slot holds is as live as `schedules.Timeline` counts it. Without `backward`, of the
    forward tasks alone, in the same order.
    """
    starts = schedules.timeline(schedule, UNITS).start if backward else _forwards(schedule)
    placed = {
        (int(start) + i, task._replace(kind=kind))
        for task, start in starts.items()
        for i, kind in enumerate("IW" if task.kind == "B" else task.kind)
    }
    last = max(t for t, _ in placed)
    table: list[list[Task | None]] = [[None] * schedule.devices for _ in range(last + 1)]
    for t, task in placed:
        table[t][schedule.device_of[task.stage]] = task
    return _Filling(schedule, table, backward).filled()


def _forwards(schedule):
    """{forward task: its tick}, the first at which its device is free and its input is there."""
    starts: dict[Task, int] = {}
    free = [0] * schedule.devices
    for task in run_order(schedule):
        if task.kind != "F":
            continue
        device = schedule.device_of[task.stage]
        ready = [starts[needed] + 1 for needed in schedule.dependencies(task)]
        starts[task] = max([free[device], *ready])
        free[device] = starts[task] + 1
    return starts


class _Filling:
    def __init__(self, schedule, table, backward):
        self.schedule, self.table, self.backward = schedule, table, backward
        self.shape = len(table), schedule.devices
        names = ("kind", "stage", "microbatch", "chunk", *NAMES)
        self.columns = {name: np.zeros(self.shape, np.int32) for name in names}
        self.slots = {name: [Slots() for _ in range(schedule.devices)] for name in NAMES}
        self.at: dict[tuple, int] = {}

    def filled(self):
        for t, row in enumerate(self.table):
            gone = []
            for d, task in enumerate(row):
                if task is not None:
                    gone += self._task(t, d, *task)
            for slots, slot in gone:
                slots.give(slot)
            for d, task in enumerate(row):
                if task is not None:
                    self._sent(t, d, *task)
        most = {name: max(s.most for s in slots) for name, slots in self.slots.items()}
        rings: dict[str, list[int]] = {"act": [], "cot": []}
        for name in sorted(self.columns.keys() - {"kind", "stage", "microbatch", "chunk", *NAMES}):
            rings[name[:3]].append(int(name[4:]))
        return Ticks(self.columns, most, {name: tuple(found) for name, found in rings.items()})

    def _task(self, t, d, stage, kind, j):
        """Write a task and its slots; return the slots that are free at the tick's end."""
        s, gone = self.schedule, []
        chunk = sum(s.device_of[other] == d for other in range(stage))
        told = dict(kind="_FIW".index(kind), stage=stage, microbatch=j, chunk=chunk)
        if kind == "F" and stage > 0:
            told["act"] = self.at.pop(("act", stage, j))
        if kind == "I" and stage < s.stages - 1:
            told["cot"] = self.at.pop(("cot", stage, j))
        gone += [(self.slots[name][d], told[name]) for name in ("act", "cot") if name in told]
        if kind == "F" and self.backward:
            self.at["kept", stage, j] = self.slots["kept"][d].take()
        if kind == "I":
            self.at["pend", stage, j] = self.slots["pend"][d].take()
        if self.backward:
            told["kept"] = self.at["kept", stage, j]
        if kind != "F":
            told["pend"] = self.at["pend", stage, j]
        if kind == "W":
            gone += [(self.slots[name][d], self.at.pop((name, stage, j))) for name in NAMES[2:]]
        for name, value in told.items():
            self.columns[name][t, d] = value
        return gone

    def _sent(self, t, d, stage, kind, j):
        s = self.schedule
        to = {"F": stage + 1, "I": stage - 1}.get(kind, -1)
        if not 0 <= to < s.stages:
            return
        name, e = ("act" if kind == "F" else "cot"), s.device_of[to]
        self.at[name, to, j] = slot = self.slots[name][e].take()
        column = f"{name}+{(e - d) % s.devices}"
        self.columns.setdefault(column, np.full(self.shape, -1, np.int32))[t, e] = slot
