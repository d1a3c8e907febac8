"""Launchers for clusters, as far as one machine without them can show."""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tarfile
import textwrap

import pytest

from shardwise.run import launch
from shardwise.run.launch import commands
from shardwise.run.launch.jobset import JobSet
from shardwise.run.launch.tasks import own_gpus

# What the JobSet API takes, where it meets what is made here: "!" marks what is required, {"*": x}
# is a map, and words after a type are all that it may be. From the CustomResourceDefinition of
# kubernetes-sigs/jobset at commit 08dfbdf (config/components/crd/bases); what may stand in a Job
# and a Pod as plain strings there is from the Kubernetes API's reference (batch/v1, core/v1).
API = {
    "apiVersion!": "string jobset.x-k8s.io/v1alpha2",
    "kind!": "string JobSet",
    "metadata!": {"name!": "string", "namespace": "string", "annotations": {"*": "string"}},
    "spec!": {
        "failurePolicy": {
            "maxRestarts": "integer",
            "rules": [
                {
                    "name!": "string",
                    "action!": "string FailJobSet RestartJobSet RestartJobSetAndIgnoreMaxRestarts "
                    "RestartJob RestartJobAndIgnoreMaxRestarts",
                    "onJobFailureReasons": [
                        "string BackoffLimitExceeded DeadlineExceeded FailedIndexes "
                        "MaxFailedIndexesExceeded PodFailurePolicy"
                    ],
                }
            ],
        },
        "network": {"enableDNSHostnames": "boolean", "publishNotReadyAddresses": "boolean"},
        "replicatedJobs": [
            {
                "name!": "string",
                "replicas": "integer",
                "template!": {
                    "spec": {
                        "backoffLimit": "integer",
                        "completionMode": "string NonIndexed Indexed",
                        "completions": "integer",
                        "parallelism": "integer",
                        "podFailurePolicy": {
                            "rules!": [
                                {
                                    "action!": "string Count FailIndex FailJob Ignore",
                                    "onExitCodes": {
                                        "containerName": "string",
                                        "operator!": "string In NotIn",
                                        "values!": ["integer"],
                                    },
                                    "onPodConditions": [
                                        {"status": "string True False Unknown", "type!": "string"}
                                    ],
                                }
                            ]
                        },
                        "template!": {
                            "spec": {
                                "containers!": [
                                    {
                                        "name!": "string",
                                        "image": "string",
                                        "command": ["string"],
                                        "args": ["string"],
                                        "env": [
                                            {
                                                "name!": "string",
                                                "value": "string",
                                                "valueFrom": {"fieldRef": {"fieldPath!": "string"}},
                                            }
                                        ],
                                        "resources": {"limits": {"*": "integer"}},
                                        "volumeMounts": [
                                            {"mountPath!": "string", "name!": "string"}
                                        ],
                                    }
                                ],
                                "nodeSelector": {"*": "string"},
                                # a Job with a podFailurePolicy takes no other
                                "restartPolicy!": "string Never",
                                "terminationGracePeriodSeconds": "integer",
                                "volumes": [
                                    {
                                        "name!": "string",
                                        "persistentVolumeClaim": {"claimName!": "string"},
                                    }
                                ],
                            }
                        },
                    }
                },
            }
        ],
    },
}
TYPES = {"string": str, "integer": int, "boolean": bool}


def faults(value, schema, at=""):
    """Where a value is not what a schema in the notation above says."""
    if isinstance(schema, str):
        kind, *allowed = schema.split()
        right = type(value) is TYPES[kind] and (not allowed or value in allowed)
        return [] if right else [f"{at}: {value!r} is not {schema}"]
    if type(value) is not type(schema):
        return [f"{at}: {value!r} is no {type(schema).__name__}"]
    if isinstance(schema, list):
        return [x for i, v in enumerate(value) for x in faults(v, schema[0], f"{at}[{i}]")]
    if "*" in schema:
        return [x for k, v in value.items() for x in faults(v, schema["*"], f"{at}.{k}")]
    known = {name.rstrip("!"): each for name, each in schema.items()}
    needed = {name.rstrip("!") for name in schema if name.endswith("!")}
    return [
        *(f"{at}.{name} is missing" for name in needed - value.keys()),
        *(f"{at}.{name} is unknown" for name in value.keys() - known.keys()),
        *(x for n in known.keys() & value.keys() for x in faults(value[n], known[n], f"{at}.{n}")),
    ]


