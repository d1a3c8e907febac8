"""Runs the launchers on real engines: `make engines`, as root on Debian.

A SLURM of two nodes, then a Ray of two, on this machine: each runs a job over both nodes, which is
stopped, started again and goes on. Daemons and their files lie in a folder of their own, which goes
with them; what is installed (Debian's slurm-wlm and munge, and .engines) stays.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOME, PINS = ROOT / ".engines", ("requirements.txt", "tests/engines.txt")
TOOLS = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "munged": "munge"}
SMALL = """--batch 8 --sequence 32 --devices 2 --model.embed 32 --model.layers 2 --model.mlp 64
--evaluation.every 0 --save-every 1000 --steps""".split()
STEPS = 300
# Where a token lies in the home of whoever runs this, Ray's programs would ask each other for it.
QUIET = dict(JAX_PLATFORMS="cpu", RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
# A tenth of a second more for each step, so that runs last until they are stopped.
SLOW = """import runpy, time
from shardwise.run import reports
report = reports.Report.step
def slowly(*given):
    time.sleep(0.1)
    return report(*given)
reports.Report.step = slowly
runpy.run_module("shardwise", run_name="__main__")
"""
CONF = """ClusterName=engines
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=7817
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SwitchType=switch/none
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
NodeName=127.0.0.[1-2] NodeHostname={host} Port=[7818-7819] CPUs=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""  # nodes by their numbers: JAX asks for the first one's address by its name


@pytest.fixture(scope="module")
def folder():
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that daemons end then too
    with tempfile.TemporaryDirectory(prefix="engines-", ignore_cleanup_errors=True) as made:
        os.chmod(made, 0o755)  # munged wants its socket where all can reach it
        Path(made, "slow.py").write_text(SLOW)
        yield Path(made)


@contextlib.contextmanager
def daemons(commands, folder, **environment):
    """Programs in the foreground, each with a log; all they have started is killed at the end."""
    started, alone = [], dict(env=os.environ | QUIET | {"ENGINES": str(folder)} | environment)
    alone["start_new_session"] = True
    try:
        for number, command in enumerate(commands):
            with open(folder / f"{command[0].rpartition('/')[2]}-{number}.log", "w") as log:
                started += [subprocess.Popen(command, stdout=log, stderr=log, **alone)]
            time.sleep(2)
        yield
        assert all(daemon.poll() is None for daemon in started), "a daemon has ended"
    finally:
        for daemon in reversed(started):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGTERM)
        time.sleep(2)
        for process in Path("/proc").glob("[0-9]*"):  # also what has a session of its own
            with contextlib.suppress(OSError):
                if f"ENGINES={folder}".encode() in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
        for daemon in started:
            daemon.wait()


@contextlib.contextmanager
def launched(argv, folder, run, *more, **environment):
    """The launcher with the slow program, and its log; killed at the end if it still runs."""
    command = [sys.executable, "-m", "shardwise", "launch", *argv, "--", folder / "slow.py"]
    command = [*command, "train", "--run", run, *SMALL, str(STEPS), *more]
    env = os.environ | QUIET | environment
    with open(f"{run}.log", "a") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    process.log = Path(log.name)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def losses(run):
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    read = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(line["step"], line["loss"]) for line in read]


def until(told, true, process, seconds=900):
    """Wait until it is true, while the launcher runs."""
    end = time.monotonic() + seconds
    while not true():
        ended = process.poll() is not None or time.monotonic() >= end
        assert not ended, f"{told}: {process.log.read_text()[-4000:]}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def uninterrupted(folder):
    """The losses of a run of two processes that nothing stopped."""
    with launched(["local"], folder, folder / "whole") as process:
        assert process.wait(600) == 0, (folder / "whole.log").read_text()
    return losses(folder / "whole")


