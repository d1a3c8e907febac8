"""Pipeline schedules as data: the order in which each device runs its tasks, and what follows.

A schedule is a table: `tasks[device]` lists a device's tasks in order. When a task starts, how long
devices wait and how many microbatches are live on them follows from it and from what tasks cost:

    schedule = schedules.SCHEDULES["1f1b"](stages=4, devices=4, microbatches=8)
    run = schedules.timeline(schedule, {"F": 1, "B": 2}, transfer=0.1)
    run.makespan, run.bubble, run.peak_live

Lists of tasks written by hand are a schedule like any other, for `check`, `timeline` and
`from_tasks`. A new schedule is one function and one entry in `SCHEDULES`.
"""

from shardwise.schedules.published import SCHEDULES, spread
from shardwise.schedules.table import Schedule, Task, check, from_tasks
from shardwise.schedules.timing import Timeline, timeline

__all__ = ["SCHEDULES", "Schedule", "Task", "Timeline", "check", "from_tasks", "spread", "timeline"]
