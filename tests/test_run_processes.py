"""The command `shardwise train`, stopped in every way.

What another process would not show is called in this one, which has imported JAX already.
"""

import functools
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import grain
import numpy as np
import pytest
from sampling import IN_FULL

from shardwise import checkpoint, layouts, mesh, processes, run
from shardwise.__main__ import main
from shardwise.layouts import first_call
from shardwise.run import feed, notes, reports, signals
from shardwise.run.launch import local

pytestmark = pytest.mark.slow

mesh.simulate(8)  # before a command asks for fewer
full_only = pytest.mark.skipif(not IN_FULL, reason="run by `make stacks`")
STEPS = {1: 14, 2: 12}  # of a run in so many processes, which share few cores
SMALL = """--processes.hang 1000 --save-every 6 --batch 8 --sequence 32 --devices 4 --model.embed 32
--model.layers 2 --model.mlp 64 --model.dropout 0.1 --evaluation.every 0""".split()
SOURCE = str(Path(run.__file__).parents[2])


@pytest.fixture(scope="module")
def environment():
    """The environment of all processes here."""
    return {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": SOURCE,
    }


# What the runs that nothing stops do; a third of what a process takes.
SHORT = """from shardwise.layouts import first_call; from shardwise.run import reports
first_call.judge = reports.plot = lambda *given: None
"""


def asked(folder, count=1, extra=()):
    """The words after `shardwise` of a run in so many processes."""
    return ["train", "--run", str(folder), "--steps", str(STEPS[count]), *SMALL, *extra]


def start(environment, folder, count=1, extra=(), before="", who=None, short=SHORT):
    """`count` processes of one run, and a file of what each says.

    `before` is run first, in the one process `who`, or in all.
    """
    go = "import runpy; runpy.run_module('shardwise', run_name='__main__')"
    address, found = local.free_address(), []
    for index in range(count):
        several = ["--processes.address", address, "--processes.count", str(count)]
        several = [*several, "--processes.index", str(index)] if count > 1 else []
        words = [*asked(folder, count, extra), *several]
        program = f"{short}{before if who in (None, index) else ''}\n{go}"
        with open(f"{folder}.{index}.log", "a") as log:
            child = subprocess.Popen(
                [sys.executable, "-c", program, *words],
                env=os.environ | environment,
                stdout=log,
                stderr=log,
            )
        found.append(child)
    return found


@pytest.fixture
def here(monkeypatch):
    """here(folder, extra): the status of a short run of one process, which is this one."""

    def go(folder, extra=()):
        with monkeypatch.context() as patch:
            patch.setattr(first_call, "judge", lambda *given: None)
            patch.setattr(reports, "plot", lambda folder: None)
            return main(asked(folder, 1, extra))

    return go


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """Commands choose devices and handle signals for their process, which is other tests' too."""
    monkeypatch.setattr(mesh, "_devices", None)
    yield
    if stop := signals.standing():
        stop.close()


def statuses(children, seconds=600):
    try:
        return [child.wait(seconds) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()


def said(folder, index=0):
    return Path(f"{folder}.{index}.log").read_text()


def wait_for(folder, step, children):
    """Until so many steps are done."""
    file = Path(folder) / "metrics.jsonl"
    while not file.exists() or len(file.read_text().splitlines()) < step:
        assert all(child.poll() is None for child in children), said(folder)
        time.sleep(0.01)


def losses(folder):
    return [(x["step"], x["loss"]) for x in reports.read(Path(folder) / "metrics.jsonl")]


@pytest.fixture(scope="module")
def folders(environment, tmp_path_factory):
    """The folder of a run that nothing stopped, on so many processes."""

    @functools.cache
    def folder(count):
        path = tmp_path_factory.mktemp("reference") / str(count)
        if count == 1:
            assert main(asked(path)) == 0
        else:
            assert statuses(start(environment, path, count, short="")) == [0] * count, said(path)
        assert (path / "metrics.png").exists()
        return path

    return folder


# No file above 32 KiB: what a checkpoint writes fails, what a metric writes does not.
FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, 2**15))"
# The process sends itself a signal when it has told of a step.
AT = """import os; from shardwise.run import reports; report = reports.Report.step
def told(self, step, *given):
    text = report(self, step, *given)
    if step == {0}: os.kill(os.getpid(), {1})
    return text
reports.Report.step = told
"""


STOPS = {
    1: [(signal.SIGHUP, 0), (signal.SIGKILL, 0)],
    2: [(signal.SIGQUIT, 1), (signal.SIGKILL, 1)],
}