def test_slurm_stops_a_job_before_its_time_queues_it_again_and_it_goes_on(folder, uninterrupted):
    (folder / "state").mkdir()
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    conf, run = folder / "slurm.conf", folder / "slurm"
    conf.write_text(CONF.format(host=socket.gethostname(), folder=folder))
    files = [("socket", "munge.socket"), ("key-file", "key"), ("pid-file", "munged.pid")]
    files += [("seed-file", "seed"), ("log-file", "munged.log")]
    munged = ["munged", "--foreground", *(f"--{flag}={folder / name}" for flag, name in files)]
    slurmds = [["slurmd", "-D", "-N", f"127.0.0.{i}"] for i in (1, 2)]
    settings = dict(SLURM_CONF=str(conf))
    argv = ["slurm", "--nodes", "2", "--time", "60", "--signal-before", "40", "--wait"]

    def scontrol(*words):
        command = ["scontrol", *words]
        return subprocess.check_output(command, env=os.environ | settings, text=True)

    with (
        daemons([munged, ["slurmctld", "-D"], *slurmds], folder, **settings),
        launched(argv, folder, run, **settings) as process,
    ):
        until("no step", lambda: len(losses(run)) > 4, process)
        scontrol("update", "JobId=1", "EndTime=now+60")  # so SLURM tells the job in half a minute
        until("not saved", lambda: any((run / "checkpoints").glob("[1-9]*")), process)
        scontrol("update", "JobId=1", "TimeLimit=60")
        assert process.wait(600) == 0, (folder / "slurm.log").read_text()
        assert " Restarts=1 " in scontrol("show", "job", "1")
    assert losses(run) == uninterrupted
    assert "accounting" not in (folder / "slurm.log").read_text()


def test_ray_is_stopped_started_again_and_goes_on(folder, uninterrupted):
    port, run, ray = "6390", folder / "ray", str(HOME / "bin/ray")  # workers' begin at 10002
    node = [ray, "start", "--block", "--num-cpus", "1", "--node-ip-address", "127.0.0.1"]
    head = [*node, "--head", "--port", port, "--include-dashboard=false"]
    nodes = [[*head, "--temp-dir", str(folder / "r")], [*node, "--address", f"127.0.0.1:{port}"]]
    argv = ["ray", "--workers", "2", "--address", f"127.0.0.1:{port}", "--restarts", "1"]
    with daemons(nodes, folder):
        with launched(argv, folder, run) as process:
            until("no step", lambda: len(losses(run)) > 4, process)
            notes = [json.loads(file.read_text()) for file in (run / "processes").glob("*.json")]
            os.kill(notes[0]["pid"], signal.SIGUSR1)  # it saves, and its launcher says 75
            assert process.wait(600) == 75, (folder / "ray.log").read_text()
        assert 4 < len(losses(run)) < STEPS
        with launched(argv, folder, run, "--resume") as process:
            assert process.wait(600) == 0, (folder / "ray.log").read_text()
    assert losses(run) == uninterrupted


def main():
    """Install what is missing, then run these tests in .engines."""
    missing = sorted({package for tool, package in TOOLS.items() if not shutil.which(tool)})
    lacks = ["root"] if os.getuid() else []
    if missing and not shutil.which("apt-get"):
        lacks += missing
    if lacks:
        return f"make engines: this needs Debian's SLURM, as root; missing: {' and '.join(lacks)}."
    if missing:
        apt = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *missing]
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(apt, check=True, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"})
    python, ready = HOME / "bin/python", HOME / "ready"
    wanted = "".join([str(ROOT), *((ROOT / name).read_text() for name in PINS)])
    if not ready.exists() or ready.read_text() != wanted:
        shutil.rmtree(HOME, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", HOME], check=True)
        flags = [word for name in PINS for word in ("-r", name)]
        subprocess.run([python, "-m", "pip", "install", "-qq", *flags], check=True, cwd=ROOT)
        ready.write_text(wanted)
    tests = [python, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", __file__]
    return subprocess.run(tests, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
