"""Kubernetes manifests: a JobSet, for TPU slices or GPU nodes."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.run.launch import commands, statuses
from shardwise.run.launch.commands import Refused

PORT = 8476  # of the coordinator, on worker 0 of GPU nodes
PYTHON = ("python3", "-m", "shardwise")  # of the image
INDEX = "SHARDWISE_PROCESS"


@dataclass(frozen=True)
class JobSet:
    """Print a Kubernetes manifest (JSON, which is YAML) for JobSet; nothing is sent anywhere.

    Pipe it to `kubectl apply -f -`. For TPUs each slice is a Job, and JAX numbers the processes
    over all slices by what GKE sets; for GPUs all nodes are one Job, whose index is the process's.
    When pods are evicted the run saves, all start again with --resume, and that does not count as a
    restart; a failure does. Written for GKE, and not tried on a cluster.
    """

    image: str
    """Of a container in which `python3 -m shardwise` runs."""
    accelerator: Literal["tpu", "gpu"] = "tpu"
    name: str = "shardwise"
    namespace: str | None = None
    tpu_type: str = "tpu-v5-lite-podslice"
    """GKE's name of the kind of slice."""
    tpu_topology: str = "4x4"
    """Chips of one slice."""
    tpus_per_node: int = 4
    slices: int = 1
    nodes: int = 1
    """Of GPUs."""
    gpus_per_node: int = 8
    gpu_type: str | None = None
    """GKE's name of the GPU, such as nvidia-h100-80gb."""
    volume: str | None = None
    """CLAIM:/path, a volume claim that all pods share, and where the run folder lies below."""
    restarts: int = 10
    """How often all start again after a failure."""
    grace: int = 300
    """Seconds that a pod has to save before it is killed."""
    dry_run: bool = False
    """Nothing else than without: this launcher only prints."""

    def launch(self, command: Sequence[str], program: Sequence[str]) -> int:
        """Print the manifest; 0."""
        print(json.dumps(self.manifest(command), indent=2))
        return 0

    def manifest(self, command: Sequence[str]) -> dict[str, Any]:
        """The JobSet as the API takes it (jobset.x-k8s.io/v1alpha2).

        Raises:
          Refused: names, sizes or a run folder that Kubernetes or the pods could not use.
        """
        self._check(command)
        metadata = {"name": self.name}
        if self.namespace is not None:
            metadata["namespace"] = self.namespace
        if self.accelerator == "tpu":
            # Each slice on a node pool of its own.
            key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
            metadata["annotations"] = {key: "cloud.google.com/gke-nodepool"}
        replicas = self.slices if self.accelerator == "tpu" else 1
        job = {"name": "workers", "replicas": replicas, "template": {"spec": self._job(command)}}
        spec = {
            "replicatedJobs": [job],
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": self._failures(),
        }
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": metadata,
            "spec": spec,
        }

    def pods(self) -> int:
        """How many pods one Job has: a slice's hosts, or all GPU nodes."""
        if self.accelerator == "gpu":
            return self.nodes
        return max(1, _chips(self.tpu_topology) // self.tpus_per_node)

    def _check(self, command):
        for name in ("tpus_per_node", "slices", "nodes", "gpus_per_node", "grace"):
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise Refused(f"--{flag} {getattr(self, name)}: expected 1 or more.")
        # Pods are named NAME-workers-JOB-POD, and no label is longer than 63.
        longest = 63 - len(f"-workers-{self.slices}-{self.pods()}-abcde")
        if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", self.name) or len(self.name) > longest:
            raise Refused(
                f"--name {self.name}: expected lower-case letters, digits and dashes, from a letter "
                f"on, {longest} at most."
            )
        if self.accelerator == "tpu" and _chips(self.tpu_topology) % self.tpus_per_node:
            raise Refused(
                f"--tpu-topology {self.tpu_topology}: its {_chips(self.tpu_topology)} chips are not "
                f"a multiple of --tpus-per-node {self.tpus_per_node}."
            )
        self._check_run(command)

    def _check_run(self, command):
        run = commands.option(command, "--run")
        if run is not None and commands.is_remote(run):
            return
        mount = "" if self.volume is None else self.volume.partition(":")[2]
        if self.volume is not None and not mount.startswith("/"):
            raise Refused(f"--volume {self.volume}: expected CLAIM:/path.")
        if run is None or not mount or not run.startswith(mount.rstrip("/") + "/"):
            raise Refused(
                f"the run folder {run or '(no --run)'} is not on what pods share: say --run "
                f"gs://BUCKET/FOLDER, or --volume CLAIM:/runs and --run /runs/FOLDER."
            )

    def _failures(self):
        """Start all again; as often as it takes where all that happened was an eviction."""
        evicted = {
            "name": "evicted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
        return {"maxRestarts": self.restarts, "rules": [evicted]}

    def _job(self, command):
        stopped = {"containerName": "train", "operator": "In", "values": [statuses.STOPPED]}
        lost = {"type": "DisruptionTarget", "status": "True"}
        return {
            "parallelism": self.pods(),
            "completions": self.pods(),
            "completionMode": "Indexed",
            "backoffLimit": 0,  # one pod alone cannot start again
            "podFailurePolicy": {
                "rules": [
                    {"action": "FailJob", "onExitCodes": stopped},
                    {"action": "FailJob", "onPodConditions": [lost]},
                ]
            },
            "template": {"spec": self._pod(command)},
        }

    def _pod(self, command):
        spec = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.grace,
            "containers": [self._container(command)],
        }
        if self._selected():
            spec["nodeSelector"] = self._selected()
        if self.volume is not None:
            claim = {"claimName": self.volume.partition(":")[0]}
            spec["volumes"] = [{"name": "runs", "persistentVolumeClaim": claim}]
        return spec

    def _selected(self):
        if self.accelerator == "tpu":
            return {
                "cloud.google.com/gke-tpu-accelerator": self.tpu_type,
                "cloud.google.com/gke-tpu-topology": self.tpu_topology,
            }
        return {"cloud.google.com/gke-accelerator": self.gpu_type} if self.gpu_type else {}

    def _container(self, command):
        command = commands.resuming(command)
        variables = []
        if self.accelerator == "gpu":
            address = f"{self.name}-workers-0-0.{self.name}:{PORT}"
            command = commands.of_process(command, address, self.nodes, f"$({INDEX})")
            at = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            variables.append({"name": INDEX, "valueFrom": {"fieldRef": {"fieldPath": at}}})
        amount, resource = (
            (self.tpus_per_node, "google.com/tpu")
            if self.accelerator == "tpu"
            else (self.gpus_per_node, "nvidia.com/gpu")
        )
        container = {
            "name": "train",
            "image": self.image,
            "command": list(PYTHON),
            "args": [_literal(word) for word in command],
            "env": [*variables, {"name": "PYTHONUNBUFFERED", "value": "1"}],
            "resources": {"limits": {resource: amount}},
        }
        if self.volume is not None:
            mount = {"name": "runs", "mountPath": self.volume.partition(":")[2]}
            container["volumeMounts"] = [mount]
        return container


def _literal(word):
    """An argument as Kubernetes leaves it: of other than our variable, $( is no reference."""
    return word if word == f"$({INDEX})" else word.replace("$(", "$$(")


def _chips(topology):
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", topology):
        raise Refused(f"--tpu-topology {topology}: expected sizes such as 4x4 or 2x2x4.")
    return math.prod(map(int, topology.split("x")))
