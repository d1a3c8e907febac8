"""Signals that ask a run to stop: the first to save and leave, the second to end at once.

They are heard from `join`, where this process joins the others of its system, until `leave`.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from shardwise import processes as system
from shardwise.run.settings import Processes
from shardwise.run.state import Result

STOPPED = 75  # the exit status of a run that one of them stopped, after saving (EX_TEMPFAIL)
# A scheduler's, Ctrl-C and the terminal's Quit, a terminal that closes, and what SLURM is told to
# send ahead of the end (submitit: USR2).
ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
ASKED += (signal.SIGUSR1, signal.SIGUSR2)


def wanted() -> list[int]:
    """The signals to handle: all but SIGHUP where it is ignored, as nohup wishes."""
    kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in ASKED if not (kept and number == signal.SIGHUP)]


def is_repeated(number: int) -> bool:
    """Whether a second such signal asks no more: shell and kernel both tell a terminal's end."""
    return number == signal.SIGHUP


class Stop:
    """A handler of signals between `begin` and `end`, which puts back the earlier handlers.

    A first signal is remembered: who counts steps looks, and agrees on it with other processes. A
    second one ends the process also while its main thread compiles or waits in a collective, where
    no Python handler runs: the interpreter writes each signal's number to a pipe, and a thread
    reads it.
    """

    def __init__(self):
        self.signal: int | None = None
        self._old = {}

    def begin(self) -> "Stop":
        """Handle signals, where this is the main thread: no other can."""
        if threading.current_thread() is threading.main_thread():
            self._read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._old = {number: signal.signal(number, self._first) for number in wanted()}
            threading.Thread(target=self._count, daemon=True, name="signals").start()
        return self

    def end(self) -> None:
        if self._old:
            for number, handler in self._old.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup)
            os.close(self._write)  # the thread reads the end

    def _first(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number

    def _count(self):
        seen = 0
        while number := os.read(self._read, 1):
            seen += number[0] in ASKED and not (seen and is_repeated(number[0]))
            if seen > 1:
                message = f"run: {signal.Signals(number[0]).name} again: ending without saving.\n"
                os.write(2, message.encode())
                os._exit(128 + number[0])
        os.close(self._read)


def standing() -> Stop | None:
    """The Stop that handles this process's signals now, if one does."""
    owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return owner if isinstance(owner, Stop) else None


@contextlib.contextmanager
def heard() -> Iterator[Stop]:
    """The Stop that stands since `run.join`; where none does, one for the block."""
    before = standing()
    stop = before or Stop().begin()
    try:
        yield stop
    finally:
        if before is None:
            stop.end()


def join(processes: Processes | None = None, devices: int = 8) -> None:
    """Call `shardwise.processes.join` with the settings of a run.

    From here to `leave` a signal that asks for a stop is remembered: one that comes before the
    first step, while data are read or programs compiled, is heard when that is done.
    """
    told = processes or Processes()
    stop = None if standing() else Stop().begin()
    try:
        given = told.address, told.count, told.index
        system.join(*given, devices=devices, heartbeat=told.heartbeat)
    except BaseException:
        if stop is not None:
            stop.end()
        raise


def leave(result: Result | None = None) -> int:
    """Call `shardwise.processes.leave`; return the exit status that says how a run ended.

    It is 0 when the run is done, 75 when a signal stopped it.
    """
    system.leave()
    if stop := standing():
        stop.end()
    return STOPPED if result is not None and result.stopped else 0
