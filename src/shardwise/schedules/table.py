"""Tasks, and the table of which device runs them in which order."""

import dataclasses
import functools
import numbers
from collections.abc import Sequence
from typing import NamedTuple

KINDS = {"F": "forward", "B": "backward", "I": "input half", "W": "weight half"}


class Task(NamedTuple):
    """A task: one kind of work, of one stage, on one microbatch; kinds are the keys of `KINDS`.

    A backward is either one task, B, or two halves: I, which the stage before waits for, and W, for
    which nobody waits (Qi et al., 2024, Zero Bubble Pipeline Parallelism).
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
    Two tasks that run as one are two neighbours.
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

    def backward(self, stage: int, microbatch: int) -> Task:
        """The task that yields the cotangent of the stage's input: I if split, else B."""
        split = Task(stage, "I", microbatch)
        return split if split in self._present else Task(stage, "B", microbatch)

    def dependencies(self, task: Task) -> tuple[Task, ...]:
        """The tasks that must have ended before `task` can start, on whatever device they run.

        Only data counts here; that a device runs one task at a time is the table's own order.
        """
        stage, kind, microbatch = task
        if kind == "W":
            return (Task(stage, "I", microbatch),)
        if kind == "F":
            return (Task(stage - 1, "F", microbatch),) if stage else ()
        forward = Task(stage, "F", microbatch)
        if stage == self.stages - 1:
            return (forward,)
        return (forward, self.backward(stage + 1, microbatch))


Lists = Sequence[Sequence[tuple[int, str, int]]]  # of tasks, one list for each device


def from_tasks(tasks: Schedule | Lists) -> Schedule:
    """The `Schedule` of lists of tasks, one list for each device, written by hand or by a program.

    How many stages and microbatches there are, and where each stage lives, is read off the tasks.
    Whether the order can run is for `check`. A `Schedule` is returned as it is.

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


def _task(entry: object, device: int, position: int) -> Task:
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
