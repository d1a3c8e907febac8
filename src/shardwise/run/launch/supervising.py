"""Supervision of processes: the first failure or a hang ends all, and signals are passed on."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.run import signals
from shardwise.run.launch import notes, reports, statuses
from shardwise.run.launch.children import Child, Children
from shardwise.run.launch.watching import Hang, Watch, never

GLANCE = 0.1  # seconds between looks at the processes
STANDSTILL = 5.0  # seconds after which a process that fails may have waited for another
READING = 0.5  # seconds between readings of their notes, at most


@dataclass(frozen=True)
class Limits:
    """Limits in seconds: until processes that step hang, until others do, from SIGTERM to SIGKILL.

    With `patient`, a second signal kills nobody: what sends it kills by itself.
    """

    hang_after: float = 20.0
    hang_after_long: float = 600.0
    grace: float = 5.0
    patient: bool = False


@dataclass(frozen=True)
class End:
    """The end of processes: the status for all, the code of each, and what to say of a failure."""

    status: int
    codes: tuple[int, ...]
    report: list[str] = field(default_factory=list)


def supervise(
    commands: Sequence[Sequence[str]],
    folder: Path | None,
    limits: Limits = Limits(),
    environment: Mapping[str, str] | None = None,
    first: int = 0,
) -> End:
    """Start the commands as processes `first` and so on, show what they print, wait for all.

    `folder` is the run folder, where they note their steps; without it no hang is seen.
    """
    with Children(first) as children, _Run(children, folder, limits).passing_on() as run:
        for command in commands:
            children.start(command, environment or {})
        return run.to_the_end()


class _Run:
    def __init__(self, children: Children, folder: Path | None, limits: Limits):
        self._children, self._folder, self._limits = children, folder, limits
        self._watch: Watch | None = None
        self._looked = 0.0
        self._notes: dict[int, notes.Note] = {}
        self._failed: list[Child] = []
        self._hang: Hang | None = None
        self._signal = self._again = 0
        self._kill_at: float | None = None

    @contextlib.contextmanager
    def passing_on(self) -> Iterator["_Run"]:
        """A context that handles signals, where this is the one thread that can."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._handle) for number in signals.wanted()}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number, _):
        # Done here and not in the loop, which may be held up by a full pipe.
        if not self._signal:
            self._signal = number
            self._children.pass_on(number)
        elif not (self._limits.patient or signals.is_repeated(number)):
            self._again = number
            self._children.kill()

    def to_the_end(self) -> End:
        started = {child.index: child.started for child in self._children.all}
        self._watch = Watch(started, self._limits.hang_after, self._limits.hang_after_long)
        said = 0
        while self._children.running():
            for child in self._children.wait(GLANCE):
                self._failed += [child] if child.code not in statuses.WELL else []
            if self._signal:
                self._children.pass_on(self._signal)  # to those that were not started then
                said = said or _say(f"{statuses.named(self._signal)} is passed on to all")
            self._look()
            self._end_others()
        return self._end()

    def _look(self):
        """Read the notes now and then, and judge by them."""
        now = time.monotonic()
        judged = not never(self._limits.hang_after)
        pause = min(READING, self._limits.hang_after / 4) if judged else READING
        if self._kill_at is not None or now - self._looked < pause:
            return
        self._looked = now
        self._note()
        self._watch.see(self._notes, now)
        running = self._children.running()
        if judged:
            self._hang = self._watch.hang([c.index for c in running], now, _stopped(running))

    def _blamed(self, first):
        """The hang that led to a failure, if another process hung: who waits for it may end first.

        A watchdog of its own ends such a process, or the runtime's heartbeat, which aborts it.
        """
        now = time.monotonic()
        self._watch.see(self._notes, now)
        unwell = [child for child in self._children.all if child.code not in statuses.WELL]
        found = self._watch.standing([c.index for c in unwell], now, _stopped(unwell))
        stood = first.code == statuses.STUCK or found.idle.get(first.index, 0) > STANDSTILL
        return found if stood and found.odd and first.index not in found.odd else None

    def _note(self):
        pids = {child.index: child.pid for child in self._children.all}
        try:
            self._notes = notes.read(self._folder, pids)
        except ValueError as error:  # no reason to end what trains
            self._folder = None
            _say(f"{error}; from here on, hangs are not seen")

    def _end_others(self):
        """Send SIGTERM to all after a failure or a hang, and SIGKILL when their time is over."""
        if self._kill_at is None and (self._failed or self._hang):
            self._note()
            self._kill_at = time.monotonic() + self._limits.grace
            first = self._failed[0] if self._failed else None
            self._hang = self._blamed(first) if first else self._hang
            why = f"process {first.index} {statuses.told(first.code)}" if first else "they hang"
            if self._children.running() and not self._again:
                _say(f"{why}; ending the others" if first else f"{why}; ending all")
            for child in self._children.running():
                child.send(signal.SIGTERM)
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self._children.kill()

    def _end(self):
        every = self._children.all
        codes = tuple(child.code for child in every)
        first = self._failed[:1]
        rest = [child for child in every if child not in first]
        status = statuses.overall([child.code for child in (*self._failed, *rest)])
        if self._hang is not None and not self._again:
            return End(status, codes, reports.hanging(self._hang, every))
        if self._again:
            told = reports.killed(statuses.named(self._again), every, self._notes)
            return End(status, codes, told)
        return End(status, codes, reports.failure(first[0], rest, self._notes) if first else [])


def _say(line):
    print(f"[launch] {line}", file=sys.stderr, flush=True)
    return 1


def _stopped(children):
    """The processes that the operating system has stopped (SIGSTOP, a debugger); on Linux only."""
    return [child.index for child in children if child.code is None and _state(child.pid) in "Tt"]


def _state(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "?"
