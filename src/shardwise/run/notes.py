"""The notes that each process leaves in the run folder of what it does, and who hangs by them: as
a watchdog within it judges, and a launcher from outside.
"""

import collections
import dataclasses
import json
import math
import os
import socket
import statistics
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from shardwise.run.folder import write

STUCK = 70  # the exit status of a process that its watchdog ended
WATCHED = ("reading", "stepping")  # what takes about as long each time
STEPS = 5  # a process that steps may take as many times its usual step before it is said to hang


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


class Seen:
    """The record of one process: its last note, when this came, and how long its steps take."""

    def __init__(self, started: float):
        self.note: Note | None = None
        self._started = self._changed = started
        self._stepped = None  # when its step last changed, later by what else it did since
        self._steps = collections.deque(maxlen=32)

    def see(self, note: Note, now: float) -> None:
        """Take in a note, at a time of one steady clock."""
        if note == self.note:
            return
        if self._stepped is not None and self.note.doing not in WATCHED:
            self._stepped += now - self._changed
        if self.note is not None and note.step > self.note.step:
            if self._stepped is not None:
                self._steps.append((now - self._stepped) / (note.step - self.note.step))
            self._stepped = now
        self.note, self._changed = note, now

    def idle(self, now: float) -> float:
        """The seconds since its last note."""
        return now - self._changed

    def is_still(self, now: float, after: float, longer: float) -> bool:
        """Whether it noted nothing for `after` seconds, or for five of its own steps where these
        take longer; for `longer` where it neither steps nor reads, as in compiling or saving.
        """
        if self.note.doing not in WATCHED:
            return self.idle(now) > max(after, longer)
        # Before it took a step while it was seen: as long as it took to get here.
        usual = STEPS * statistics.median(self._steps) if self._steps else None
        return self.idle(now) > max(after, usual or self._changed - self._started)


class Notes:
    """The notes of this process, in a file of its own; `last` is the newest.

    In their context, a thread ends a process that stands still for `hang` seconds, by `Seen`, when
    it reads or steps. Compiling, evaluating and saving take what they take.
    """

    def __init__(self, folder: Path, index: int, hang: float):
        self._file = folder / "processes" / f"{index}.json"
        self._hang, self._seen = hang, Seen(time.monotonic())
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
        self.last = dataclasses.replace(self.last, doing=doing, time=time.time(), **changes)
        self._seen.see(self.last, time.monotonic())
        write(self._file, json.dumps(dataclasses.asdict(self.last)) + "\n")

    def _watch(self):
        while not self._over.wait(0.5):
            now = time.monotonic()
            if self.last.line and self._seen.is_still(now, self._hang, math.inf):
                message = (
                    f"run: process {self.last.process} has made no progress for "
                    f"{self._seen.idle(now):.0f} s, at {self.last.told()}: ending it.\n"
                )
                os.write(2, message.encode())
                os._exit(STUCK)


def read(folder: Path) -> dict[int, Note]:
    """The last note of each process that had a part in a run; a ValueError for what is none."""
    found = {}
    for file in (folder / "processes").glob("*.json"):
        try:
            said = json.loads(file.read_bytes())
            told = {field.name: said[field.name] for field in dataclasses.fields(Note)}
            found[told["process"]] = Note(**told)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} is no note of a process ({error!r})") from None
    return found


def odd(notes: Mapping[int, Note]) -> tuple[int, ...]:
    """The processes that do something else than most. Of two groups of equal size, those that step
    wait (in a collective, for the others), and of these the ones with the higher step.
    """
    kinds = {i: (note.doing == "stepping", note.step, note.doing) for i, note in notes.items()}
    counts = collections.Counter(kinds.values())
    waiting = max(counts, key=lambda kind: (counts[kind], kind), default=None)
    return tuple(i for i in sorted(kinds) if kinds[i] != waiting)
