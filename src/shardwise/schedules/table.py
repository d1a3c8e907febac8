"""Tasks, the table of which device runs them in which order, and the check that it can run."""

import collections
import dataclasses
import functools
import itertools
import numbers
from collections.abc import Sequence
from typing import NamedTuple

KINDS = {"F": "forward", "B": "backward", "I": "input half", "W": "weight half"}


class Task(NamedTuple):
    """A task: one kind of work, of one stage, on one microbatch; both are counted from 0.

    `kind` is "F", a forward, "B", a whole backward, or one of its halves: "I", the gradient of the
    stage's input, for which the stage before waits, or "W", that of its weights, for which nobody
    waits (Qi et al., 2024, Zero Bubble Pipeline Parallelism, where I is called B).
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, microbatch {self.microbatch})"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A table: `tasks[device]` is the order in which that device runs its tasks.

    `device_of[stage]` is the device on which a stage lives: its weights, its gradients, its tasks.
    """

    tasks: tuple[tuple[Task, ...], ...]
    stages: int
    microbatches: int
    device_of: tuple[int, ...]

    @property
    def devices(self) -> int:
        """The number of devices in the table."""
        return len(self.tasks)

    @functools.cached_property
    def _present(self) -> frozenset[Task]:
        return frozenset(task for order in self.tasks for task in order)

    def dependencies(self, task: Task) -> tuple[Task, ...]:
        """The tasks whose results `task` needs, on whatever device they run."""
        stage, kind, microbatch = task
        backward = [(stage, "F"), (stage + 1, "B"), (stage + 1, "I")]
        needs = {"F": [(stage - 1, "F")], "W": [(stage, "I")]}.get(kind, backward)
        tasks = (Task(*need, microbatch) for need in needs)
        return tuple(task for task in tasks if task in self._present)


Lists = Sequence[Sequence[tuple[int, str, int]]]  # of tasks, one list for each device


def from_tasks(tasks: Schedule | Lists) -> Schedule:
    """The `Schedule` of lists of tasks, one list for each device; a `Schedule` as it is.

    How many stages and microbatches there are, and where each stage lives, is read off the tasks.
    Whether the order can run is for `check`.

    Raises:
      ValueError: a list that is empty, an entry that is no task, a stage on two devices, or a
        stage or microbatch that no task has.
    """
    if isinstance(tasks, Schedule):
        return tasks
    orders = tuple(
        tuple(_task(entry, device, position) for position, entry in enumerate(order))
        for device, order in enumerate(tasks)
    )
    homes = {}
    for device, order in enumerate(orders):
        if not order:
            raise ValueError(f"Device {device} has no tasks; leave it out, or give it a stage.")
        for task in order:
            if homes.setdefault(task.stage, device) != device:
                raise ValueError(
                    f"Stage {task.stage} is on device {homes[task.stage]} and, with {task}, on "
                    f"device {device}; a stage's weights live on one: move its tasks there."
                )
    if not orders:
        raise ValueError("No devices: a schedule is a list of tasks for each device.")
    microbatches = {task.microbatch for order in orders for task in order}
    for name, found in (("stage", homes), ("microbatch", microbatches)):
        if missing := sorted(set(range(max(found) + 1)) - set(found)):
            raise ValueError(f"There is a {name} {max(found)} and no {missing[0]}; count from 0.")
    device_of = tuple(homes[stage] for stage in range(len(homes)))
    return Schedule(orders, len(homes), len(microbatches), device_of)


def _task(entry, device, position):
    where = f"Device {device}, position {position}: {entry!r}"
    if not isinstance(entry, tuple | list) or len(entry) != 3:
        raise ValueError(f"{where} is no task; write Task(stage, kind, microbatch).")
    task = Task(*entry)
    if task.kind not in KINDS:
        raise ValueError(f"{where} has kind {task.kind!r}; kinds are {', '.join(KINDS)}.")
    for name in ("stage", "microbatch"):
        number = getattr(task, name)
        if not isinstance(number, numbers.Integral) or number < 0:
            raise ValueError(f"{where} has {name} {number!r}; it is a count from 0.")
    return task


def check(schedule: Schedule | Lists) -> None:
    """Return if `schedule`, a `Schedule` or lists of tasks, runs every task; else raise.

    Raises:
      ValueError: a stage that has not, for each microbatch, once F and B, or once F, I and W; a
        stage with tasks on two devices; an order that comes to a stop, with the tasks that wait for
        each other; what `from_tasks` raises; a `Schedule` whose numbers are not those of its tasks.
    """
    found = from_tasks(getattr(schedule, "tasks", schedule))
    for name, form in ("stages", int), ("microbatches", int), ("device_of", tuple):
        told = getattr(found, name)
        if (said := form(getattr(schedule, name, told))) != told:
            raise ValueError(f"The schedule's {name} is {said}; by its tasks it is {told}.")
    _check_each_once(found)
    run_order(found)


def run_order(schedule: Schedule) -> list[Task]:
    """All tasks, once each, in one order in which each comes after its device's earlier ones and
    all that it needs; a ValueError if that comes to a stop.
    """
    done, left = {}, [collections.deque(order) for order in schedule.tasks]

    def ready(queue):
        return queue and done.keys() >= {*schedule.dependencies(queue[0])}

    while any(map(ready, left)):
        for queue in left:
            while ready(queue):
                done[queue.popleft()] = None
    if fronts := {device: queue[0] for device, queue in enumerate(left) if queue}:
        raise ValueError(_deadlock(schedule, done, fronts))
    return list(done)


def _check_each_once(schedule):
    seen = {}
    for device, order in enumerate(schedule.tasks):
        for position, task in enumerate(order):
            if task in seen:
                raise ValueError(
                    f"{task} stands twice on device {device}, at positions {seen[task]} and "
                    f"{position}; take one out."
                )
            seen[task] = position
    counts = range(schedule.microbatches), range(schedule.stages)
    for microbatch, stage in itertools.product(*counts):
        has = "".join(kind for kind in "FBIW" if Task(stage, kind, microbatch) in seen)
        if has not in ("FB", "FIW"):
            raise ValueError(
                f"Stage {stage}, microbatch {microbatch} has {', '.join(has) or 'no task'}; it "
                f"needs F and B, or F, I and W."
            )


def _deadlock(schedule, done, fronts):
    """The message of a deadlock: who waits for whom, of the tasks that devices cannot begin.

    What one waits for stands behind another one: following them leads round a ring.
    """
    device, told = next(iter(fronts)), {}
    while device not in told:
        need = next(need for need in schedule.dependencies(fronts[device]) if need not in done)
        at = schedule.device_of[need.stage]
        behind = "" if fronts[at] == need else f", which device {at} runs after {fronts[at]}"
        told[device], device = f"{fronts[device]} waits for {need}{behind}", at
    ring = itertools.dropwhile(lambda each: each != device, told)
    told = ";\n  ".join(told[each] for each in ring)
    return f"Deadlock: {told}.\nMove a task that is waited for further ahead."
