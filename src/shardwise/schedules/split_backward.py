"""Schedules whose backward is two tasks: I, which others wait for, and W, which fills gaps."""

import collections
import itertools

from shardwise.schedules import ranges
from shardwise.schedules.table import Schedule, Task


def zb_h1(stages, devices, microbatches):
    """1F1B with backwards split and weights last (Qi et al., 2024).

    Of p stages each has a peak of p, and idles at most (p-1)(F+I-W) between its first task and its
    last, as long as W costs no more than F.
    """
    return _zero_bubble("zb_h1", stages, devices, microbatches, lambda after: after + 1)


def zb_h2(stages, devices, microbatches):
    """More warm-up, for no idle time where all kinds cost the same (Qi et al., 2024).

    Of p stages each has a peak of 2p-1, and idles at most (p-1)(F+I-2W) between its first task and
    its last, from 2p-1 microbatches on, as long as W costs no more than F.
    """
    return _zero_bubble("zb_h2", stages, devices, microbatches, lambda after: 2 * after + 1)


def _zero_bubble(name, stages, devices, microbatches, warmup):
    """`warmup(stages after)` forwards; I, F until as many as the first stage has; then I, W, F."""
    ranges.require_counts(name, stages, devices, microbatches)
    ranges.require_one_to_one(name, stages, devices)
    ranges.require_microbatches(name, stages, microbatches)
    most = min(warmup(stages - 1), microbatches)
    tasks = []
    for stage in range(stages):
        ahead = min(warmup(stages - 1 - stage), microbatches)
        kinds = ["F"] * ahead + ["I", "F"] * (most - ahead)
        kinds += ["I", "W", "F"] * microbatches + ["I", "W"] * microbatches
        numbered = _numbered((stage, kind) for kind in kinds)
        tasks.append(tuple(task for task in numbered if task.microbatch < microbatches))
    return Schedule(tuple(tasks), stages, microbatches, tuple(range(stages)))


def _numbered(steps):
    """The tasks of `steps`, (stage, kind) pairs, of which each counts its own microbatches."""
    counts = collections.defaultdict(itertools.count)
    return [Task(stage, kind, next(counts[stage, kind])) for stage, kind in steps]


def dualpipe_v(stages, devices, microbatches):
    """DeepSeek's DualPipe folded into a V: device d holds the stages d and 2·devices - 1 - d.

    Forwards on their way down the V meet backwards on their way up: an F and a backward that need
    nothing of each other are neighbours, to be run as one (DeepSeek-AI, 2024; folded by Sea AI
    Lab). All backwards are split; most of them run I and W one after the other. The order is
    JaxPP's (Xhebraj et al., 2024), in which weights that wait at the end run last of all; run
    between the last I, as DeepSeek does, they cost devices - 1 ticks of idle time.
    """
    ranges.require_counts("dualpipe_v", stages, devices, microbatches)
    if stages != 2 * devices:
        raise ValueError(
            f"dualpipe_v: {stages} stages on {devices} devices; it takes two on each: "
            f"stages={2 * devices}."
        )
    ranges.require_microbatches("dualpipe_v", stages, microbatches)
    tasks = tuple(_folded(device, devices, microbatches) for device in range(devices))
    homes = (*range(devices), *reversed(range(devices)))
    return Schedule(tasks, stages, microbatches, homes)


def _folded(device, devices, microbatches):
    """One device's order, in the steps of DeepSeek's code; 0 is the way down, 1 the way up."""
    after, upto = devices - 1 - device, device + 1  # devices further down the V; this and above
    late = upto - upto // 2  # of the last backwards, those whose weights wait
    if device % 2:
        ends = ["I1", "W1", "I0", "W0"] * (upto // 2) + ["I1", "I0", "W0"] * late
    elif device:
        ends = ["I1", "W1", "I0", "W0"] * (upto // 2) + ["I1", "W1", "I0"] * late
    else:  # nobody waits for the input's gradient of stage 0, so its weights need not wait
        ends = ["I1", "W1", "I0", "W0"]
    steps = (
        ["F0"] * (2 * after)
        + ["F0", "F1"] * upto
        + ["I1", "W1", "F1"] * after
        + ["F0", "I1", "W1", "F1", "I0", "W0"] * (microbatches - 2 * devices + upto)
        + ["I1", "W1", "F1", "I0", "W0"] * after
        + ends
        + (["I0"] if device else ["I0", "W0"]) * after
    )
    stage = {"0": device, "1": 2 * devices - 1 - device}
    tasks = _numbered((stage[way], kind) for kind, way in steps)
    inputs = (task._replace(kind="W") for task in tasks if task.kind == "I")
    waiting = sorted(set(inputs) - set(tasks), key=lambda task: (task.microbatch, task.stage))
    return (*tasks, *waiting)
