"""The notes that each process leaves in the run folder of what it does, by which it is watched.

A launcher judges by them from outside who hangs.
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
WATCHED = ("reading", "stepping")  # what takes about as long each time


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
    """The notes of this process, in a file of its own; `last` is the newest.

    In their context, a thread ends a process that makes no progress: that reads or steps, from the
    second step on, for `hang` seconds and three times the longest step so far. Compiling,
    evaluating and saving take what they take.
    """

    def __init__(self, folder: Path, index: int, hang: float):
        self._file = folder / "processes" / f"{index}.json"
        self._hang, self._longest, self._since = hang, 0.0, None
        self._over = threading.Event()
        self.last = Note(index, os.getpid(), socket.gethostname())
        self.say("starting")

    def __enter__(self):
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        return self

    def __exit__(self, *_):
        self._over.set()

    def say(self, doing: str, **changes: int | str) -> None:
        """Note what the process is doing, and what changed: `step`, or the `line` of one done."""
        now = time.monotonic()
        if doing not in WATCHED:
            self._since = None
        elif self._since is None:
            self._since = now if self.last.line else None
        elif "line" in changes:
            self._longest, self._since = max(self._longest, now - self._since), now
        self.last = dataclasses.replace(self.last, doing=doing, time=time.time(), **changes)
        write(self._file, json.dumps(dataclasses.asdict(self.last)) + "\n")

    def _watch(self):
        while not self._over.wait(0.5):
            since, note = self._since, self.last
            waited = 0.0 if since is None else time.monotonic() - since
            if waited > self._hang + 3 * self._longest:
                message = (
                    f"run: process {note.process} has made no progress for {waited:.0f} s, at "
                    f"{note.told()}: ending it.\n"
                )
                os.write(2, message.encode())
                os._exit(STUCK)


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
