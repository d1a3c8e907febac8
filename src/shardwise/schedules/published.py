"""The published schedules: functions of how many stages, devices and microbatches there are.

Each returns a `Schedule`, or raises a ValueError that says which numbers would do. `stages` and
`devices` are equal, and microbatches 1 or more, where nothing else is said. A function's name is
its key in the dict `SCHEDULES`, but for `one_f_one_b`, whose key is "1f1b". First come those whose
backward is one task, B; then those in which it is two, I and W.
"""

import collections
import contextlib
import itertools
import numbers
from collections.abc import Callable, Sequence

from shardwise.schedules.table import Schedule, Task


def gpipe(stages: int, devices: int, microbatches: int) -> Schedule:
    """GPipe, all forwards and then all backwards, all live at once (Huang et al., 2019)."""
    return _one_to_one("gpipe", stages, devices, microbatches, lambda after: microbatches)


def one_f_one_b(stages: int, devices: int, microbatches: int) -> Schedule:
    """1F1B, each backward as soon as it can run (Narayanan et al., 2019).

    At most p - stage microbatches live, of p stages.
    """
    return _one_to_one("1f1b", stages, devices, microbatches, lambda after: after)


def eager_1f1b(stages: int, devices: int, microbatches: int) -> Schedule:
    """1F1B with twice the warm-up, so that transfers hide behind work (Zhuang et al., 2023).

    At most 2(p - stage) - 1 microbatches live, of p stages.
    """
    return _one_to_one("eager_1f1b", stages, devices, microbatches, lambda after: 2 * after)


def interleaved_1f1b(stages: int, devices: int, microbatches: int) -> Schedule:
    """1F1B with several stages a device, dealt in turn, for less waiting (Narayanan et al., 2021).

    It takes a multiple of `devices` as stages. A device runs each of its stages on a round of
    microbatches before it runs its next stage. There are microbatches // devices rounds, at least
    one, all equally long, or it is a ValueError.
    """
    return _interleaved("interleaved_1f1b", stages, devices, microbatches, extra=0)


def kimi_k2(stages: int, devices: int, microbatches: int) -> Schedule:
    """Interleaved 1F1B with one more warm-up forward (Kimi Team, 2025, Kimi K2).

    It takes the numbers that `interleaved_1f1b` takes. A forward and the backward beside it on a
    device need nothing of each other: the communication of one can hide behind the other's work.
    """
    return _interleaved("kimi_k2", stages, devices, microbatches, extra=1)


def zb_h1(stages: int, devices: int, microbatches: int) -> Schedule:
    """ZB-H1, which is 1F1B with backwards split and weights last (Qi et al., 2024, Zero Bubble).

    It takes p microbatches or more, of p stages. Each device has a peak of p, and gaps of at most
    (p-1)(F+I-W) between its first task and its last, as long as W costs no more than F.
    """
    return _zero_bubble("zb_h1", stages, devices, microbatches, lambda after: after + 1)


def zb_h2(stages: int, devices: int, microbatches: int) -> Schedule:
    """ZB-H2, which is ZB-H1 with more warm-up (Qi et al., 2024): no gaps if all kinds cost alike.

    It takes p microbatches or more, of p stages. Each device has a peak of 2p-1, and gaps up to
    (p-1)(F+I-2W) between its first task and its last, from 2p-1 microbatches on, if W is at most F.
    """
    return _zero_bubble("zb_h2", stages, devices, microbatches, lambda after: 2 * after + 1)


def zb_v(stages: int, devices: int, microbatches: int) -> Schedule:
    """ZB-V, a V without gaps in 1F1B's memory: device d holds the stages d and 2·devices - 1 - d.

    It takes p devices, 2p stages, and 2p microbatches or more. Each device has a peak of 2p stages,
    half as large as where it holds one, and no gap between its first task and its last where F, I
    and W cost the same (Qi et al., 2024, Pipeline Parallelism with Controllable Memory,
    arXiv:2405.15362; its V-ZB).
    """
    return _folded("zb_v", stages, devices, microbatches, _zb_v_steps)


