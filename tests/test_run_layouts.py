"""Layouts as runs on one, two and four processes: equal, and bit for bit."""

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
from sampling import IN_FULL

from shardwise import layouts, model, run
from shardwise.layouts import first_call
from shardwise.layouts.layout import ROLES
from shardwise.run import decoder, reports
from shardwise.run.settings import F32, Evaluation

STAGED = {name for name in layouts.LAYOUTS if "stage" in name}
NAMES = [n for n in layouts.LAYOUTS if n not in STAGED and n.count(",") < 2]
SEED, STEPS = 12, 4
DEVICES = 4  # of four processes one each: every axis then lies between processes
STANDSTILL = 400  # seconds
# On several processes a few, since each compiles every program itself: with these every role is
# divided, and by the compiler too. In full there is a seeded part of the others.
ON = {2: ["zigzag", "fsdp, tensor by compiler", "expert"], 4: []}
if IN_FULL:
    for n, many in {2: 6, 4: 3}.items():
        others = [name for name in NAMES if name not in ON[n]]
        ON[n] += random.Random(n * SEED).sample(others, many)
# Of stages one on each number: their permutes then meet between processes.
ON[2], ON[4] = [*ON[2], "stage, fsdp"], [*ON[4], "stage"]
ON[1] = sorted({*ON[2], *ON[4]})
# Which are stopped and go on.
AGAIN = {1: [], 2: ["stage, fsdp"], 4: []}
if IN_FULL:
    AGAIN = {1: ["zigzag"], 2: ["zigzag", "stage, fsdp"], 4: ["stage"]}


def settings(name, folder, **changes):
    """Of a small run whose sizes the devices divide, in each role."""
    layout = layouts.LAYOUTS[name](DEVICES)
    fields = {field.name for field in dataclasses.fields(run.Roles)}
    roles = {n: getattr(layout, n) for n in fields - set(ROLES)}
    roles = run.Roles(**roles, **{role: layout.size(role) for role in ROLES})
    assert roles.layout() == layout
    # Masks, which are half of what compiles, where they have to go on too.
    dropout = 0.1 if any(name in names for names in AGAIN.values()) else 0.0
    sizes = dict(embed=32, layers=2, heads=16, kv_heads=8, head_dim=2, mlp=48, dropout=dropout)
    if layout.stage:
        sizes |= dict(layers=layout.size("stage"))
    if layout.expert:
        sizes |= dict(experts=8, experts_per_token=2, capacity_factor=None, dropout=0.0, mlp=16)
    return run.Settings(
        run=Path(folder) / name,
        layout=roles,
        model=model.Config(dtype=F32, param_dtype=F32, **sizes),
        evaluation=Evaluation(every=0),
        processes=run.Processes(hang=1000),
        **dict(steps=STEPS, batch=16, sequence=32) | changes,
    )


def train(process, address, count, folder):
    """A run of each layout, in one of `count` processes; of some a second one, in two parts."""
    who = dict(address=address, count=count, index=process) if count > 1 else {}
    run.join(run.Processes(**who, heartbeat=200), DEVICES)
    # Each costs what a step does, and test_run_processes has them.
    first_call.judge = reports.plot = lambda *given: None
    for name in ON[count]:
        go(settings(name, folder))
    for name in AGAIN[count]:
        go(settings(name, f"{folder}/again", steps=random.Random(name).randint(1, STEPS - 1)))
        go(settings(name, f"{folder}/again"))
    run.leave()


def go(each):
    """Train, but for what is done; all that was begun is gone on with."""
    if len(losses(each.run)) < each.steps:
        decoder.train(dataclasses.replace(each, resume=True))


def losses(folder):
    return [(x["step"], x["loss"]) for x in reports.read(folder / "metrics.jsonl")]


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


def test_every_role_is_tried_over_processes_by_hand_and_some_by_the_compiler():
    made = [layouts.LAYOUTS[name](DEVICES) for name in ON[2] + ON[4]]
    assert {role for each in made for role in each.roles()} >= {*ROLES} - {"data"}
    assert {each.by for each in made} == {"hand", "compiler"}


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