@pytest.mark.parametrize(
    ("count", "stops"), STOPS.items() if IN_FULL else [(1, [(signal.SIGKILL, 0)])]
)
def test_stopped_and_resumed_is_not_stopped(environment, folders, here, tmp_path, count, stops):
    """Also where meanwhile the disk was full: the last checkpoint is left."""
    folder, often = tmp_path / "run", ["--save-every", "3"]
    extra, resumed = often, [*often, "--resume"]
    for number, which in stops:
        step = 8 if number == signal.SIGKILL else 2
        children = start(environment, folder, count, extra, AT.format(step, int(number)), which)
        found, extra = statuses(children), resumed
        if number == signal.SIGKILL:
            assert found[which] == -signal.SIGKILL and 0 not in found
            last = checkpoint.latest(folder / "checkpoints")
            assert 3 <= last < 8
            if count == 1:
                (status,) = statuses(start(environment, folder, 1, resumed, before=FULL))
                assert status not in (0, signals.STOPPED), said(folder)
                assert checkpoint.latest(folder / "checkpoints") == last
        else:
            assert found == [signals.STOPPED] * count, said(folder)
            last = checkpoint.latest(folder / "checkpoints")
            assert 2 < losses(folder)[-1][0] == last < 6
    if count == 1:
        assert here(folder, resumed) == 0
    else:
        assert statuses(start(environment, folder, count, resumed)) == [0] * count, said(folder)
    assert losses(folder) == losses(folders(count))


PLAIN = ["--model.dropout", "0"]  # of what compiles, masks are half


def test_a_run_whose_every_step_is_looked_at_hears_a_signal(here, tmp_path, monkeypatch):
    report = reports.Report.step

    def told(self, step, *given):
        text = report(self, step, *given)
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return text

    monkeypatch.setattr(reports.Report, "step", told)
    looked = [*PLAIN, "--hash-every", "1", "--save-every", "1"]
    assert here(tmp_path / "run", looked) == signals.STOPPED
    assert 2 <= losses(tmp_path / "run")[-1][0] <= 4


# While the parameters are made, before anything is compiled.
ASKED = """import os, signal; from shardwise.run import state; make = state.create
def asked(*given):
    os.kill(os.getpid(), signal.SIGTERM)
    return make(*given)
state.create = asked
"""
# As a program of one's own may, by which JAX's preemption service takes SIGTERM.
ALONE = "import jax; jax.distributed.initialize({0!r}, 1, 0, coordinator_bind_address={0!r})\n"


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=full_only)])
def test_a_signal_before_the_first_step_is_heard(environment, tmp_path, count):
    """Also where the one process has joined a coordinator, whose service takes SIGTERM."""
    folder = tmp_path / "run"
    before = ALONE.format(local.free_address()) + ASKED if count == 1 else ASKED
    children = start(environment, folder, count, PLAIN, before)
    assert statuses(children) == [signals.STOPPED] * count, said(folder)
    assert checkpoint.latest(folder / "checkpoints") == 1
    assert [step for step, _ in losses(folder)] == [1]


@full_only
def test_with_another_number_of_processes_it_goes_on(folders, here, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(folders(2), folder)  # of twelve steps
    assert here(folder, ["--resume"]) == 0
    np.testing.assert_allclose(losses(folder), losses(folders(1)), rtol=1e-4)


def recorded(folder):
    """{step: {path: hash}} of a run."""
    return {x["step"]: x["arrays"] for x in reports.read(Path(folder) / "hashes.jsonl")}


def test_an_exact_run_goes_on_anywhere_with_the_same_bits(environment, here, tmp_path, capsys):
    """On four devices; begun on two, it goes on in two processes, of which one is told to stop.

    They stop together, and one process goes on from there, under other roles.
    """
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    each = [*PLAIN, "--layout.exact", "4", "--hash-every", "1", "--steps"]
    assert here(whole, [*each, "7"]) == 0
    two = ["--devices", "2", "--layout.data", "2"]
    assert here(parts, [*each, "2", *two]) == 0
    on, four = [*PLAIN, "--resume", "--steps"], ["--devices", "4", "--layout.data", "1"]
    stop = AT.format(4, int(signal.SIGQUIT))
    both = start(environment, parts, 2, [*on, "100", *four], stop, 1)
    assert statuses(both) == [signals.STOPPED] * 2, said(parts)
    assert 4 < losses(parts)[-1][0] == checkpoint.latest(parts / "checkpoints") < 7
    assert here(parts, [*on, "7", *four, "--layout.tensor", "2"]) == 0
    assert recorded(parts) == recorded(whole) and losses(parts) == losses(whole)
    assert len(recorded(whole)) == 7 and len(set(map(str, recorded(whole).values()))) == 7
    assert main(["diff", str(whole), str(parts)]) == 0
    assert "equal in steps 1 to 7 (7)" in capsys.readouterr().out
    assert here(parts, [*on, "8", "--layout.exact", "8"]) == 1
    assert "layout.exact was 4 and is 8" in capsys.readouterr().err
    file = parts / "hashes.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[3]["arrays"]["params/head/kernel"] = "0"
    lines[4]["chip"] = "another"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["diff", str(whole), str(parts)]) == 1
    told = capsys.readouterr().out
    assert "part by step 4, equal in steps 1 to 3 (3): params/head/kernel." in told
    assert "One ran with chip" not in told  # which is another in step 5 alone


