"""Parts of a Kubernetes manifest, as data: a Job of pods, one pod, and what a failure leads to."""

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.run.launch import statuses

PYTHON = ("python3", "-m", "shardwise")  # of the image
VARIABLE = "SHARDWISE_PROCESS"
INDEX = f"$({VARIABLE})"  # as an argument, which Kubernetes replaces by the pod's index in its Job
_INDEX_AT = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def failures(restarts: int) -> dict[str, Any]:
    """Start all again; as often as it takes where all that happened was an eviction."""
    evicted = {
        "name": "evicted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],  # the one of `job`
    }
    return {"maxRestarts": restarts, "rules": [evicted]}


def job(count: int, pod: Mapping[str, Any]) -> dict[str, Any]:
    """`count` numbered pods that run together; the failure of one is that of all."""
    stopped = {"containerName": "train", "operator": "In", "values": [statuses.STOPPED]}
    lost = {"type": "DisruptionTarget", "status": "True"}
    rules = [
        {"action": "FailJob", "onExitCodes": stopped},
        {"action": "FailJob", "onPodConditions": [lost]},
    ]
    return {
        "parallelism": count,
        "completions": count,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": pod},
    }


def pod(
    image: str,
    command: Sequence[str],
    limits: Mapping[str, int],
    grace: int,
    nodes: Mapping[str, str],
    volume: str | None,
) -> dict[str, Any]:
    """One pod with one container, on nodes with these labels; `volume` is CLAIM:/path."""
    container = {
        "name": "train",
        "image": image,
        "command": list(PYTHON),
        "args": [_literal(word) for word in command],
        "env": [{"name": "PYTHONUNBUFFERED", "value": "1"}],
        "resources": {"limits": dict(limits)},
    }
    if INDEX in command:
        source = {"fieldRef": {"fieldPath": _INDEX_AT}}
        container["env"].append({"name": VARIABLE, "valueFrom": source})
    found = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace,
        "containers": [container],
    }
    if nodes:
        found["nodeSelector"] = dict(nodes)
    if volume is not None:
        claim, _, path = volume.partition(":")
        container["volumeMounts"] = [{"name": "runs", "mountPath": path}]
        found["volumes"] = [{"name": "runs", "persistentVolumeClaim": {"claimName": claim}}]
    return found


def _literal(word):
    """An argument as Kubernetes leaves it: other than our variable, $( is no reference."""
    return word if word == INDEX else word.replace("$(", "$$(")