def dualpipe_v(stages: int, devices: int, microbatches: int) -> Schedule:
    """DeepSeek's DualPipe folded into a V: device d holds the stages d and 2·devices - 1 - d.

    It takes p devices, 2p stages, and 2p microbatches or more. Forwards on their way down the V
    meet backwards on their way up: an F and a B that need nothing of each other stand in turn, to
    be run as one. Each device has a peak of 2p+1. Backwards are split at both ends only. The order
    is that of https://github.com/deepseek-ai/DualPipe, which credits the fold to Sea AI Lab's
    cut-in-half (https://hackmd.io/@ufotalent/r1lVXsa9Jg).
    """
    return _folded("dualpipe_v", stages, devices, microbatches, _dualpipe_v_steps)


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_1f1b,
    "interleaved_1f1b": interleaved_1f1b,
    "kimi_k2": kimi_k2,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
    "dualpipe_v": dualpipe_v,
}


def spread(name: str, devices: int, microbatches: int) -> Schedule:
    """The `Schedule` of `SCHEDULES[name]` with two stages on each device, or else with one.

    For comparisons that loop over `SCHEDULES`: one stage is tried only where two are refused.

    Raises:
      ValueError: it takes neither, or there is no such schedule.
    """
    if name not in SCHEDULES:
        raise ValueError(f"spread: no schedule {name!r}; there are {', '.join(SCHEDULES)}.")

    def made(stages, microbatches):
        found = SCHEDULES[name](stages, devices, microbatches)
        if found.devices != devices:  # a reader's own may not look
            raise ValueError(
                f"{name}: asked for {stages} stages on {devices} devices, and its table has "
                f"{found.devices}; raise a ValueError for numbers that it does not take."
            )
        return found

    refused, only = [], []  # all reasons; where the microbatches alone are wrong, that one
    for stages in (2 * devices, devices):
        try:
            return made(stages, microbatches)
        except ValueError as error:
            refused.append(str(error))
        with contextlib.suppress(ValueError):
            made(stages, microbatches=stages)
            only.append(refused[-1])
    raise ValueError("\n".join(only[:1] or refused))


def _one_to_one(name, stages, devices, microbatches, warmup):
    """A schedule of `warmup(stages after)` forwards, then F and B in turn, then the B left."""
    _check(name, stages, devices, microbatches, each=1)
    passes = ["F0"] * microbatches, ["B0"] * microbatches
    steps = [_alternated(*passes, warmup(stages - 1 - stage)) for stage in range(stages)]
    return _table(steps, microbatches, range(stages))