@full_only
def test_a_second_signal_ends_a_process_that_waits_in_a_collective(environment, tmp_path):
    folder = tmp_path / "run"
    children = start(environment, folder, 2, [*PLAIN, "--steps", "100000"])
    wait_for(folder, 4, children)
    children[1].send_signal(signal.SIGSTOP)
    time.sleep(1)  # by then the other waits for it
    children[0].send_signal(signal.SIGTERM)
    time.sleep(0.2)
    children[0].send_signal(signal.SIGTERM)
    try:
        assert children[0].wait(600) == 128 + signal.SIGTERM
        assert "ending without saving" in said(folder)
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_a_process_that_hangs_ends_the_others(environment, tmp_path):
    folder = tmp_path / "run"
    endless = [*PLAIN, "--processes.hang", "6", "--steps", "100000"]
    children = start(environment, folder, 2, endless, short="")  # so that both judge their loss
    wait_for(folder, 4, children)
    children[1].send_signal(signal.SIGSTOP)
    try:
        assert children[0].wait(600) == notes.STUCK
        assert "has made no progress" in said(folder)
    finally:
        for child in children:
            child.kill()
            child.wait()
    found = notes.read(folder)
    assert set(found) == {0, 1} and all(note.step >= 4 for note in found.values())


def test_the_command_writes_from_a_checkpoint(folders, monkeypatch, capsys):
    for words in ([], ["--mean", "--devices", "2"]):
        monkeypatch.setattr(mesh, "_devices", None)
        folder = str(folders(1))
        capsys.readouterr()
        assert main(["sample", folder, "--tokens", "9", *words]) == 0
        assert capsys.readouterr().out.startswith("def ")
    assert json.loads((folders(1) / "settings.json").read_text())["model.embed"] == 32


def test_a_model_of_ones_own_trains_alone_and_launched(environment, tmp_path, monkeypatch):
    """The example: nobody's library, with resuming and several processes as its flags promise."""
    example = Path(__file__).parents[1] / "examples/own_model.py"
    (tmp_path / "mine.py").write_text(example.read_text())
    monkeypatch.chdir(tmp_path)

    def go(*words):
        monkeypatch.setattr(mesh, "_devices", None)
        monkeypatch.setattr(sys, "argv", ["mine.py", *words])
        with pytest.raises(SystemExit) as end:
            runpy.run_path("mine.py", run_name="__main__")
        assert end.value.code == 0

    go("--run", "whole", "--steps", "30")
    launched = "-m shardwise launch local --processes 2 -- mine.py --run two --steps 12".split()
    subprocess.run([sys.executable, *launched], env=os.environ | environment, check=True)
    assert len(losses(tmp_path / "two")) == 12
    go("--run", "two", "--resume", "--steps", "30")
    assert len(losses(tmp_path / "whole")) == 30
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "whole"), rtol=1e-4)


def fed(process, address):
    run.join(run.Processes(address=address, count=3, index=process), 6)
    layout = layouts.Layout(mesh.make(stage=2, data=3), stage="stage", data="data", microbatches=2)
    rows = grain.MapDataset.source([{"x": np.full(2, i)} for i in range(24)])
    (batch,) = feed.feed(rows, 12, layout).go(2, 2)
    for shard in batch["x"].addressable_shards:
        np.testing.assert_array_equal(shard.data[:, 0], np.arange(12, 24)[shard.index[0]])
    held = [range(*shard.index[0].indices(12)) for shard in batch["x"].addressable_shards]
    print(sorted({row for rows in held for row in rows}))
    run.leave()


def test_a_process_whose_rows_lie_apart_reads_and_places_those():
    """Of stages × data over three processes with two devices, the second has the ends."""
    printed = [out.splitlines() for out in processes.run(fed, 3)]
    said = [next(line for line in lines if "[Gloo]" not in line) for lines in printed]
    assert said == [str([*range(8)]), str([*range(4), *range(8, 12)]), str([*range(4, 12)])]
