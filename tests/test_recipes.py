"""Recipes for clusters that were not at hand: what of them one machine can check."""

import json
import os
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from shardwise import run

EXAMPLES = Path(__file__).parents[1] / "examples"

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


MANIFESTS = {"jobset.yaml": (2, None), "jobset_gpus.yaml": (1, 4)}  # Jobs, and counted processes


def manifest(name):
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((EXAMPLES / name).read_text())


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_is_what_the_api_takes(name):
    assert faults(manifest(name), API) == []


def test_the_checker_sees_what_the_api_would_not_take():
    found = manifest("jobset_gpus.yaml")
    pod = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["restartPolicy"] = "Always"
    pod["containers"][0] |= {"argv": [], "args": "train"}
    del pod["containers"][0]["name"], found["kind"]
    found["spec"]["failurePolicy"]["maxRestarts"] = "10"
    assert len(faults(found, API)) == 6


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_pod_has_flags_that_train_takes_and_a_number_of_its_own(name):
    jobs, count = MANIFESTS[name]
    found = manifest(name)
    job = found["spec"]["replicatedJobs"][0]
    spec = job["template"]["spec"]
    assert job["replicas"] == jobs and spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"] == 4
    container = spec["template"]["spec"]["containers"][0]
    known = [v["name"] for v in container["env"] if "valueFrom" in v]
    assert container["command"] == ["python3", "-m", "shardwise"]
    for index in range(spec["parallelism"]):  # as Kubernetes fills them in
        words = [w.replace(f"$({n})", str(index)) for w in container["args"] for n in known or [""]]
        assert words.pop(0) == "train"
        settings = run.flags(argv=words)
        assert settings.resume
        assert container["volumeMounts"][0]["mountPath"] == str(settings.run.parent)
        given = settings.processes.address, settings.processes.count, settings.processes.index
        first = f"{found['metadata']['name']}-workers-0-0.{found['metadata']['name']}:8476"
        assert given == ((first, count, index) if count else (None, None, None))


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
def tpu_vm(tmp_path, clone):
    """tpu_vm(fails): run the recipe with a gcloud that fails at a word; status, calls, errors."""

    def go(fails=""):
        log, tool = tmp_path / "log", tmp_path / "bin" / "gcloud"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(GCLOUD.format(python=sys.executable, log=str(log), fails=fails))
        tool.chmod(0o755)
        words = ["bash", EXAMPLES / "tpu_vm.sh", "vm", "z", tmp_path / "runs/a b;c", "--steps", "5"]
        environment = os.environ | {"PATH": f"{tool.parent}:{os.environ['PATH']}"}
        environment["TMPDIR"] = str(tmp_path)
        done = subprocess.run(words, cwd=clone, env=environment, capture_output=True, text=True)
        calls = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return done.returncode, calls, done.stderr

    return go


def remote(call):
    """What the shell of a worker makes of a call's command."""
    [command] = [word for word in call if word.startswith("--command=")]
    return shlex.split(command.partition("=")[2])


def test_a_tpu_vm_gets_the_commit_runs_and_gives_back_the_run_folder(tpu_vm, tmp_path, clone):
    (clone / "src" / "shardwise" / "more.py").write_text("not committed")
    status, calls, errors = tpu_vm()
    assert status == 0, errors
    for call in calls:
        assert call[:4] in (["compute", "tpus", "tpu-vm", kind] for kind in ("ssh", "scp"))
        assert call[-1] == "--zone=z"
    copy, *installs, ran, fetch = calls
    with tarfile.open(copy[4]) as found:
        names = [name for name in found.getnames() if name.endswith(".py")]
    assert names == ["shardwise/src/shardwise/__init__.py"]
    assert copy[5:7] == ["vm:", "--worker=all"]
    assert remote(installs[-1])[-2:] == ["jax[tpu]", f"./{os.path.basename(copy[4])}"]
    folder = tmp_path / "runs" / "a b;c"
    python, *words = remote(ran)
    assert [python, *words[:3]] == ["shardwise-venv/bin/python", "-m", "shardwise", "train"]
    settings = run.flags(argv=words[3:])
    assert (settings.run, settings.steps) == (folder, 5)
    assert all("--worker=all" in call for call in [*installs, ran])
    assert fetch[4:8] == ["--recurse", f"vm:{folder}", str(folder.parent), "--worker=0"]


@pytest.mark.parametrize("fails, calls", [("scp", 1), ("jax[tpu]", 4), ("-m shardwise", 6)])
def test_a_step_that_fails_ends_it_but_the_files_of_a_run_are_fetched(tpu_vm, fails, calls):
    status, found, _ = tpu_vm("jax\\[tpu" if fails == "jax[tpu]" else fails)
    assert (status, len(found)) == (9, calls)


def test_a_tpu_vm_gets_nothing_that_no_commit_holds(tpu_vm, clone):
    (clone / "src" / "shardwise" / "__init__.py").write_text("changed")
    status, calls, errors = tpu_vm()
    assert (status, calls) == (2, []) and "changes that no commit holds" in errors
