"""Signals that ask a run to stop: the first to save and leave, the second to end at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from shardwise import processes as system
from shardwise.run.settings import Processes
from shardwise.run.state import Result

STOPPED = 75  # the exit status of a run that one of them stopped, after saving (EX_TEMPFAIL)
ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
ASKED += (signal.SIGUSR1, signal.SIGUSR2)  # which SLURM is told to send (submitit: USR2)
TWICE = signal.SIGHUP  # shell and kernel both tell a terminal's end: a second one asks no more


def handled(handler: Callable[[int, FrameType | None], None]) -> contextlib.ExitStack:
    """Let `handler` hear these signals until the end of the context, where this thread can; SIGHUP
    stays ignored where it is, as nohup wishes.
    """
    ends = contextlib.ExitStack()
    kept = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    if threading.current_thread() is threading.main_thread():
        for number in set(ASKED) - kept:
            ends.callback(signal.signal, number, signal.signal(number, handler))
    return ends


class Stop(contextlib.ExitStack):
    """A handler of signals in its context, whose end puts back the earlier handlers.

    A first signal is remembered. A second one ends the process, also while its main thread compiles
    or waits in a collective, where no Python handler runs: the interpreter writes each signal's
    number to a pipe, and a thread reads it.
    """

    signal: int | None = None

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            self._read, write = os.pipe()
            self.callback(os.close, write)  # the thread reads the end
            os.set_blocking(write, False)
            before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
            self.callback(signal.set_wakeup_fd, before)
            self.enter_context(handled(self._first))
            threading.Thread(target=self._count, daemon=True, name="signals").start()
        return self

    def _first(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number

    def _count(self):
        seen = 0
        while number := os.read(self._read, 1):
            seen += number[0] in ASKED and not (seen and number[0] == TWICE)
            if seen > 1:
                message = f"run: {signal.Signals(number[0]).name} again: ending without saving.\n"
                os.write(2, message.encode())
                os._exit(128 + number[0])
        os.close(self._read)


def standing() -> Stop | None:
    """The Stop that handles this process's signals now, as since `run.join`, if one does."""
    owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return owner if isinstance(owner, Stop) else None


def join(processes: Processes | None = None, devices: int | None = None) -> None:
    """Join the other processes of a run, by its `settings.processes` and `settings.devices`, as
    `shardwise.processes.join` does.

    From here to `leave` (without `join`: within `train`) a first SIGTERM, SIGINT, SIGQUIT, SIGHUP,
    SIGUSR1 or SIGUSR2 lets `train` save after a step, and return; a second one ends the process.
    """
    told = processes or Processes()
    with contextlib.ExitStack() as on_failure:
        if standing() is None:
            on_failure.enter_context(Stop())
        given = told.address, told.count, told.index
        system.join(*given, devices=devices, heartbeat=told.heartbeat)
        on_failure.pop_all()


def leave(result: Result | None = None) -> int:
    """Call `shardwise.processes.leave`; return the exit status, 75 if `result`, which `train`
    returned, says that a signal stopped the run, else 0.
    """
    system.leave()
    if stop := standing():
        stop.close()
    return STOPPED if result is not None and result.stopped else 0
