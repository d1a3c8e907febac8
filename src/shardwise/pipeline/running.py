"""A thread for each device, which starts each of its tasks when what that needs is there."""

import threading
import time


class TaskError(RuntimeError):
    """A task failed; the run has stopped. Its cause is the error of the task."""


def run(schedule, perform):
    """Call `perform(task)` for every task, in each device's order; {task: (start, end)} in seconds.

    Every device has a thread, so that a call which blocks keeps no other device waiting. Before a
    task starts, those that it depends on have returned. Times count from the start of the run.

    Raises:
      TaskError: `perform` raised; no thread starts another task after that.
    """
    state = _State()
    threads = [
        threading.Thread(target=_drive, args=(schedule, order, perform, state), name=f"rank {i}")
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
        task, error = state.failure
        raise TaskError(f"pipeline: {task} failed: {type(error).__name__}: {error}") from error
    return state.times


class _State:
    """What has been done, seen by all threads."""

    def __init__(self):
        self.changed = threading.Condition()
        self.times, self.failure, self.begin = {}, None, time.perf_counter()

    def ready(self, needed):
        """Wait until all that is needed is done; False if the run has stopped."""
        with self.changed:
            self.changed.wait_for(lambda: self.failure or all(t in self.times for t in needed))
            return self.failure is None

    def done(self, task, start, end):
        with self.changed:
            self.times[task] = (start - self.begin, end - self.begin)
            self.changed.notify_all()

    def stop(self, task, error):
        with self.changed:
            self.failure = self.failure or (task, error)
            self.changed.notify_all()


def _drive(schedule, order, perform, state):
    for task in order:
        if not state.ready(schedule.dependencies(task)):
            return
        try:
            start = time.perf_counter()
            perform(task)
            state.done(task, start, time.perf_counter())
        except BaseException as error:
            state.stop(task, error)
            return
