"""A watchdog: it ends a process without progress, which hangs or waits for one that does."""

import os
import threading
import time

from shardwise.run.folder import Note

STATUS = 70  # of a process that the watchdog ended
_WATCHED = ("reading", "stepping")


class Watchdog:
    """A thread that watches a process's note; a context manager.

    Only reading and stepping are watched, from the second step on: compiling, evaluating and saving
    take what they take. The limit is `seconds` and three times the longest step so far.
    """

    def __init__(self, note: Note, seconds: float):
        self._note, self._seconds = note, seconds
        self._longest, self._last = 0.0, None
        self._over = threading.Event()

    def __enter__(self):
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        return self

    def __exit__(self, *_):
        self._over.set()

    def done(self) -> None:
        """Note that a step is done."""
        now = time.monotonic()
        if self._last is not None:
            self._longest = max(self._longest, now - self._last)
        self._last = now

    def pause(self) -> None:
        """Stop watching until the next `done`: what comes now is no step."""
        self._last = None

    def _watch(self):
        while not self._over.wait(0.5):
            last = self._last
            waited = 0.0 if last is None else time.monotonic() - last
            if self._note.doing in _WATCHED and waited > self._seconds + 3 * self._longest:
                message = (
                    f"run: process {self._note.index} has made no progress for {waited:.0f} s, at "
                    f"step {self._note.step}, {self._note.doing}: ending it.\n"
                )
                os.write(2, message.encode())
                os._exit(STATUS)
