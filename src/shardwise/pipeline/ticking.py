"""Tables of ticks of a schedule: each device's task at each, and the slots in which arrays lie."""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from shardwise import schedules
from shardwise.schedules import Schedule, Task
from shardwise.schedules.timing import COSTS, simulated

READERS = {"act": "F", "cot": "I", "kept": "FIW", "pend": "IW"}  # the tasks at which slots lie


class Ticks(NamedTuple):
    """The table that `ticks` makes."""

    columns: dict[str, np.ndarray]
    slots: dict[str, int]
    rings: dict[str, tuple[int, ...]]


@functools.lru_cache(maxsize=32)
def ticks(schedule: Schedule, backward: bool = True) -> Ticks:
    """The table of a schedule by ticks: a task takes one, a whole backward two, for its two halves.

    What comes back has `.columns`, {name: int32 [ticks, devices]}; `.slots`, {"act", "cot", "kept"
    or "pend": the most slots for such arrays that a device needs}; and `.rings`, {"act" or "cot":
    the distances k, in devices, that activations or cotangents go}. Columns are

    - "kind": 0 where the device has no task, 1 for F, 2 for I, 3 for W;
    - "stage" and "microbatch": those of the task;
    - "act", "cot", "kept" and "pend": the slot that the task reads or fills, of an activation or a
      cotangent that has arrived, of what a forward keeps, of what an I leaves to its W;
    - "act+k" and "cot+k", as "act+1": the slot for what the device k places before this one sends
      at the end of the tick; -1 for nothing. Other columns have 0 where they do not apply.

    Without `backward` the table has the forward tasks alone.

    Raises:
      ValueError: what `schedules.check` raises.
    """
    schedules.check(schedule)
    if not backward:
        forwards = [tuple(t for t in order if t.kind == "F") for order in schedule.tasks]
        schedule = dataclasses.replace(schedule, tasks=tuple(forwards))
    at = {  # the tick of each task
        task._replace(kind=kind): int(start) + i
        for task, start in simulated(schedule, COSTS).start.items()
        for i, kind in enumerate("IW" if task.kind == "B" else task.kind)
    }
    home, n = schedule.device_of, schedule.devices
    shape = max(at.values()) + 1, n
    names = "kind", "stage", "microbatch", *READERS
    columns = {name: np.zeros(shape, np.int32) for name in names}
    slots: dict[str, dict] = {name: {} for name in READERS}  # {(stage, microbatch): its slot}
    busy = {name: [[] for _ in range(n)] for name in READERS}  # each device's slots, until when
    rings: dict[str, set[int]] = {"act": set(), "cot": set()}
    for task in sorted(at, key=lambda task: (at[task], home[task.stage])):
        (s, kind, j), t, d = task, at[task], home[task.stage]
        if backward and kind in "FI":
            own = "kept" if kind == "F" else "pend"
            slots[own][s, j] = _taken(busy[own][d], t, at[Task(s, "W", j)])
        told = dict(kind="_FIW".index(kind), stage=s, microbatch=j)
        told |= {name: slots[name].get((s, j), 0) for name in READERS if kind in READERS[name]}
        for name, value in told.items():
            columns[name][t, d] = value
        sent, to = {"F": ("act", s + 1), "I": ("cot", s - 1)}.get(kind, ("", -1))
        if 0 <= to < schedule.stages:
            e = home[to]
            ring = (e - d) % n
            rings[sent].add(ring)
            column = columns.setdefault(f"{sent}+{ring}", np.full(shape, -1, np.int32))
            slots[sent][to, j] = _taken(busy[sent][e], t + 1, at[Task(to, kind, j)])
            column[t, e] = slots[sent][to, j]
    most = {name: max(map(len, found)) for name, found in busy.items()}
    return Ticks(columns, most, {name: tuple(sorted(found)) for name, found in rings.items()})


def _taken(busy: list[int], first: int, last: int) -> int:
    """The free slot of the lowest number, taken from one tick to another; `first` never falls."""
    slot = next((k for k, until in enumerate(busy) if until < first), len(busy))
    busy[slot : slot + 1] = [last]
    return slot
