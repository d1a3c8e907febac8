"""The published schedules: one function and one entry in `SCHEDULES` for each.

Every function takes how many stages, devices and microbatches there are and returns a `Schedule`,
or raises a ValueError that says which numbers would do.
"""

import itertools

from shardwise.schedules.table import Schedule, Task


def gpipe(stages, devices, microbatches):
    """All forwards, then all backwards (Huang et al., 2019): as many live as microbatches."""
    return _one_to_one("gpipe", stages, devices, microbatches, lambda stage: microbatches)


def one_f_one_b(stages, devices, microbatches):
    """A backward as soon as there is one: at most stages - stage live (Harlap et al., 2018)."""
    warmup = lambda stage: stages - stage - 1
    return _one_to_one("1f1b", stages, devices, microbatches, warmup)


def eager_1f1b(stages, devices, microbatches):
    """1F1B with twice the warm-up, so that a transfer in each direction is hidden (Zhuang, 2023).

    At most 2(stages - stage) - 1 live.
    """
    warmup = lambda stage: 2 * (stages - stage - 1)
    return _one_to_one("eager_1f1b", stages, devices, microbatches, warmup)


def interleaved_1f1b(stages, devices, microbatches):
    """Stages dealt round-robin, so that a device's wait is a shorter stage's (Narayanan, 2021).

    Microbatches go in rounds, of `devices` each, or a few more so that they come out even: each
    stage of a device runs a whole round before the next one does.
    """
    return _interleaved("interleaved_1f1b", stages, devices, microbatches, extra=0)


def kimi_k2(stages, devices, microbatches):
    """Interleaved 1F1B with one more warm-up forward (Kimi Team, 2025, Kimi K2).

    In the steady state a forward and a backward that need nothing of each other are neighbours:
    the communication of one can hide behind the other's work.
    """
    return _interleaved("kimi_k2", stages, devices, microbatches, extra=1)


def zb_h1(stages, devices, microbatches):
    """1F1B with backwards split, weights last: idle (p-1)(F+I-W), peak p (Qi et al., 2023)."""
    warmup = lambda stage: stages - stage
    return _zero_bubble("zb_h1", stages, devices, microbatches, warmup)


def zb_h2(stages, devices, microbatches):
    """More warm-up, for no idle time if all kinds cost the same (Qi et al., 2023).

    Idle (p-1)(F+I-2W) between a device's first and last task, peak 2p-1; the formulas hold from
    2p-1 microbatches on.
    """
    warmup = lambda stage: 2 * (stages - stage) - 1
    return _zero_bubble("zb_h2", stages, devices, microbatches, warmup)


def _one_to_one(name, stages, devices, microbatches, warmup):
    """`warmup(stage)` forwards, then a forward and a backward in turn, then backwards."""
    _require_counts(name, stages, devices, microbatches)
    _require_one_to_one(name, stages, devices)
    tasks = []
    for stage in range(stages):
        forwards = [Task(stage, "F", k) for k in range(microbatches)]
        backwards = [Task(stage, "B", k) for k in range(microbatches)]
        tasks.append(_warm_up_then_alternate(forwards, backwards, warmup(stage)))
    return Schedule(tuple(tasks), stages, microbatches, tuple(range(stages)))


def _warm_up_then_alternate(forwards, backwards, warmup):
    steady = itertools.zip_longest(forwards[warmup:], backwards)
    pairs = itertools.chain.from_iterable(steady)
    return (*forwards[:warmup], *(task for task in pairs if task is not None))


def _interleaved(name, stages, devices, microbatches, extra):
    _require_counts(name, stages, devices, microbatches)
    if stages % devices:
        raise ValueError(
            f"{name}: {stages} stages on {devices} devices; it takes a multiple of {devices}, as "
            f"{stages - stages % devices or devices} or {stages + -stages % devices}."
        )
    per_round = _microbatches_per_round(name, devices, microbatches)
    chunks = stages // devices
    tasks = []
    for device in range(devices):
        ordered = [
            (device + chunk * devices, microbatch)
            for first in range(0, microbatches, per_round)
            for chunk in range(chunks)
            for microbatch in range(first, first + per_round)
        ]
        mirrored = [
            (stages - 1 - (stage - device) + device - (devices - 1), k) for stage, k in ordered
        ]
        forwards = [Task(stage, "F", k) for stage, k in ordered]
        backwards = [Task(stage, "B", k) for stage, k in mirrored]
        warmup = (chunks - 1) * per_round + 2 * (devices - 1 - device) + extra
        tasks.append(_warm_up_then_alternate(forwards, backwards, warmup))
    homes = tuple(stage % devices for stage in range(stages))
    return Schedule(tuple(tasks), stages, microbatches, homes)


