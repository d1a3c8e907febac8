"""Whether processes hang, on a clock of our own."""

import functools
import random
import types
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.run.launch import supervising
from shardwise.run.launch.supervising import Limits
from shardwise.run.notes import Note, Seen, odd, read

AFTER, LONGER = 20.0, 600.0


def note(process, step, doing="stepping", line=""):
    return Note(process, 100 + process, "here", step, doing, 0.0, line)


class Hang(NamedTuple):
    idle: dict
    odd: tuple


class Process(types.SimpleNamespace):
    __hash__ = object.__hash__


class Clock:
    """Some processes and who watches them, from 0 on; every process takes a step a second."""

    def __init__(self, count, after=AFTER):
        self.now, self.count, self.limits = 0.0, count, Limits(after, LONGER)
        self.seen = {i: Seen(0.0) for i in range(count)}
        self.notes = {}

    def see(self, now, **changed):
        self.now = now
        self.notes |= {int(name[1:]): note(int(name[1:]), *what) for name, what in changed.items()}
        for index, each in self.notes.items():
            self.seen[index].see(each, now)

    def step(self, steps, seconds=1.0):
        for step in steps:
            self.see(self.now + seconds, **{f"p{i}": (step,) for i in range(self.count)})

    def hang(self, now, running=None, stopped=()):
        watching = supervising._Run(None, self.limits, patient=False)
        for index, seen in self.seen.items():
            code = None if running is None or index in running else 0
            child = dict(index=index, seen=seen, code=code, pid=100 + index)
            child |= dict(is_stopped=functools.partial(stopped.__contains__, index))
            watching.children.append(Process(**child))
        watching._look(now)
        if (found := watching._hang) is None:
            return None
        idle = {child.index: waited for child, waited in found[0].items()}
        return Hang(idle, tuple(child.index for child in found[1]))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_all_that_stand_still_hang_after_the_limit_and_not_before(count):
    clock = Clock(count)
    clock.step(range(1, 9))
    assert clock.hang(clock.now + AFTER) is None
    found = clock.hang(clock.now + AFTER + 0.1)
    assert found.odd == () and set(found.idle) == set(range(count))
    assert found.idle[0] == pytest.approx(AFTER + 0.1)


def test_the_one_that_does_something_else_is_odd():
    clock = Clock(4)
    clock.step(range(1, 18))
    clock.see(clock.now + 0.1, p2=(17, "reading"))
    assert clock.hang(clock.now + AFTER + 1).odd == (2,)


def test_one_that_still_moves_shows_that_nobody_hangs():
    clock = Clock(3)
    clock.step(range(1, 9))
    for late in range(1, 100):
        clock.see(clock.now + AFTER / 2, p1=(8, "reading", f"line {late}"))
        assert clock.hang(clock.now) is None
    assert clock.hang(clock.now + AFTER + 1).odd == (1,)


LONG = ["starting", "compiling", "tracing", "evaluating", "hashing", "saving", "leaving", "done"]


@pytest.mark.parametrize("doing", LONG)
def test_one_that_compiles_or_saves_has_longer(doing):
    clock = Clock(3)
    clock.step(range(1, 9))
    clock.see(clock.now, p0=(8, doing))
    assert clock.hang(clock.now + LONGER - 1) is None
    assert clock.hang(clock.now + LONGER + 1).odd == (0,)


def test_nobody_hangs_before_all_have_noted_a_step():
    clock = Clock(3)
    clock.see(1.0, p0=(1,), p1=(1,))
    assert clock.hang(10_000.0) is None  # process 2 has noted nothing
    clock.see(10_000.0, p2=(0, "reading"))
    assert clock.hang(50_000.0) is None
    clock.see(50_000.0, p2=(1, "reading"))
    assert clock.hang(150_000.0).odd == (2,)


@pytest.mark.parametrize("seconds", [0.01, 1.0, 7.0, 90.0])
def test_slow_steps_have_the_time_of_five(seconds):
    clock = Clock(2)
    clock.step(range(1, 30), seconds)
    limit = max(AFTER, 5 * seconds)
    assert clock.hang(clock.now + limit - 0.1) is None
    assert clock.hang(clock.now + limit + 0.1) is not None


def test_steps_that_nobody_saw_count():
    clock = Clock(2)
    clock.step(range(1, 1000, 100), seconds=30.0)  # 0.3 s each
    assert clock.hang(clock.now + AFTER + 0.1) is not None


