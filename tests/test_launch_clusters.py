"""Launchers for clusters, as far as one machine without them can show."""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import textwrap
import types

import pytest

from shardwise.run import launch
from shardwise.run.launch import slurm
from shardwise.run.settings import option


@pytest.mark.parametrize("launcher", ["slurm", "ray"])
def test_launchers_that_keep_files_need_a_run_folder_here(launcher, capfd):
    assert launch.main([*launcher.split(), "--dry-run", "--", "train"]) == 2
    assert "keeps its files in the run folder" in capfd.readouterr().err


@pytest.mark.parametrize(
    "argv, told",
    [
        (["slurm", "--nodes", "0"], "--nodes 0: expected 1"),
        (["slurm", "--time", "1"], "--signal-before 120: expected 1 to 59 seconds"),
        (["ray", "--workers", "0"], "--workers 0: expected 1"),
        (["ray", "--tpu-type", "TPU-V6E"], "go together"),
    ],
)
def test_what_a_cluster_cannot_have_is_refused(argv, told, capfd, tmp_path):
    assert launch.main([*argv, "--", "train", "--run", str(tmp_path)]) == 2
    assert told in capfd.readouterr().err


@pytest.mark.parametrize("package, launcher", [("submitit", "slurm"), ("ray", "ray")])
def test_an_extra_that_is_not_there_is_named(package, launcher, monkeypatch, capfd, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    assert launch.main([launcher, "--", "train", "--run", str(tmp_path)]) == 2
    assert "pip install" in capfd.readouterr().err


def test_a_dry_run_for_ray_prints_what_each_worker_would_run(tmp_path, capfd):
    argv = ["ray", "--workers", "3", "--gpus-per-worker", "4", "--dry-run", "--", "train", "--run"]
    assert launch.main([*argv, str(tmp_path)], ("program",)) == 0
    told, *workers = capfd.readouterr().out.splitlines()
    assert "'num_workers': 3" in told and "'GPU': 4" in told and "'use_gpu': True" in told
    for index, line in enumerate(workers):
        words = shlex.split(line)
        assert words[:4] == ["program", "train", "--run", str(tmp_path)]
        assert option(words, "--processes.index") == str(index)
    assert len(workers) == 3 and not list(tmp_path.iterdir())


def test_tasks_of_a_node_share_out_its_gpus():
    found = [slurm.own_gpus(2, {"SLURM_LOCALID": str(i)})["JAX_LOCAL_DEVICE_IDS"] for i in range(4)]
    assert found == ["0,1", "2,3", "4,5", "6,7"]
    assert slurm.own_gpus(0, {}) == {}


def test_a_node_is_asked_for_the_gpus_of_all_its_tasks(tmp_path, monkeypatch):
    """By a stand-in for submitit, which need not be here."""
    asked = {}
    submitter = types.SimpleNamespace(
        update_parameters=lambda **told: asked.update(told),
        _make_submission_file_text=lambda *_: "",
        _submitit_command_str="",
    )
    monkeypatch.setitem(sys.modules, "submitit", types.ModuleType("submitit"))
    monkeypatch.setattr(slurm, "executor", lambda *_: submitter)
    argv = ["slurm", "--tasks-per-node", "3", "--gpus-per-task", "4", "--dry-run", "--", "train"]
    assert launch.main([*argv, "--run", str(tmp_path)]) == 0
    assert asked["ntasks_per_node"] == 3 and asked["gpus_per_node"] == 12


# From here on: what needs submitit or Ray, in a Python that starts as `shardwise launch` would.

CHILD = """
import json, os, sys
given = sys.argv[1:]
run = given[given.index("--run") + 1]
place = {k: v for k, v in os.environ.items() if k.startswith(("SLURM_", "JAX_LOCAL"))}
name = place.get("SLURM_PROCID") or given[given.index("--processes.index") + 1]
attempt = "resumed" if "--resume" in given else "first"
with open(f"{run}/{attempt}.{name}", "w") as file:
    json.dump({"given": given, "place": place}, file)
print("task", name, attempt)
"""

needs = pytest.mark.skipif


def has(package):
    return importlib.util.find_spec(package) is not None


LAUNCHER = """
import sys
from shardwise.run import launch
sys.exit(launch.main(sys.argv[2:], (sys.executable, "-S", sys.argv[1])))
"""


def launched(folder, script, argv, **environment):
    """Launch a script in place of the program; the process, when it has ended."""
    body = folder / "child.py"
    body.write_text(CHILD + textwrap.dedent(script))
    return subprocess.run(
        [sys.executable, "-c", LAUNCHER, str(body), *argv, "--", "train", "--run", str(folder)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )


def seen(folder, attempt):
    return {int(f.suffix[1:]): json.loads(f.read_text()) for f in folder.glob(f"{attempt}.*")}


# -3 is subprocess.DEVNULL: submitit waits for all that could write to sbatch's pipes.
SBATCH = """
import os, subprocess, sys
os.environ.setdefault("SLURM_JOB_ID", "4242")
open({folder!r} + "/batch", "w").write(open(sys.argv[-1]).read())
print("Submitted batch job 4242", flush=True)
subprocess.Popen(["bash", {folder!r} + "/batch"], stdout=-3, stderr=-3)
"""
SRUN = """
import os, subprocess, sys
words = sys.argv[1:]
out, err = (words[words.index(f) + 1].replace("%j", "4242") for f in ("--output", "--error"))
assert "--kill-on-bad-exit=1" in words
command = words[words.index(sys.executable):]
tasks = []
for i in range(4):
    where = dict(SLURM_PROCID=str(i), SLURM_LOCALID=str(i % 2), SLURM_NODEID=str(i // 2),
                 SLURM_NTASKS="4", SLURM_STEP_NODELIST="host[1-2]", SLURM_JOB_NUM_NODES="2")
    stdout, stderr = [open(name.replace("%t", str(i)), "a") for name in (out, err)]
    where = os.environ | where
    tasks.append(subprocess.Popen(command, env=where, stdout=stdout, stderr=stderr))
sys.exit(max(abs(task.wait()) for task in tasks))
"""
SCONTROL = """
import os, subprocess, sys
assert sys.argv[1:] == ["requeue", "4242"], sys.argv
open({folder!r} + "/requeued", "a").write("x")
again = os.environ | dict(SLURM_RESTART_COUNT="1")
subprocess.Popen(["bash", {folder!r} + "/batch"], env=again, stdout=-3, stderr=-3)
"""
SQUEUE = """
print("4242|RUNNING")
"""


@pytest.fixture
def cluster(tmp_path):
    """A PATH on which stand-ins for SLURM's commands come first."""
    tools = tmp_path / "bin"
    tools.mkdir()
    every = {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL, "squeue": SQUEUE}
    for name, text in every.items():
        body = text.replace("{folder!r}", repr(str(tmp_path)))
        (tools / name).write_text(f"#!{sys.executable} -S\n{body}")
        (tools / name).chmod(0o755)
    return f"{tools}:{os.environ['PATH']}"


@pytest.mark.slow
@needs(not has("submitit"), reason="without submitit")
def test_a_job_that_saved_is_queued_again_and_goes_on(tmp_path, cluster):
    argv = ["slurm", "--nodes", "2", "--tasks-per-node", "2", "--gpus-per-task", "2"]
    argv += ["--partition", "gpu", "--time", "90", "--wait"]
    script = "sys.exit(75 if attempt == 'first' else 0)"
    done = launched(tmp_path, script, argv, PATH=cluster)
    assert done.returncode == 0, done.stderr  # of the second attempt
    for attempt, more in ("first", []), ("resumed", ["--resume"]):
        found = seen(tmp_path, attempt)
        assert sorted(found) == [0, 1, 2, 3]
        for index, one in found.items():
            assert one["given"] == ["train", "--run", str(tmp_path), *more]
            gpus = ["0,1", "2,3"][index % 2]
            assert one["place"]["JAX_LOCAL_DEVICE_IDS"] == gpus
            assert one["place"]["SLURM_PROCID"] == str(index)
    assert (tmp_path / "requeued").read_text() == "x"
    batch = (tmp_path / "batch").read_text().splitlines()
    for line in (
        "nodes=2",
        "ntasks-per-node=2",
        "gpus-per-node=4",
        "partition=gpu",
        "time=90",
        "signal=USR2@120",
        "requeue",
    ):
        assert f"#SBATCH --{line}" in batch


@pytest.mark.slow
@needs(not has("submitit"), reason="without submitit")
@pytest.mark.parametrize("code, expected", [(75, 75), (3, 1)])
def test_a_job_that_is_not_queued_again_ends_with_the_status_of_its_tasks(
    tmp_path, cluster, code, expected
):
    argv = ["slurm", "--nodes", "2", "--tasks-per-node", "2", "--no-requeue", "--wait"]
    done = launched(tmp_path, f"sys.exit({code})", argv, PATH=cluster)
    assert done.returncode == expected, done.stderr
    logs = "".join(file.read_text() for file in (tmp_path / "submitit").glob("*.out"))
    assert "[0] task 0 first" in logs and "[3] task 3 first" in logs
    if code == 3:
        assert "exited with status 3" in done.stderr


@pytest.mark.slow
@needs(not has("submitit"), reason="without submitit")
def test_a_dry_run_prints_the_batch_file_and_the_command(tmp_path):
    done = launched(tmp_path, "", ["slurm", "--nodes", "2", "--no-requeue", "--dry-run"])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "#SBATCH --nodes=2" in lines and "#SBATCH --no-requeue" in lines
    assert shlex.split(lines[-1])[2:] == [
        str(tmp_path / "child.py"),
        "train",
        "--run",
        str(tmp_path),
    ]
    assert not (tmp_path / "submitit").exists()
    assert launched(tmp_path, "", ["slurm"], PATH="/nowhere").returncode == 2


@pytest.mark.slow
@needs(not has("ray"), reason="without Ray")
@pytest.mark.parametrize(
    "first, restarts, expected", [(0, 0, 0), (75, 0, 75), (3, 0, 1), (3, 1, 0)]
)
def test_ray_runs_two_workers(tmp_path, first, restarts, expected):
    argv = ["ray", "--workers", "2", "--cpus-per-worker", "0.5", "--restarts", str(restarts)]
    script = f"sys.exit({first} if attempt == 'first' else 0)"
    quiet = dict(RAY_USAGE_STATS_ENABLED="0")
    done = launched(tmp_path, script, argv, **quiet)
    assert done.returncode == expected, done.stdout + done.stderr
    for attempt in ["first"] + ["resumed"] * restarts:
        found = seen(tmp_path, attempt)
        assert sorted(found) == [0, 1]
        addresses = {option(one["given"], "--processes.address") for one in found.values()}
        assert len(addresses) == 1
    if first == 3 and not restarts:
        assert "exited with status 3" in done.stdout + done.stderr
