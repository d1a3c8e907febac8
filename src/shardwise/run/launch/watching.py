"""The judgement whether processes hang, by their notes: none moves, and one is the odd one."""

import collections
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shardwise.run.notes import WATCHED, Note

STEPS = 5  # a process that steps may take as many times its usual step before it is said to hang


@dataclass(frozen=True)
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
