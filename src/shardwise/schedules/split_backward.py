"""Schedules whose backward is two tasks: I, which others wait for, and W, which fills gaps."""

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence

from shardwise.schedules import ranges
from shardwise.schedules.table import Schedule, Task


def zb_h1(stages: int, devices: int, microbatches: int) -> Schedule:
    """1F1B with backwards split and weights last (Qi et al., 2024, Zero Bubble).

    Of p stages each has a peak of p, and gaps of at most (p-1)(F+I-W) between its first task and
    its last, as long as W costs no more than F.
    """
    return _zero_bubble("zb_h1", stages, devices, microbatches, lambda after: after + 1)


def zb_h2(stages: int, devices: int, microbatches: int) -> Schedule:
    """ZB-H1, more warm-up: no gaps where all kinds cost the same (Qi et al., 2024, Zero Bubble).

    Of p stages each has a peak of 2p-1, and gaps of at most (p-1)(F+I-2W) between its first task
    and its last, from 2p-1 microbatches on, as long as W costs no more than F.
    """
    return _zero_bubble("zb_h2", stages, devices, microbatches, lambda after: 2 * after + 1)


def zb_v(stages: int, devices: int, microbatches: int) -> Schedule:
    """ZB-V, a V without gaps in 1F1B's memory: device d holds the stages d and 2·devices - 1 - d.

    Of p devices each has a peak of 2p stages, half as large as where a device holds one, and no
    gap between its first task and its last where F, I and W cost the same (Qi et al., 2024,
    Pipeline Parallelism with Controllable Memory, arXiv:2405.15362; its V-ZB).
    """
    return _folded("zb_v", stages, devices, microbatches, _zb_v_steps)


def dualpipe_v(stages: int, devices: int, microbatches: int) -> Schedule:
    """DeepSeek's DualPipe folded into a V: device d holds the stages d and 2·devices - 1 - d.

    Forwards on their way down the V meet backwards on their way up: an F and a B that need nothing
    of each other are neighbours, to be run as one. Each of p devices has a peak of 2p+1. Backwards
    are split at both ends only. The order is that of https://github.com/deepseek-ai/DualPipe,
    which credits the fold to Sea AI Lab's cut-in-half (https://hackmd.io/@ufotalent/r1lVXsa9Jg).
    """
    return _folded("dualpipe_v", stages, devices, microbatches, _dualpipe_v_steps)


def _zero_bubble(
    name: str, stages: int, devices: int, microbatches: int, warmup: Callable[[int], int]
) -> Schedule:
    """A schedule of `warmup(stages after)` forwards; I, F up to the first stage's; then I, W, F."""
    ranges.require_counts(name, stages, devices, microbatches)
    ranges.require_one_to_one(name, stages, devices)
    ranges.require_microbatches(name, stages, microbatches)
    most = min(warmup(stages - 1), microbatches)
    tasks = []
    for stage in range(stages):
        ahead = min(warmup(stages - 1 - stage), microbatches)
        steps = ["F0"] * ahead + ["I0", "F0"] * (most - ahead)
        steps += ["I0", "W", "F0"] * microbatches + ["I0", "W"] * microbatches
        numbered = _numbered(steps, [stage])
        tasks.append(tuple(task for task in numbered if task.microbatch < microbatches))
    return Schedule(tuple(tasks), stages, microbatches, tuple(range(stages)))


def _folded(
    name: str,
    stages: int,
    devices: int,
    microbatches: int,
    steps: Callable[[int, int, int], Sequence[str]],
) -> Schedule:
    """A schedule of `steps(device, devices, microbatches)`: 0 is the way down the V, 1 up."""
    ranges.require_counts(name, stages, devices, microbatches)
    ranges.require_two_to_one(name, stages, devices)
    ranges.require_microbatches(name, stages, microbatches)
    tasks = tuple(
        tuple(_numbered(steps(device, devices, microbatches), [device, stages - 1 - device]))
        for device in range(devices)
    )
    return Schedule(tasks, stages, microbatches, (*range(devices), *reversed(range(devices))))


def _zb_v_steps(device: int, devices: int, microbatches: int) -> list[str]:
    """The steps of ZB-V: 2p forwards until the first I is there; then a W makes room for each F."""
    after, upto = devices - 1 - device, device + 1
    steps = ["F0"] * (2 * after + 1) + ["F1", "F0"] * device
    steps += ["F1", "I1", "W"] * (after + 1)
    steps += ["F0", "I0", "W", "F1", "I1", "W"] * (microbatches - 2 * devices + upto)
    steps += ["I0", "W", "F1", "I1", "W"] * after
    return steps + ["I0", "I1"] * device + ["I0", "W"] * (after + 1) + ["W"] * (2 * device)


def _dualpipe_v_steps(device: int, devices: int, microbatches: int) -> list[str]:
    """The steps of DualPipe-V: F and whole B in turn.

    Where others wait, as the pipeline fills and empties, I stands alone.
    """
    after, upto = devices - 1 - device, device + 1
    steps = ["F0"] * (2 * after) + ["F0", "F1"] * upto + ["I1", "W", "F1"] * after
    steps += ["F0", "B1", "F1", "B0"] * (microbatches - 2 * devices + upto)
    steps += ["B1", "F1", "B0"] * after
    whole = 2 * (upto // 2) + (device % 2 == 0)  # of the last backwards; the others' W wait
    last = ["1", "0"] * upto
    steps += ["B" + way for way in last[:whole]] + ["I" + way for way in last[whole:]]
    return steps + ["W", "I0"] * after + ["W"] * upto


def _numbered(steps: Sequence[str], stages: Sequence[int]) -> Iterator[Task]:
    """The tasks of `steps`: a kind and which of `stages`, or W, for the oldest I without one.

    Forwards and backwards of a stage each count their own microbatches.
    """
    counts = collections.defaultdict(itertools.count)
    waiting = collections.deque()
    for step in steps:
        if step == "W":
            yield waiting.popleft()
            continue
        kind, stage = step[0], stages[int(step[1])]
        task = Task(stage, kind, next(counts[stage, kind == "F"]))
        if kind == "I":
            waiting.append(task._replace(kind="W"))
        yield task
