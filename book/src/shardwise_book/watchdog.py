"""A watch over a kernel: one whose cell hangs is killed, and never one that only is slow."""

import threading
import time
from collections.abc import Callable

# Both are for cells that hang, on however slow a machine: no clock on the wall ends one that works.
STILL_S = 600  # without a hundredth of it in processor time
BUSY_S = 1800  # of processor time: a whole chapter takes well under a minute
LOOK_S = 5


class Watchdog:
    """A thread that kills a kernel whose cell hangs, and remembers why in `verdict`."""

    def __init__(self, spent: Callable[[], float], kill: Callable[[], None]) -> None:
        self.verdict: str | None = None
        self._spent, self._kill, self._ended = spent, kill, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.begin()

    def begin(self) -> None:
        """A cell begins."""
        now = self._spent()
        self._cell, self._moved = now, (time.monotonic(), now)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self):
        while not self._ended.wait(LOOK_S):
            now, spent = time.monotonic(), self._spent()
            if spent - self._moved[1] >= STILL_S / 100:
                self._moved = now, spent
            if now - self._moved[0] > STILL_S:
                self.verdict = f"it stood still: no work of the processor in {STILL_S:g} s."
            elif spent - self._cell > BUSY_S:
                self.verdict = f"no end after {BUSY_S:g} s of the processor's time."
            if self.verdict:
                return self._kill()
