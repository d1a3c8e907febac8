"""The notes that each process leaves in the run folder of what it does, and who hangs by them.

A watchdog within a process judges it by its own, and a launcher all of them from outside.
"""

import collections
import dataclasses
import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Collection, Mapping
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


@dataclasses.dataclass(frozen=True)
class Hang:
    """Processes of which none moves: their notes, the seconds that they stand, the odd ones."""

    notes: dict[int, Note]
    idle: dict[int, float]
    odd: tuple[int, ...]
    stopped: bool = False  # the odd ones, by the operating system


class _Seen:
    """The record of one process: its note, when this last changed, and how long steps take."""

    def __init__(self, started):
        self.note, self.changed, self.started = None, started, started
        self._stepped = None  # when its step last changed
        self._steps = collections.deque(maxlen=32)

    def see(self, note, now):
        if note == self.note:
            return
        if self.note is not None and note.step > self.note.step:
            if self._stepped is not None:
                self._steps.append((now - self._stepped) / (note.step - self.note.step))
            self._stepped = now
        self.note, self.changed = note, now

    def limit(self, after, longer):
        """The seconds that the process may stand still."""
        if self.note.doing not in WATCHED:
            return max(after, longer)
        if self._steps:
            return max(after, STEPS * statistics.median(self._steps))
        # It has taken no step while it was seen: as long as it took to get here.
        return max(after, self.changed - self.started)


class Watch:
    """A judge of processes that all have noted a first step; `started` is when each was, by index.

    After `after` seconds, or five of its own steps where these take longer, a process that steps or
    reads stands still; after `longer` seconds one that does anything else, as compiling or saving.
    """

    def __init__(self, started: Mapping[int, float], after: float, longer: float):
        self._seen = {index: _Seen(when) for index, when in started.items()}
        self._after, self._longer = after, longer

    def see(self, notes: Mapping[int, Note], now: float) -> None:
        """Take in what the processes have noted, by index, at a time of one steady clock."""
        for index, note in notes.items():
            self._seen[index].see(note, now)

    def hang(
        self, running: Collection[int], now: float, stopped: Collection[int] = ()
    ) -> Hang | None:
        """The `Hang` of those that run, if all do: one that moves shows that no other blocks it.

        `stopped` are known not to run at all, by the operating system.
        """
        every = self._seen.values()
        if not running or any(each.note is None or each.note.step < 1 for each in every):
            return None
        found = self.standing(running, now, stopped)
        limits = {i: self._seen[i].limit(self._after, self._longer) for i in running}
        return found if all(found.idle[i] > limits[i] for i in running) else None

    def standing(self, which: Collection[int], now: float, stopped: Collection[int] = ()) -> Hang:
        """The `Hang` of processes that are known to hang, of those that have noted anything."""
        seen = {i: self._seen[i] for i in which if self._seen[i].note is not None}
        notes = {index: each.note for index, each in seen.items()}
        idle = {index: now - each.changed for index, each in seen.items()}
        return Hang(notes, idle, tuple(sorted(stopped)) or odd(notes), stopped=bool(stopped))


def odd(notes: Mapping[int, Note]) -> tuple[int, ...]:
    """The processes that do something else than most; none where all do the same.

    Of two groups of equal size, those that step wait (in a collective, for the others), and of
    these the ones with the higher step.
    """
    kinds = {i: (note.doing == "stepping", note.step, note.doing) for i, note in notes.items()}
    counts = collections.Counter(kinds.values())
    waiting = max(counts, key=lambda kind: (counts[kind], kind), default=None)
    return tuple(i for i in sorted(kinds) if kinds[i] != waiting)
