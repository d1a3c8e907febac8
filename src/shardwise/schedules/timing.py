"""The times at which tasks of a schedule run, and the bubble and the memory that follow."""

import dataclasses
import functools
import types
from collections.abc import Mapping

from shardwise.schedules.table import Lists, Schedule, Task, check, from_tasks, run_order

Costs = Mapping[str | tuple[int, str] | Task, float]  # by kind, by stage and kind, by task

COSTS: Costs = types.MappingProxyType({"F": 1, "B": 2, "I": 1, "W": 1})


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A schedule with `start[task]` and `end[task]`; all times are in the unit of the costs."""

    schedule: Schedule
    start: dict[Task, float]
    end: dict[Task, float]

    @functools.cached_property
    def makespan(self) -> float:
        """The time from 0 to the end of the last task."""
        return max(self.end.values())

    @functools.cached_property
    def busy(self) -> tuple[float, ...]:
        """The time that each device spends in tasks."""
        return tuple(
            sum(self.end[task] - self.start[task] for task in order)
            for order in self.schedule.tasks
        )

    @functools.cached_property
    def gaps(self) -> tuple[float, ...]:
        """The time that each device is idle between its first start and its last end.

        Where it may begin the next step before the others have ended this one, what it waits at
        either end costs nothing (Qi et al., 2024).
        """
        return tuple(
            self.end[order[-1]] - self.start[order[0]] - busy
            for order, busy in zip(self.schedule.tasks, self.busy, strict=True)
        )

    @property
    def bubble(self) -> float:
        """The bubble fraction, 0 to 1: the idle share of all devices' time up to the makespan."""
        whole = self.makespan * self.schedule.devices
        return 1 - sum(self.busy) / whole if whole else 0.0

    @functools.cached_property
    def live(self) -> tuple[tuple[tuple[float, int], ...], ...]:
        """For each device, pairs (time, number of activations that live there from then on).

        Those of a stage and microbatch live from the start of its F to the end of its B, or its W.
        """
        return self._counts({"F": self.start}, {"B": self.end, "W": self.end})

    @property
    def peak_live(self) -> tuple[int, ...]:
        """The most (stage, microbatch) pairs whose activations live on each device."""
        return _most(self.live)

    @property
    def peak_weights_pending(self) -> tuple[int, ...]:
        """The most (stage, microbatch) pairs on each device between the end of I and that of W."""
        return _most(self._counts({"I": self.end}, {"W": self.end}))

    def _counts(self, opening, closing):
        found = []
        for order in self.schedule.tasks:
            events = [(opening[t.kind][t], 1) for t in order if t.kind in opening]
            events += [(closing[t.kind][t], -1) for t in order if t.kind in closing]
            counts, number = {0: 0}, 0
            for time, change in sorted(events):  # at one instant, what ends makes room first
                number += change
                counts[time] = number
            found.append(tuple(counts.items()))
        return tuple(found)


def _most(counts):
    return tuple(max(number for _, number in of_device) for of_device in counts)


def timeline(schedule: Schedule | Lists, costs: Costs = COSTS, transfer: float = 0) -> Timeline:
    """The `Timeline` of a schedule, if each device runs its next task as soon as it can.

    `costs` maps a kind to the time that it takes, by default `{"F": 1, "B": 2, "I": 1, "W": 1}`; a
    key `(stage, kind)`, or a whole `Task`, takes precedence. `transfer` is the time from the end of
    a task until another device has its result; it keeps neither device from its work.

    Raises:
      ValueError: what `check` raises, no cost for a task, or a negative time.
    """
    schedule = from_tasks(schedule)
    check(schedule)
    if transfer < 0:
        raise ValueError(f"timeline: transfer is {transfer}; it is a time, 0 or more.")
    return simulated(schedule, costs, transfer)


def simulated(schedule: Schedule, costs: Costs, transfer: float = 0) -> Timeline:
    """The `timeline` of a schedule that `check` has passed, or of the forward tasks of one."""
    start, end, free = {}, {}, [0] * schedule.devices
    for task in run_order(schedule):
        device = schedule.device_of[task.stage]
        arrivals = (
            end[needed] + (transfer if schedule.device_of[needed.stage] != device else 0)
            for needed in schedule.dependencies(task)
        )
        start[task] = max(free[device], *arrivals, 0)
        end[task] = free[device] = start[task] + _cost(costs, task)
    return Timeline(schedule, start, end)


def _cost(costs, task):
    for key in (task, (task.stage, task.kind), task.kind):
        if key in costs:
            if costs[key] < 0:
                raise ValueError(f"timeline: {key!r} costs {costs[key]}; it is a time, 0 or more.")
            return costs[key]
    raise ValueError(
        f"timeline: no cost for {task}; give one for {task.kind!r}, or for "
        f"{(task.stage, task.kind)!r}. There are costs for {list(costs)}."
    )