def _interleaved(name, stages, devices, microbatches, extra):
    """A schedule of forwards, then F and B in turn; each stage of a device runs whole rounds."""
    _check(name, stages, devices, microbatches)
    if stages % devices:
        fewer, more = stages - stages % devices, stages + -stages % devices
        raise ValueError(
            f"{name}: {stages} stages on {devices} devices; it takes a multiple of {devices}, as "
            f"{f'{fewer} or {more}' if fewer else more}."
        )
    per_round, each = _per_round(name, devices, microbatches), stages // devices
    a_round = [stage for stage in range(each) for _ in range(per_round)]
    order = a_round * (microbatches // per_round)
    passes = [f"F{stage}" for stage in order], [f"B{each - 1 - stage}" for stage in order]
    ahead = [(each - 1) * per_round + 2 * (devices - 1 - d) + extra for d in range(devices)]
    steps = [_alternated(*passes, warmup) for warmup in ahead]
    return _table(steps, microbatches, [stage % devices for stage in range(stages)])


def _zero_bubble(name, stages, devices, microbatches, warmup):
    """A schedule of `warmup(stages after)` forwards; I, F up to the first stage's; then I, W, F."""
    _check(name, stages, devices, microbatches, each=1, filled=True)
    ahead = [min(warmup(stages - 1 - stage), microbatches) for stage in range(stages)]
    last = ["I0", "W", "F0"] * microbatches + ["I0", "W"] * microbatches
    steps = [["F0"] * n + ["I0", "F0"] * (ahead[0] - n) + last for n in ahead]
    return _table(steps, microbatches, range(stages))


def _folded(name, stages, devices, microbatches, steps):
    """A schedule of `steps(device, devices, microbatches)`: 0 is the way down the V, 1 up."""
    _check(name, stages, devices, microbatches, each=2, filled=True)
    down = range(devices)
    found = [steps(device, devices, microbatches) for device in down]
    return _table(found, microbatches, [*down, *reversed(down)])


def _zb_v_steps(device, devices, microbatches):
    """2p forwards until the first I is there; then a W makes room for each F."""
    after, upto = devices - 1 - device, device + 1
    steps = ["F0"] * (2 * after + 1) + ["F1", "F0"] * device
    steps += ["F1", "I1", "W"] * (after + 1)
    steps += ["F0", "I0", "W", "F1", "I1", "W"] * (microbatches - 2 * devices + upto)
    steps += ["I0", "W", "F1", "I1", "W"] * after
    return steps + ["I0", "I1"] * device + ["I0", "W"] * (after + 1) + ["W"] * (2 * device)


def _dualpipe_v_steps(device, devices, microbatches):
    """F and whole B in turn; where others wait, as the pipeline fills and empties, I alone."""
    after, upto = devices - 1 - device, device + 1
    steps = ["F0"] * (2 * after) + ["F0", "F1"] * upto + ["I1", "W", "F1"] * after
    steps += ["F0", "B1", "F1", "B0"] * (microbatches - 2 * devices + upto)
    steps += ["B1", "F1", "B0"] * after
    whole = 2 * (upto // 2) + (device % 2 == 0)  # of the last backwards; the others' W wait
    last = ["1", "0"] * upto
    steps += ["B" + way for way in last[:whole]] + ["I" + way for way in last[whole:]]
    return steps + ["W", "I0"] * after + ["W"] * upto


def _alternated(forwards: list[str], backwards: list[str], warmup: int) -> list[str]:
    """Steps: so many forwards, then one of each in turn, then the backwards that are left."""
    steady = list(zip(forwards[warmup:], backwards, strict=False))
    turns = itertools.chain.from_iterable(steady)
    return [*forwards[:warmup], *turns, *backwards[len(steady) :]]


def _table(steps: Sequence[list[str]], microbatches: int, device_of: Sequence[int]) -> Schedule:
    """The schedule of each device's steps, without those beyond the last microbatch.

    A step is a kind and which of the device's stages, or W, for the oldest I without one. Forwards
    and backwards of a stage each count their own microbatches.
    """
    tasks = []
    for device, mine in enumerate(steps):
        stages = [stage for stage, home in enumerate(device_of) if home == device]
        numbered = [task for task in _numbered(mine, stages) if task.microbatch < microbatches]
        tasks.append(tuple(numbered))
    return Schedule(tuple(tasks), len(device_of), microbatches, tuple(device_of))


def _numbered(steps, stages):
    counts = collections.defaultdict(itertools.count)
    waiting = collections.deque()
    for step in steps:
        if step == "W":
            yield waiting.popleft()
            continue
        kind, stage = step[0], stages[int(step[1:])]
        task = Task(stage, kind, next(counts[stage, kind == "F"]))
        if kind == "I":
            waiting.append(task._replace(kind="W"))
        yield task


def _check(name, stages, devices, microbatches, each=None, filled=False):
    """Raise ValueError for counts that are none, other than `each` stages on a device, or (if
    `filled`) fewer microbatches than stages.
    """
    counts = {"stages": stages, "devices": devices, "microbatches": microbatches}
    for what, count in counts.items():
        if not isinstance(count, numbers.Integral) or count < 1:
            raise ValueError(f"{name}: {what}={count!r}; it takes a whole number, 1 or more.")
    if each is not None and stages != each * devices:
        others = f", or devices={stages // each}" if stages % each == 0 else ""
        raise ValueError(
            f"{name}: {stages} stages on {devices} devices; it takes {('one', 'two')[each - 1]} on "
            f"each: stages={each * devices}{others}."
        )
    if filled and microbatches < stages:
        raise ValueError(
            f"{name}: {microbatches} microbatches for {stages} stages; it takes {stages} or more."
        )


def _per_round(name, devices, microbatches):
    """The microbatches in a round: `devices`, or a few more for even rounds; all, if fewer."""

    def whole(count):
        return count % max(1, count // devices) == 0

    if not whole(microbatches):
        below = next(filter(whole, range(microbatches, 0, -1)))
        above = next(filter(whole, itertools.count(microbatches)))
        raise ValueError(
            f"{name}: {microbatches} microbatches do not fall into even rounds of {devices} "
            f"or more; {below} or {above} would."
        )
    return microbatches // max(1, microbatches // devices)
