"""The check that a schedule can run at all, and the reason if it cannot."""

import itertools

from shardwise.schedules.table import Lists, Schedule, Task, from_tasks


def check(schedule: Schedule | Lists) -> None:
    """Return if `schedule`, a `Schedule` or lists of tasks, runs every task; else raise.

    Raises:
      ValueError: a task that is missing, doubled, split in half or on a device that does not hold
        its stage; or an order that comes to a stop, with the first task that can never run and
        the ring of tasks that wait for each other.
    """
    found = from_tasks(getattr(schedule, "tasks", schedule))
    for name, form in ("stages", int), ("microbatches", int), ("device_of", tuple):
        told = getattr(found, name)
        if (said := form(getattr(schedule, name, told))) != told:
            raise ValueError(f"The schedule's {name} is {said}; by its tasks it is {told}.")
    _check_each_once(found)
    run_order(found)


def run_order(schedule: Schedule | Lists) -> list[Task]:
    """All tasks in one order in which each comes after its device's earlier ones and all it needs.

    Of a schedule in which each task stands once, as `check` finds.

    Raises:
      ValueError: the order comes to a stop.
    """
    schedule = from_tasks(schedule)
    done, position, before = {}, [0] * schedule.devices, -1
    while len(done) > before:
        before = len(done)
        for device, order in enumerate(schedule.tasks):
            for task in order[position[device] :]:
                if not done.keys() >= {*schedule.dependencies(task)}:
                    break
                done[task] = None
                position[device] += 1
    blocked = [d for d, order in enumerate(schedule.tasks) if position[d] < len(order)]
    if blocked:
        first = min(blocked, key=position.__getitem__)
        raise ValueError(_deadlock(schedule, done, position, first))
    return list(done)


def _check_each_once(schedule: Schedule) -> None:
    seen = {}
    for device, order in enumerate(schedule.tasks):
        for position, task in enumerate(order):
            if task in seen:
                raise ValueError(
                    f"{task} stands twice on device {device}, at positions {seen[task]} and "
                    f"{position}; take one out."
                )
            seen[task] = position
    pairs = itertools.product(range(schedule.microbatches), range(schedule.stages))
    for microbatch, stage in pairs:
        has = "".join(kind for kind in "FBIW" if Task(stage, kind, microbatch) in seen)
        if has not in ("FB", "FIW"):
            raise ValueError(
                f"Stage {stage}, microbatch {microbatch} has {', '.join(has) or 'no task'}; it "
                f"needs F and B, or F, I and W."
            )


def _deadlock(schedule: Schedule, done: dict, position: list[int], device: int) -> str:
    """The message of a deadlock: who waits for whom, from a blocked device on.

    It waits for a task that stands behind another blocked one, so following them must come back to
    where it has been.
    """
    told, visited = [], set()
    while device not in visited:
        visited.add(device)
        task = schedule.tasks[device][position[device]]
        missing = next(need for need in schedule.dependencies(task) if need not in done)
        at = schedule.device_of[missing.stage]
        front = schedule.tasks[at][position[at]]
        behind = "" if front == missing else f", which device {at} runs after {front}"
        told.append(f"{task} waits for {missing}{behind}")
        device = at
    return "Deadlock: " + ";\n  ".join(told) + ".\nMove a task that is waited for further ahead."
