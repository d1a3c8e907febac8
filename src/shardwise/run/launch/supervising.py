"""Processes under supervision: the first failure or hang ends all, and is reported: who, at which
step, doing what, and its last lines. Signals are passed on.
"""

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.run import notes, signals
from shardwise.run.launch.children import Child, ended
from shardwise.run.notes import STUCK
from shardwise.run.signals import STOPPED

_GLANCE = 0.2  # seconds between looks at the processes and at their notes
STANDSTILL = 5.0  # seconds after which a process that fails may have waited for another
# What a process does without the others: one that stands there waits for none of them.
ALONE = ("starting", "compiling", "reading")
WELL = {0: " (done)", STOPPED: " (stopped by a signal, after saving)"}  # exit statuses


@dataclass(frozen=True)
class Limits:
    """Limits of what processes may take: to move on, and to leave after a failure."""

    hang_after: float = 20.0
    """Seconds after which processes that step are ended when no note in the run folder moves (or
    five steps, where these take longer); 0: never."""
    hang_after_long: float = 600.0
    """The same, while one of them starts, compiles, evaluates or saves."""
    grace: float = 5.0
    """Seconds that the others have after a failure, before they are killed."""


@dataclass(frozen=True)
class End:
    """The end of processes: the status for all, and what to say of a failure."""

    status: int
    report: list[str]


def overall(codes: Sequence[int]) -> int:
    """The status for processes with these codes: 0 when all are done, 75 when all are done or
    stopped, else the first failure's, 128 + signal where a signal killed it.
    """
    first = next((code for code in codes if code not in WELL), max(codes))
    return 128 - first if first < 0 else first


def supervise(
    commands: Sequence[Sequence[str]],
    folder: Path | None,
    limits: Limits = Limits(),
    environment: Mapping[str, str] | None = None,
    first: int = 0,
    patient: bool = False,
) -> End:
    """Start the commands as processes `first` and so on, show what they print, wait for all; say
    how they failed, if they did.

    They note their steps in `folder`, the run folder. Where it is `patient`, a second signal kills
    nobody: what sends it kills by itself.
    """
    run = _Run(folder, limits, patient)
    try:
        with signals.handled(run.hear):
            for index, command in enumerate(commands, first):
                run.children.append(Child(index, command, environment or {}))
            end = run.to_the_end()
    finally:
        run.kill()
        for child in run.children:
            child.close()
    for line in end.report:
        _say(line)
    return end


