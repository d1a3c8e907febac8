"""Signals that ask a run to stop: the first to save and leave, the second to end at once."""

import os
import signal
import threading
from types import FrameType

STOPPED = 75  # the exit status of a run that one of them stopped, after saving (EX_TEMPFAIL)
# A scheduler's, Ctrl-C, and what SLURM is told to send ahead of the end (submitit: USR2).
ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class Stop:
    """Whether a signal came; a context manager that puts back what handled signals before.

    Enter it after `jax.distributed.initialize`, whose runtime takes SIGTERM for itself. A second
    signal ends the process also while its main thread waits in a collective, where no Python
    handler runs: the interpreter writes each signal's number to a pipe, and a thread reads it.
    """

    def __init__(self):
        self.signal: int | None = None

    def __enter__(self):
        if threading.current_thread() is not threading.main_thread():
            self._old = None  # signals are the main thread's alone: there is nothing to put back
            return self
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, self._first) for number in ASKED}
        threading.Thread(target=self._count, daemon=True, name="signals").start()
        return self

    def __exit__(self, *_):
        if self._old is not None:
            for number, handler in self._old.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup)
            os.close(self._write)  # the thread reads the end

    def _first(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number

    def _count(self):
        seen = 0
        while number := os.read(self._read, 1):
            seen += number[0] in ASKED
            if seen > 1:
                message = f"run: {signal.Signals(number[0]).name} again: ending without saving.\n"
                os.write(2, message.encode())
                os._exit(128 + number[0])
        os.close(self._read)