def _microbatches_per_round(name, devices, microbatches):
    whole = lambda count: count % max(1, count // devices) == 0
    if not whole(microbatches):
        below = next(count for count in range(microbatches, 0, -1) if whole(count))
        above = next(count for count in itertools.count(microbatches) if whole(count))
        raise ValueError(
            f"{name}: {microbatches} microbatches do not fall into even rounds of {devices} "
            f"devices or more; {below} or {above} would."
        )
    return microbatches // max(1, microbatches // devices)


def _zero_bubble(name, stages, devices, microbatches, warmup):
    """`warmup(stage)` forwards, I and F in turn until `warmup(0)` are live, then I, W, F in turn."""
    _require_counts(name, stages, devices, microbatches)
    _require_one_to_one(name, stages, devices)
    _require_microbatches(name, stages, microbatches)
    tasks = []
    for stage in range(stages):
        ahead, most = min(warmup(stage), microbatches), min(warmup(0), microbatches)
        kinds = ["F"] * ahead + ["I", "F"] * (most - ahead)
        kinds += ["I", "W", "F"] * microbatches + ["I", "W"] * microbatches
        tasks.append(_numbered(stage, kinds, microbatches))
    return Schedule(tuple(tasks), stages, microbatches, tuple(range(stages)))


def _numbered(stage, kinds, microbatches):
    """Tasks of these kinds, each kind counting its own microbatches and stopping at the last."""
    counts = {kind: itertools.count() for kind in "FIW"}
    tasks = (Task(stage, kind, next(counts[kind])) for kind in kinds)
    return tuple(task for task in tasks if task.microbatch < microbatches)


def dualpipe_v(stages, devices, microbatches):
    """DeepSeek's DualPipe folded into a V: a device holds stage d and stage 2p-1-d.

    The first and the last stage share a device, so that forwards that go down meet backwards that
    come up: an F and a B side by side, to be run as one (DeepSeek-AI, 2024; cut in half by Qi
    et al.). Backwards are split only in the first and the last part.
    """
    _require_counts("dualpipe_v", stages, devices, microbatches)
    if stages != 2 * devices:
        raise ValueError(
            f"dualpipe_v: {stages} stages on {devices} devices; it takes two on each: "
            f"stages={2 * devices}."
        )
    _require_microbatches("dualpipe_v", stages, microbatches)
    tasks = tuple(_folded(device, devices, microbatches) for device in range(devices))
    homes = (*range(devices), *reversed(range(devices)))
    return Schedule(tasks, stages, microbatches, homes)


def _folded(device, devices, microbatches):
    """One device's order, in the eight steps of DeepSeek's code; 0 goes down the V, 1 comes up."""
    left, here = devices - 1 - device, device + 1
    last = (here // 2) * 2 + (device % 2 == 0)  # whole backwards among the 2·here of step 6
    closing = ["B1", "B0"] * here
    closing = closing[:last] + [name.replace("B", "I") for name in closing[last:]]
    steps = (
        ["F0"] * (2 * left)
        + ["F0", "F1"] * here
        + ["I1", "W", "F1"] * left
        + ["F0", "B1", "F1", "B0"] * (microbatches - 2 * devices + here)
        + ["B1", "F1", "B0"] * left
        + closing
        + ["W", "I0"] * left
        + ["W"] * here
    )
    stage = {"0": device, "1": 2 * devices - 1 - device}
    forwards = {way: itertools.count() for way in "01"}
    backwards = {way: itertools.count() for way in "01"}
    tasks, waiting = [], []
    for step in steps:
        if step == "W":
            tasks.append(waiting.pop(0)._replace(kind="W"))
            continue
        kind, way = step
        counts = forwards if kind == "F" else backwards
        tasks.append(Task(stage[way], kind, next(counts[way])))
        if kind == "I":
            waiting.append(tasks[-1])
    return tuple(tasks)


def _require_counts(name, stages, devices, microbatches):
    counts = {"stages": stages, "devices": devices, "microbatches": microbatches}
    for what, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name}: {what}={count!r}; it takes a whole number, 1 or more.")


def _require_one_to_one(name, stages, devices):
    if stages != devices:
        raise ValueError(
            f"{name}: {stages} stages on {devices} devices; it takes one on each: "
            f"stages={devices}, or devices={stages}."
        )


def _require_microbatches(name, stages, microbatches):
    if microbatches < stages:
        raise ValueError(
            f"{name}: {microbatches} microbatches for {stages} stages; it takes {stages} or more."
        )


SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_1f1b,
    "interleaved_1f1b": interleaved_1f1b,
    "kimi_k2": kimi_k2,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "dualpipe_v": dualpipe_v,
}


def spread(name, devices, microbatches, per_device=2):
    """`SCHEDULES[name]` with as many stages on each device as it takes, `per_device` at most.

    For comparisons that loop over `SCHEDULES`: some take one stage on a device, some two.

    Raises:
      ValueError: it takes no such numbers, or there is no such schedule.
    """
    if name not in SCHEDULES:
        raise ValueError(f"spread: no schedule {name!r}; there are {', '.join(SCHEDULES)}.")
    refused = []
    for stages in range(per_device * devices, 0, -devices):
        try:
            return SCHEDULES[name](stages, devices, microbatches)
        except ValueError as error:
            refused.append(str(error))
    raise ValueError("\n".join(refused))