class _Run:
    def __init__(self, folder: Path | None, limits: Limits, patient: bool):
        self._folder, self._limits, self._patient = folder, limits, patient
        self.children: list[Child] = []
        self._failed: list[Child] = []
        self._hang: tuple | None = None  # as `_hang` finds it
        self._signal = self._again = 0
        self._kill_at: float | None = None

    def kill(self) -> None:
        for child in self.children:
            child.kill()

    def _running(self):
        return [child for child in self.children if child.code is None]

    def _pass_on(self):
        """Send the signal that was heard to each process that has had none."""
        for child in self._running():
            if not child.signalled:
                child.signalled = True
                child.send(self._signal)

    def hear(self, number, _):
        # Done here and not in the loop, which may be held up by a full pipe.
        if not self._signal:
            self._signal = number
            self._pass_on()
        elif not (self._patient or number == signals.TWICE):
            self._again = number
            self.kill()

    def to_the_end(self) -> End:
        said = False
        while self._running():
            time.sleep(_GLANCE)
            self._failed += [child for child in ended(self.children) if child.code not in WELL]
            if self._signal and not said:
                said = True
                self._pass_on()  # to those that were not started then
                _say(f"{_named(self._signal)} is passed on to all")
            now = time.monotonic()
            if self._kill_at is None:
                self._look(now)
                if self._failed or self._hang:
                    self._end_others(now)
            elif now > self._kill_at:
                self.kill()
        return self._end()

    def _look(self, now):
        """Read the notes, and judge by them."""
        try:
            found = notes.read(self._folder) if self._folder else {}
        except ValueError as error:  # no reason to end what trains
            self._folder, found = None, {}
            _say(f"{error}; from here on, hangs are not seen")
        for child in self.children:
            note = found.get(child.index)
            if note is not None and note.pid == child.pid:  # and not of an earlier run
                child.seen.see(note, now)
        if self._failed:
            self._hang = self._blamed(self._failed[0], now)
        elif self._is_still(now):
            self._hang = _hang(self._running(), now)

    def _is_still(self, now):
        """Whether none moves that runs: one that does shows that no other blocks it."""
        limits = self._limits.hang_after, self._limits.hang_after_long
        begun = all(each.seen.note is not None and each.seen.note.step for each in self.children)
        running = self._running() if begun and limits[0] > 0 else []
        return running and all(child.seen.is_still(now, *limits) for child in running)

    def _blamed(self, first, now):
        """The hang that led to a failure, if another process hung: who waits for it may end first,
        by its own watchdog, or by the runtime's heartbeat, which aborts it.
        """
        found = _hang([child for child in self.children if child.code not in WELL], now)
        idle, odd, _ = found
        stood = first.code == STUCK or idle.get(first, 0) > STANDSTILL
        return found if stood and odd and first not in odd else None

    def _end_others(self, now):
        """Send SIGTERM to all; SIGKILL follows when their time is over."""
        self._kill_at = now + self._limits.grace
        if self._running() and not self._again:
            told = [f"process {c.index} {_ended(c.code)}; ending the others" for c in self._failed]
            _say((told or ["they hang; ending all"])[0])
        for child in self._running():
            child.send(signal.SIGTERM)

    def _end(self):
        every, first, told = self.children, self._failed[:1], []
        if self._again:
            told = [_place(child, _ended(child.code)) for child in every]
            told.append(f"a second signal, {_named(self._again)}, killed those that ran")
        elif self._hang is not None:
            told = self._hanging(*self._hang)
        elif first:
            told = [f"process {c.index} {_ended(c.code)}" for c in every if c not in first]
            told += [*first[0].lines, _place(*first, _ended(first[0].code))]
        return End(overall([child.code for child in (*self._failed, *every)]), told)

    def _hanging(self, idle, odd, stopped):
        """The lines that tell of processes that hang; the odd ones come last."""
        lines = [
            f"process {c.index}: {c.seen.note.told()}, for {waited:.0f} s; it {_ended(c.code)}"
            for c, waited in idle.items()
        ]
        lines += [line for child in odd or self.children for line in child.lines]
        if not odd:
            return [*lines, "No process moves, and all note the same: which one cannot be told."]
        rest = "; ".join(sorted({child.seen.note.told() for child in idle if child not in odd}))
        return [*lines, *(_place(child, _differs(child.seen.note, rest, stopped)) for child in odd)]


def _place(child, what):
    """The line that tells what became of a process, and where it stood."""
    note = child.seen.note
    where = "before it noted a step" if note is None else f"at {note.told()}"
    line = f"; its note says: {note.line}" if note is not None and note.line else ""
    raised = f"; its last traceback ends: {child.raised}" if child.raised else ""
    return f"process {child.index} (pid {child.pid}), {where}, {what}{line}{raised}"


def _differs(note, rest, stopped):
    """What is known of an odd one: that it hangs, or only that it and the others do not meet."""
    if not stopped and note is not None and note.doing not in ALONE:
        return (
            f"differs from the others ({rest}), and all wait; notes do not show who made one call "
            f"too many or too few: compare the calls that each has made, and the stacks"
        )
    beside = f", while the others wait ({rest})" if rest else ""
    return f"{'is stopped (SIGSTOP, or a debugger)' if stopped else 'hangs'}{beside}"


def _say(line):
    print(f"[launch] {line}", file=sys.stderr, flush=True)


def _hang(children, now):
    """({child: seconds that it stands} of those that noted anything, the odd ones of these, whether
    the operating system has stopped them), of children that hang.
    """
    stopped = [child for child in children if child.is_stopped()]
    noted = {child.index: child for child in children if child.seen.note is not None}
    odd = notes.odd({index: child.seen.note for index, child in noted.items()})
    idle = {child: child.seen.idle(now) for child in noted.values()}
    return idle, stopped or [noted[index] for index in odd], bool(stopped)


def _ended(code):
    """The words for how a process ended, from what `subprocess` calls its return code."""
    if code < 0:
        return f"was killed by {_named(-code)}"
    return f"exited with status {code}{(WELL | {STUCK: ' (no progress)'}).get(code, '')}"


def _named(number):
    """A signal's name and number, as in "SIGKILL (9)"."""
    try:
        return f"{signal.Signals(number).name} ({number})"
    except ValueError:  # a real-time signal, of which not all have names
        return f"signal {number}"
