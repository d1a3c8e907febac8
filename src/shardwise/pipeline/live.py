"""The bytes on a stage's devices while one of its programs runs, and those between stages."""

from typing import NamedTuple

from shardwise.schedules import Schedule, timeline

APPLY = "apply"  # no program of a stage: each parameter plus its update


class Held(NamedTuple):
    """The bytes of one stage's arrays on one of its devices, by kind of array.

    `own` are the parameters as they are kept, and as large are their gradients, `found` those that
    are gathered once a step as tasks find them. Of a microbatch: `data` of the batch,
    `carry` and `cotangents` as they arrive, `kept` between F and B, `pending` between I and W, and
    `outputs`, which the last stage has until the step ends and others send on; `back` is sent too.
    """

    own: int
    found: int
    state: int
    sums: int
    data: int
    carry: int
    outputs: int
    cotangents: int
    back: int
    kept: int
    pending: int


class Moment(NamedTuple):
    """The bytes on a device of a stage while its program `name` runs, arguments among them."""

    stage: int
    name: str
    live: int


def moments(schedule: Schedule, held: list[Held]) -> list[Moment]:
    """The fullest moment of each program's runs; tasks start when the schedule has them start.

    That is, by `schedules.timeline` with its usual costs. What a stage gets lies there from when it
    was sent until its task has run. A run dispatches one task ahead of the one that runs
    (`pipeline.running`): a device that reserves its outputs then has them, and more than these.
    """
    device_of, found = schedule.device_of, []
    for s, h in enumerate(held):
        mine = [x for x, d in zip(held, device_of, strict=True) if d == device_of[s]]
        kept = sum(x.own + x.state for x in mine)
        within = kept + sum(x.found + x.sums for x in mine)
        if h.found:
            found.append(Moment(s, "gather", within - h.found))
        for kind, size in _arrived(schedule, held, s).items():
            found.append(Moment(s, kind, within + size))
        results = schedule.microbatches * sum(x.outputs for x in _last(schedule, held, s))
        found.append(Moment(s, "finish", within + results))
        grads = sum(x.own for x in mine)
        found.append(Moment(s, "update", kept + grads))
        found.append(Moment(s, APPLY, kept + 2 * grads))
    return found


def _last(schedule, held, s):
    """[the last stage's entry of `held`], where it shares the devices of stage `s`; else []."""
    device_of = schedule.device_of
    return held[-1:] if device_of[s] == device_of[-1] else []


def _arrived(schedule, held, s):
    """{kind: the most bytes of microbatches on the stage's device when such a task starts}."""
    line, device = timeline(schedule), schedule.device_of[s]
    changes = []
    for at, began, ended, size in _things(schedule, held, line):
        if at == device:
            changes += [(began, size), (ended, -size)]
    starts = [(line.start[t], t.kind) for t in schedule.tasks[device] if t.stage == s]
    changes.sort()
    most, live, i = {}, 0, 0
    for time, kind in sorted(starts):
        while i < len(changes) and changes[i][0] <= time:
            live, i = live + changes[i][1], i + 1
        most[kind] = max(most.get(kind, 0), live)
    return most


def _things(schedule, held, line):
    """(device, from when, to when, bytes) of each thing that belongs to a microbatch."""
    for task in (t for order in schedule.tasks for t in order if t.kind == "F"):
        s, _, j = task
        h, at, back = held[s], schedule.device_of[s], schedule.backward(s, j)
        done = back if back.kind == "B" else back._replace(kind="W")
        yield at, line.start[task], line.end[done], h.data
        yield at, line.end[task], line.end[done], h.kept
        if back.kind == "I":
            yield at, line.end[back], line.end[done], h.pending
        if s:
            before = task._replace(stage=s - 1)
            yield at, line.end[before], line.end[task], h.carry
        if s < schedule.stages - 1:
            yield at, line.end[schedule.backward(s + 1, j)], line.end[back], h.cotangents
        else:
            yield at, line.end[task], line.makespan, h.outputs


def transfers(schedule: Schedule, held: list[Held]) -> list[int]:
    """The bytes that one device of each rank sends to stages beside, on other ranks, in a step."""
    device_of = schedule.device_of
    sent = [0] * schedule.devices
    for s, h in enumerate(held):
        for other, size in ((s + 1, h.outputs), (s - 1, h.back)):
            if 0 <= other < len(held) and device_of[other] != device_of[s]:
                sent[device_of[s]] += schedule.microbatches * size
    return sent
