"""Layouts, drawn by a seed, as runs on one, two and four processes: equal, and bit for bit."""

import dataclasses
import functools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from shardwise import layouts, model, run
from shardwise.layouts import first_call
from shardwise.layouts.layout import ROLES
from shardwise.run import decoder, metrics
from shardwise.run.settings import F32

STAGED = {name for name in layouts.LAYOUTS if "stage" in name}
NAMES = [name for name in layouts.LAYOUTS if name not in STAGED]
SEED, STEPS = 12, 4
STANDSTILL = 400  # seconds
IN_FULL = bool(os.environ.get("IN_FULL"))  # which `make stacks` sets
# On several processes a seeded part of them, since each compiles every program itself.
MANY = {2: 8, 4: 4} if IN_FULL else {2: 2, 4: 1}
ON = {n: sorted(random.Random(n * SEED).sample(NAMES, many)) for n, many in MANY.items()}
# Of stages one on each number: their permutes then meet between processes.
ON[2], ON[4] = [*ON[2], "stage, fsdp"], [*ON[4], "stage"]
ON[1] = sorted({*ON[2], *ON[4]})
# Which are stopped and go on.
AGAIN = {1: ON[2][:1], 2: [ON[2][0], "stage, fsdp"], 4: ["stage"] if IN_FULL else []}


def settings(name, folder, **changes):
    """Of a small run whose sizes eight devices divide, in each role."""
    layout = layouts.LAYOUTS[name](8)
    fields = {field.name for field in dataclasses.fields(run.Roles)}
    roles = {n: getattr(layout, n) for n in fields - set(ROLES)}
    roles = run.Roles(**roles, **{role: layout.size(role) for role in ROLES})
    assert roles.layout() == layout
    sizes = dict(embed=32, layers=2, heads=16, kv_heads=8, head_dim=2, mlp=48, dropout=0.1)
    if layout.stage:
        sizes |= dict(layers=layout.size("stage"))
    if layout.expert:
        sizes |= dict(experts=8, experts_per_token=2, capacity_factor=None, dropout=0.0, mlp=16)
    return run.Settings(
        run=Path(folder) / name,
        layout=roles,
        model=model.Config(dtype=F32, param_dtype=F32, **sizes),
        evaluation=run.Evaluation(every=0),
        processes=run.Processes(hang=1000),
        **dict(steps=STEPS, batch=16, sequence=32) | changes,
    )


def train(process, address, count, folder):
    """A run of each layout, in one of `count` processes; of some a second one, in two parts."""
    who = dict(address=address, count=count, index=process) if count > 1 else {}
    run.join(run.Processes(**who, heartbeat=200), 8)
    for name in ON[count]:
        go(settings(name, folder))
        first_call.judge = lambda *given: None  # of one loss once: each time costs what a step does
    for name in AGAIN[count]:
        go(settings(name, f"{folder}/again", steps=random.Random(name).randint(1, STEPS - 1)))
        go(settings(name, f"{folder}/again"))
    run.leave()


def go(each):
    """Train, but for what is done; all that was begun is gone on with."""
    if len(losses(each.run)) < each.steps:
        decoder.train(dataclasses.replace(each, resume=True))


def losses(folder):
    return [(x["step"], x["loss"]) for x in metrics.read(folder / "metrics.jsonl")]


def started(function, count, folder):
    """What `count` processes end with, and say, that call a function of this file.

    Without a cache of programs: of several processes on CPU the first alone finds them there, and
    collectives of what it found and what others compiled have deadlocked over gloo, two of one
    device at once. Where all stands still, all are killed, and go on once more.
    """
    for _ in range(2):
        codes, said = _once(function, count, folder)
        if codes != [-signal.SIGKILL] * count:
            break
    return codes, said


def _once(function, count, folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    env = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    children, logs = [], [Path(f"{folder}.{process}.log") for process in range(count)]
    for process, log in enumerate(logs):
        call = f"{function.__name__}{(process, address, count, str(folder))!r}"
        command = [sys.executable, "-c", f"import {__name__}; {__name__}.{call}"]
        with log.open("w") as out:
            children.append(subprocess.Popen(command, env=env, stdout=out, stderr=out))
    try:
        _watch(children, folder, logs)
    finally:
        for child in children:
            child.kill()
            child.wait()
    return [child.returncode for child in children], [log.read_text() for log in logs]


def _watch(children, folder, logs):
    """Until all have ended, or nothing has moved for so long."""
    before, since = None, time.monotonic()
    while any(child.poll() is None for child in children):
        # Notes alone: checkpoints are renamed while one looks.
        notes = [*folder.glob("*/processes/[0-9].json"), *folder.glob("again/*/processes/*.json")]
        now = sorted((str(x), x.stat().st_mtime) for x in [*notes, *logs])
        before, since = (now, time.monotonic()) if now != before else (before, since)
        if time.monotonic() - since > STANDSTILL:
            return
        time.sleep(0.5)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """{name: losses} of each layout on so many processes, and of those that were stopped."""

    @functools.cache
    def on(count):
        folder = tmp_path_factory.mktemp(f"on{count}")
        codes, said = started(train, count, folder)
        assert codes == [0] * count, "\n".join(text[-3000:] for text in said)
        return (
            {name: losses(folder / name) for name in ON[count]},
            {name: losses(folder / "again" / name) for name in AGAIN[count]},
        )

    return on


@pytest.mark.slow
@pytest.mark.parametrize("name, count", [(name, n) for n in (2, 4) for name in ON[n]])
def test_a_layout_over_processes_is_that_of_one(found, name, count):
    """To rounding: sums between processes have another order than within one."""
    ours, theirs = found(count)[0][name], found(1)[0][name]
    assert [step for step, _ in ours] == list(range(1, STEPS + 1))
    np.testing.assert_allclose(ours, theirs, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name, count", [(name, n) for n in AGAIN for name in AGAIN[n]])
def test_a_layout_that_was_stopped_goes_on_bit_for_bit(found, name, count):
    every, resumed = found(count)
    assert resumed[name] == every[name]