def test_one_slow_step_in_many_changes_nothing():
    clock = Clock(2)
    clock.step(range(1, 10))
    clock.step([10], seconds=300.0)
    clock.step(range(11, 20))
    assert clock.hang(clock.now + AFTER + 0.1) is not None


def test_before_a_second_step_was_seen_one_has_the_time_that_the_first_took():
    clock = Clock(2)
    clock.see(90.0, p0=(1,), p1=(1,))
    assert clock.hang(179.9) is None
    assert clock.hang(180.1) is not None


def test_what_is_no_step_counts_in_none():
    """Compiling for 600 s, and evaluating for 300 s between steps: a step takes one second."""
    seen, now = Seen(0.0), 0.0
    seen.see(note(0, 0, "starting"), now)
    for step in range(1, 6):
        for doing, seconds in ("reading", 0.5), ("compiling" if step == 1 else "stepping", 0.5):
            seen.see(note(0, step, doing), now)
            now += seconds + 600 * (doing == "compiling")
        if step > 1:
            assert not seen.is_still(now + AFTER - 1, AFTER, LONGER)
            assert seen.is_still(now + AFTER, AFTER, LONGER)
        seen.see(note(0, step, "evaluating"), now)
        now += 300


def test_those_that_ended_are_not_waited_for():
    clock = Clock(3)
    clock.step(range(1, 9))
    clock.see(clock.now, p0=(9, "done"))
    assert clock.hang(clock.now + AFTER + 1) is None
    assert clock.hang(clock.now + AFTER + 1, running=[1, 2]).idle.keys() == {1, 2}
    assert clock.hang(clock.now + AFTER + 1, running=[]) is None


def test_one_that_the_system_has_stopped_is_odd():
    clock = Clock(3)
    clock.step(range(1, 9))
    assert clock.hang(clock.now + AFTER + 1, stopped=[1]).odd == (1,)


@given(seed=st.integers(0, 2**32), count=st.integers(1, 6))
def test_random_runs_hang_when_they_stop_and_only_then(seed, count):
    draw = random.Random(seed)
    clock = Clock(count)
    clock.step([draw.randint(1, 5)])
    for _ in range(30):
        later = clock.now + draw.uniform(0, AFTER)
        who = draw.randrange(count)
        step = clock.notes[who].step + draw.randint(0, 2)
        before = clock.notes[who]
        clock.see(later, **{f"p{who}": (step, draw.choice(["reading", "stepping"]), str(later))})
        assert before != clock.notes[who] and clock.hang(clock.now) is None
    last = {i: clock.notes[i] for i in range(count)}
    limit = 5 * clock.now + AFTER  # no step took longer than all
    found = clock.hang(clock.now + limit + 1)
    assert found.idle.keys() == last.keys()
    assert len({(last[i].step, last[i].doing) for i in range(count) if i not in found.odd}) == 1
    assert len(found.odd) < count


@pytest.mark.parametrize(
    "said, expected",
    [
        ([(5, "saving"), (5, "stepping")], (0,)),
        ([(5, "stepping"), (4, "stepping")], (1,)),
        ([(5, "reading"), (5, "reading"), (5, "stepping")], (2,)),
        ([(5, "stepping"), (5, "stepping")], ()),
        ([(5, "stepping")], ()),
        ([(5, "stepping"), (4, "stepping"), (5, "reading"), (5, "stepping")], (1, 2)),
    ],
)
def test_who_is_odd(said, expected):
    assert odd({i: note(i, *what) for i, what in enumerate(said)}) == expected


def test_notes_are_read_and_what_is_none_is_named(tmp_path):
    assert read(tmp_path) == {}
    (tmp_path / "processes").mkdir()
    text = '{"process": 0, "pid": 7, "host": "h", "step": 3, "doing": "saving", "time": 1.5, '
    (tmp_path / "processes" / "0.json").write_text(text + '"line": "x", "more": 1}')
    assert read(tmp_path) == {0: Note(0, 7, "h", 3, "saving", 1.5, "x")}
    (tmp_path / "processes" / "0.json").write_text(text + '"lime": "x"}')
    with pytest.raises(ValueError, match=r"0\.json is no note of a process .*line"):
        read(tmp_path)
