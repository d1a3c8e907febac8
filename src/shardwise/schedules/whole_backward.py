"""Schedules whose backward is one task, B."""

import itertools
from collections.abc import Callable, Sequence

from shardwise.schedules import ranges
from shardwise.schedules.table import Schedule, Task


def gpipe(stages: int, devices: int, microbatches: int) -> Schedule:
    """A schedule of all forwards, then all backwards: all live at once (Huang et al., 2019)."""
    return _one_to_one("gpipe", stages, devices, microbatches, lambda after: microbatches)


def one_f_one_b(stages: int, devices: int, microbatches: int) -> Schedule:
    """The schedule 1F1B, a backward as soon as it can run: at most p - stage live, of p stages
    (Narayanan et al., 2019).
    """
    return _one_to_one("1f1b", stages, devices, microbatches, lambda after: after)


def eager_1f1b(stages: int, devices: int, microbatches: int) -> Schedule:
    """1F1B with twice the warm-up, so that transfers hide behind work (Zhuang et al., 2023).

    At most 2(p - stage) - 1 live, of p stages.
    """
    return _one_to_one("eager_1f1b", stages, devices, microbatches, lambda after: 2 * after)


def interleaved_1f1b(stages: int, devices: int, microbatches: int) -> Schedule:
    """1F1B with stages dealt in turn: shorter ones, and a shorter wait (Narayanan et al., 2021).

    Microbatches go in rounds, of `devices` each, or a few more so that they come out even: each
    stage of a device runs a whole round before the next one does.
    """
    return _interleaved("interleaved_1f1b", stages, devices, microbatches, extra=0)


def kimi_k2(stages: int, devices: int, microbatches: int) -> Schedule:
    """Interleaved 1F1B with one more warm-up forward (Kimi Team, 2025, Kimi K2).

    In the steady state a forward and a backward that need nothing of each other are neighbours:
    the communication of one can hide behind the other's work.
    """
    return _interleaved("kimi_k2", stages, devices, microbatches, extra=1)


def _one_to_one(
    name: str, stages: int, devices: int, microbatches: int, warmup: Callable[[int], int]
) -> Schedule:
    """A schedule of `warmup(stages after)` forwards, then F and B in turn, then the B left."""
    ranges.require_counts(name, stages, devices, microbatches)
    ranges.require_one_to_one(name, stages, devices)
    tasks = []
    for stage in range(stages):
        forwards = [Task(stage, "F", k) for k in range(microbatches)]
        backwards = [Task(stage, "B", k) for k in range(microbatches)]
        tasks.append(_warm_up_then_alternate(forwards, backwards, warmup(stages - 1 - stage)))
    return Schedule(tuple(tasks), stages, microbatches, tuple(range(stages)))


def _warm_up_then_alternate(
    forwards: Sequence[Task], backwards: Sequence[Task], warmup: int
) -> tuple[Task, ...]:
    steady = itertools.zip_longest(forwards[warmup:], backwards)
    pairs = itertools.chain.from_iterable(steady)
    return (*forwards[:warmup], *(task for task in pairs if task is not None))


def _interleaved(name: str, stages: int, devices: int, microbatches: int, extra: int) -> Schedule:
    ranges.require_counts(name, stages, devices, microbatches)
    if stages % devices:
        fewer, more = stages - stages % devices, stages + -stages % devices
        raise ValueError(
            f"{name}: {stages} stages on {devices} devices; it takes a multiple of {devices}, as "
            f"{f'{fewer} or {more}' if fewer else more}."
        )
    per_round = ranges.microbatches_per_round(name, devices, microbatches)
    tasks = []
    for device in range(devices):
        here = range(device, stages, devices)
        ahead = _by_round(here, microbatches, per_round)
        forwards = [Task(stage, "F", k) for stage, k in ahead]
        back = _by_round(here[::-1], microbatches, per_round)
        backwards = [Task(stage, "B", k) for stage, k in back]
        warmup = (len(here) - 1) * per_round + 2 * (devices - 1 - device) + extra
        tasks.append(_warm_up_then_alternate(forwards, backwards, warmup))
    homes = tuple(stage % devices for stage in range(stages))
    return Schedule(tuple(tasks), stages, microbatches, homes)


def _by_round(stages: Sequence[int], microbatches: int, per_round: int) -> list[tuple[int, int]]:
    """(stage, microbatch) pairs: each of the stages runs a round before the next one does."""
    rounds = [range(first, first + per_round) for first in range(0, microbatches, per_round)]
    return [(stage, k) for a_round in rounds for stage in stages for k in a_round]
