"""The notes that each process leaves in the run folder of what it does; a watchdog that reads them.

Others read them from outside: a launcher judges by them who hangs.
"""

import dataclasses
import json
import os
import socket
import threading
import time
from pathlib import Path

from shardwise.run.folder import write

STUCK = 70  # the exit status of a process that its watchdog ended
_WATCHED = ("reading", "stepping")


@dataclasses.dataclass(frozen=True)
class Note:
    """The last note of one process, of what it is doing; `time` is its own clock's."""

    process: int
    pid: int
    host: str
    step: int = 0
    doing: str = "starting"
    time: float = 0.0
    line: str = ""

    def told(self) -> str:
        """The step and what the process is doing, in words."""
        return f"step {self.step}, {self.doing}"


class Notes:
    """The notes of this process, in a file of its own; `last` is the newest."""

    def __init__(self, folder: Path, index: int):
        self._file = folder / "processes" / f"{index}.json"
        self.last = Note(index, os.getpid(), socket.gethostname())
        self.say("starting")

    def say(self, doing: str, **changes: int | str) -> None:
        """Note what the process is doing, and what changed: `step`, or the `line` of a step."""
        self.last = dataclasses.replace(self.last, doing=doing, time=time.time(), **changes)
        write(self._file, json.dumps(dataclasses.asdict(self.last)) + "\n")


def read(folder: Path) -> dict[int, Note]:
    """The last note of each process that ever had a part in a run, by its index.

    Raises:
      ValueError: a file there that is no note.
    """
    found = {}
    for file in (folder / "processes").glob("*.json"):
        try:
            said = json.loads(file.read_bytes())
            note = Note(**{field.name: said[field.name] for field in dataclasses.fields(Note)})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} is no note of a process ({error!r})") from None
        found[note.process] = note
    return found


class Watchdog:
    """A thread that ends this process when it makes no progress; a context manager.

    Only reading and stepping are watched, from the second step on: compiling, evaluating and saving
    take what they take. The limit is `seconds` and three times the longest step so far.
    """

    def __init__(self, notes: Notes, seconds: float):
        self._notes, self._seconds = notes, seconds
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
            last, note = self._last, self._notes.last
            waited = 0.0 if last is None else time.monotonic() - last
            if note.doing in _WATCHED and waited > self._seconds + 3 * self._longest:
                message = (
                    f"run: process {note.process} has made no progress for {waited:.0f} s, at "
                    f"{note.told()}: ending it.\n"
                )
                os.write(2, message.encode())
                os._exit(STUCK)
