"""Threads, one for each device, that dispatch its tasks when what they need is on its way."""

import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from shardwise.schedules import Schedule, Task

# How many tasks a rank dispatches beyond the one that runs. A device never waits for Python then,
# and holds the activations of one task more than the schedule says, not those of all to come.
AHEAD = 1


class TaskError(RuntimeError):
    """The error of a run that stopped since a task failed; its cause is the error of the task."""


class Run:
    """A run whose tasks are all dispatched. `times` is {task: (start, end)} if it was timed."""

    def __init__(self, state: "_State", timed: bool):
        self._state, self.times = state, state.times if timed else None

    def wait(self) -> None:
        """Return when all tasks have run.

        Raises:
          TaskError: one failed, the first in the order of dispatch.
        """
        self._state.raise_first(None)


def run(schedule: Schedule, perform: Callable[[Task], Any], timed: bool = False) -> Run:
    """Call `perform(task)` for every task, in each device's order.

    `perform` dispatches the task, and returns an array (or a tree of them) that is there when it
    has run. Every device has a thread, so that a call which blocks keeps no other device waiting.
    Before a task is dispatched, those that it depends on have been; the device itself waits for
    what they compute. If `timed`, the thread waits for each task, and notes start and end, in
    seconds from the start of the run; then what a task depends on has run before it starts.

    Raises:
      TaskError: a task failed, when dispatched or while it ran; no thread dispatches another.
    """
    state = _State()
    drive = _drive_timed if timed else _drive
    threads = [
        threading.Thread(target=drive, args=(schedule, order, perform, state), name=f"rank {i}")
        for i, order in enumerate(schedule.tasks)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # an interrupt: the threads must not go on without us
        state.stop(None, error)
        raise
    if state.failure is not None:
        state.raise_first(state.failure)
    return Run(state, timed)


class _State:
    """The state of a run: what has been dispatched, seen by all threads."""

    def __init__(self):
        self.changed = threading.Condition()
        self.dispatched, self.times, self.failure = {}, {}, None
        self.begin = time.perf_counter()

    def ready(self, needed):
        """Wait until all that is needed is dispatched; False if the run has stopped."""
        with self.changed:
            self.changed.wait_for(
                lambda: self.failure or all(task in self.dispatched for task in needed)
            )
            return self.failure is None

    def done(self, task, result):
        with self.changed:
            self.dispatched[task] = result
            self.changed.notify_all()

    def stop(self, task, error):
        with self.changed:
            self.failure = self.failure or (task, error)
            self.changed.notify_all()

    def raise_first(self, failure):
        """Raise TaskError for the first task that failed, if any: those that read it fail too."""
        for task, result in self.dispatched.items():
            try:
                jax.block_until_ready(result)
            except Exception as error:
                failure = task, error
                break
        if failure is not None:
            task, error = failure
            raise TaskError(f"pipeline: {task} failed: {type(error).__name__}: {error}") from error


def _drive(schedule, order, perform, state):
    for i, task in enumerate(order):
        if not state.ready(schedule.dependencies(task)):
            return
        try:
            state.done(task, perform(task))
            if i >= AHEAD:
                jax.block_until_ready(state.dispatched[order[i - AHEAD]])
        except BaseException as error:
            state.stop(task, error)
            return


def _drive_timed(schedule, order, perform, state):
    for task in order:
        if not state.ready(schedule.dependencies(task)):
            return
        try:
            start = time.perf_counter()
            result = jax.block_until_ready(perform(task))
            state.times[task] = (start - state.begin, time.perf_counter() - state.begin)
            state.done(task, result)
        except BaseException as error:
            state.stop(task, error)
            return