TRAIN = ["train", "--run", "/runs/first", "--steps", "5"]
SHARED = "claim:/runs"
JOBSETS = [
    JobSet("image", volume=SHARED),
    JobSet("image", slices=3, tpu_topology="2x2x4", namespace="team", volume=SHARED),
    JobSet("image", tpu_topology="2x4", tpus_per_node=8, volume=SHARED),
    JobSet("image", "gpu", nodes=4, gpu_type="nvidia-h100-80gb", volume=SHARED),
    JobSet("image", "gpu", gpus_per_node=1, volume=SHARED),
]


@pytest.mark.parametrize("settings", JOBSETS)
def test_a_manifest_is_what_the_api_takes(settings):
    assert faults(settings.manifest(TRAIN), API) == []


def test_the_checker_sees_what_the_api_would_not_take():
    manifest = JOBSETS[3].manifest(TRAIN)
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["restartPolicy"] = "Always"
    pod["containers"][0] |= {"argv": [], "args": "train"}
    del pod["containers"][0]["name"], manifest["kind"]
    manifest["spec"]["failurePolicy"]["maxRestarts"] = "10"
    assert len(faults(manifest, API)) == 6


def pods_of(settings, command=TRAIN):
    """The arguments of every pod, as Kubernetes fills them in: {(job, pod): arguments}."""
    job = settings.manifest(command)["spec"]["replicatedJobs"][0]
    spec = job["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] and spec["completionMode"] == "Indexed"
    container = spec["template"]["spec"]["containers"][0]
    found = {}
    for at in range(job["replicas"]):
        for index in range(spec["parallelism"]):
            known = {v["name"]: str(index) for v in container["env"] if "valueFrom" in v}
            words = list(container["args"])
            for name, value in known.items():
                words = [word.replace(f"$({name})", value) for word in words]
            found[at, index] = [word.replace("$$(", "$(") for word in words]
    return found


def test_every_gpu_node_has_its_own_number_and_all_meet_at_the_first():
    assert (
        len(pods_of(JobSet("image", "gpu", nodes=2, slices=3, volume=SHARED))) == 2
    )  # slices are of TPUs
    found = pods_of(JOBSETS[3])
    numbers = sorted(int(commands.option(words, "--processes.index")) for words in found.values())
    assert numbers == list(range(4)) and len(found) == 4
    for (job, pod), words in found.items():
        assert commands.option(words, "--processes.index") == str(pod) and job == 0
        assert commands.option(words, "--processes.count") == "4"
        assert commands.option(words, "--processes.address") == (
            "shardwise-workers-0-0.shardwise:8476"
        )


@pytest.mark.parametrize("settings, hosts", [(JOBSETS[0], 4), (JOBSETS[1], 4), (JOBSETS[2], 1)])
def test_pods_of_slices_leave_their_numbers_to_what_gke_sets(settings, hosts):
    found = pods_of(settings)
    assert len(found) == settings.slices * hosts
    for words in found.values():
        assert words == [*TRAIN, "--resume"]


def test_arguments_reach_the_program_as_they_are():
    words = ["train", "--run", "/runs/r", "--data.text", "a $(HOME) 'b' $$(x) \"c\""]
    for each in pods_of(JOBSETS[0], words).values():
        assert each == [*words, "--resume"]


def test_the_manifest_is_printed_as_json(capfd):
    argv = ["jobset", "--image", "image", "--slices", "2", "--volume", SHARED, "--", *TRAIN]
    for more in [], ["--dry-run"]:
        assert launch.main([*argv[:3], *more, *argv[3:]]) == 0
        assert json.loads(capfd.readouterr().out) == JobSet(
            "image", slices=2, volume=SHARED
        ).manifest(TRAIN)


@pytest.mark.parametrize(
    "given, run, told",
    [
        ({"name": "My_run"}, "/runs/r", "--name My_run: expected 4"),
        ({"name": "a" * 60}, "/runs/r", "--name aaa"),
        ({"tpu_topology": "4"}, "/runs/r", "--tpu-topology 4: expected sizes such as"),
        (
            {"tpu_topology": "3x3"},
            "/runs/r",
            "its 9 chips are not a multiple of --tpus-per-node 4",
        ),
        ({"slices": 0}, "/runs/r", "--slices 0: expected 1 or more"),
        ({}, "runs/first", "the run folder runs/first is not on what pods share"),
        ({"volume": "claim"}, "/runs/first", "--volume claim: expected CLAIM:/path"),
        (
            {"volume": "claim:/data"},
            "/runs/first",
            "the run folder /runs/first is not on what pods",
        ),
    ],
)
def test_what_pods_could_not_use_is_refused(given, run, told):
    with pytest.raises(commands.Refused, match=told.split(":")[0]) as found:
        JobSet("image", **given).manifest(["train", "--run", run])
    assert told in str(found.value)


@pytest.fixture
def clone(tmp_path):
    """A git clone that looks like shardwise's, with one commit."""
    folder = tmp_path / "clone"
    (folder / "src" / "shardwise").mkdir(parents=True)
    (folder / "src" / "shardwise" / "__init__.py").write_text('"""committed"""\n')
    author = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for words in ["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "first"]:
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    return folder


GCLOUD = """#!{python} -S
import json, sys
with open({log!r}, "a") as log:
    print(json.dumps(sys.argv[1:]), file=log)
sys.exit(9 if {fails!r} and {fails!r} in " ".join(sys.argv) else 0)
"""


@pytest.fixture
def tpu_vm(tmp_path, clone, monkeypatch, capfd):
    """tpu_vm(fails): launch with a gcloud that fails at a word; its status, and gcloud's calls."""

    def go(fails="", *flags, command=("train", "--run", "runs/a b;c")):
        log, tool = tmp_path / "log", tmp_path / "bin" / "gcloud"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(GCLOUD.format(python=sys.executable, log=str(log), fails=fails))
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
        monkeypatch.chdir(tmp_path)
        argv = ["tpu-vm", "--name", "vm", "--zone", "z", "--source", str(clone), *flags]
        status = launch.main([*argv, "--", *command])
        calls = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return status, calls, capfd.readouterr()

    return go


def remote(call):
    """What the shell of a worker makes of a call's command."""
    [command] = [word for word in call if word.startswith("--command=")]
    return shlex.split(command.partition("=")[2])


def test_a_tpu_vm_gets_the_commit_runs_and_gives_back_the_run_folder(tpu_vm, tmp_path, clone):
    (clone / "src" / "shardwise" / "more.py").write_text("not committed")
    status, calls, _ = tpu_vm()
    assert status == 0
    for call in calls:
        assert call[:4] in (["compute", "tpus", "tpu-vm", kind] for kind in ("ssh", "scp"))
        assert call[-1] == "--zone=z"
    copy, *installs, run, fetch = calls
    archive = copy[4]
    with tarfile.open(archive) as found:
        names = [name for name in found.getnames() if name.endswith(".py")]
    assert [name.partition("/")[2] for name in names] == ["src/shardwise/__init__.py"]
    assert copy[5:7] == ["vm:", "--worker=all"]
    assert remote(installs[-1])[-2:] == ["jax[tpu]", f"./{os.path.basename(archive)}"]
    python = "shardwise-venv/bin/python"
    assert remote(run) == [python, "-m", "shardwise", "train", "--run", "runs/a b;c"]
    assert all("--worker=all" in call for call in [*installs, run])
    assert fetch[4:8] == ["--recurse", "vm:runs/a b;c", str(tmp_path / "runs"), "--worker=0"]


@pytest.mark.parametrize("fails, calls", [("scp", 1), ("jax[tpu]", 4), ("-m shardwise", 6)])
def test_a_step_that_fails_ends_a_tpu_vms_launch_but_its_files_are_fetched(tpu_vm, fails, calls):
    status, found, printed = tpu_vm(fails)
    assert (status, len(found)) == (9, calls)
    assert "that ended with status 9" in printed.err


def test_a_dry_run_for_a_tpu_vm_prints_what_would_run(tpu_vm, tmp_path):
    status, calls, printed = tpu_vm("", "--dry-run")
    assert (status, calls) == (0, []) and not (tmp_path / "runs").exists()
    shown = [shlex.split(line) for line in printed.out.splitlines()]
    _, calls, _ = tpu_vm()
    assert shown[0][:2] == ["git", "-C"] and "archive" in shown[0]
    assert shown[1:] == [["gcloud", *call] for call in calls]


def test_a_tpu_vm_gets_nothing_that_no_commit_holds(tpu_vm, clone, tmp_path):
    (clone / "src" / "shardwise" / "__init__.py").write_text("changed")
    status, calls, printed = tpu_vm()
    assert (status, calls) == (2, [])
    assert "changes that no commit holds (src/shardwise/__init__.py)" in printed.err
    assert tpu_vm("", "--source", str(tmp_path))[0] == 2


@pytest.mark.parametrize("launcher", ["slurm", "ray", "tpu-vm --name v --zone z"])
def test_launchers_that_keep_files_need_a_run_folder_here(launcher, capfd):
    assert launch.main([*launcher.split(), "--dry-run", "--", "train"]) == 2
    assert "keeps its files in the run folder" in capfd.readouterr().err


@pytest.mark.parametrize(
    "argv, told",
    [
        (["slurm", "--nodes", "0"], "--nodes 0: expected 1"),
        (["slurm", "--time", "1"], "--signal-before 120: expected 1 to 59 seconds"),
        (["slurm", "--nodes", "2", "--cluster", "local"], "--nodes 2: --cluster local has one"),
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
        assert commands.option(words, "--processes.index") == str(index)
    assert len(workers) == 3 and not list(tmp_path.iterdir())


def test_tasks_of_a_node_share_out_its_gpus():
    found = [own_gpus(2, {"SLURM_LOCALID": str(i)})["JAX_LOCAL_DEVICE_IDS"] for i in range(4)]
    assert found == ["0,1", "2,3", "4,5", "6,7"]
    assert own_gpus(0, {}) == {}


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


@pytest.mark.slow
@needs(not has("submitit"), reason="without submitit")
@pytest.mark.parametrize("code, expected", [(0, 0), (75, 75), (3, 1)])
def test_submitits_own_executor_runs_two_tasks(tmp_path, code, expected):
    argv = ["slurm", "--cluster", "local", "--tasks-per-node", "2", "--wait"]
    done = launched(tmp_path, f"sys.exit({code})", argv)
    assert done.returncode == expected, done.stderr
    found = seen(tmp_path, "first")
    each = [found[i]["given"][3:] for i in range(2)]
    address = each[0][1]
    for index, words in enumerate(each):
        flags = ["--processes.address", address, "--processes.count", "2"]
        assert words == [*flags, "--processes.index", str(index)]
    logs = "".join(file.read_text() for file in (tmp_path / "submitit").glob("*.out"))
    assert "[0] task 0 first" in logs and "[1] task 1 first" in logs
    if code == 3:
        assert "exited with status 3" in done.stderr


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
SACCT = """
print("JobID|State|NodeList")
print("4242|RUNNING|host1")
"""


@pytest.fixture
def cluster(tmp_path):
    """A PATH on which stand-ins for SLURM's commands come first."""
    tools = tmp_path / "bin"
    tools.mkdir()
    every = {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL, "sacct": SACCT}
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
        addresses = {commands.option(one["given"], "--processes.address") for one in found.values()}
        assert len(addresses) == 1
    if first == 3 and not restarts:
        assert "exited with status 3" in done.stdout + done.stderr
