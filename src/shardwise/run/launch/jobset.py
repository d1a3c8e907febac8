"""Kubernetes manifests: a JobSet, for TPU slices or GPU nodes."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.run.launch import commands, pods
from shardwise.run.launch.commands import Refused

PORT = 8476  # of the coordinator, on worker 0 of GPU nodes
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"


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
    """CLAIM:/path, a volume claim that all pods share (of a bucket by Cloud Storage FUSE, or of a
    file server), and where the run folder lies below."""
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
        tpu = self.accelerator == "tpu"
        metadata = {"name": self.name}
        if self.namespace is not None:
            metadata["namespace"] = self.namespace
        if tpu:  # each slice on a node pool of its own
            metadata["annotations"] = {EXCLUSIVE: "cloud.google.com/gke-nodepool"}
        workers = {
            "name": "workers",
            "replicas": self.slices if tpu else 1,
            "template": {"spec": pods.job(self.pods(), self._pod(command))},
        }
        spec = {
            "replicatedJobs": [workers],
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": pods.failures(self.restarts),
        }
        head = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
        return {**head, "metadata": metadata, "spec": spec}

    def _pod(self, command):
        command = commands.resuming(command)
        if self.accelerator == "tpu":
            limits = {"google.com/tpu": self.tpus_per_node}
            labels = {
                "cloud.google.com/gke-tpu-accelerator": self.tpu_type,
                "cloud.google.com/gke-tpu-topology": self.tpu_topology,
            }
        else:
            # A Job's index is a process's only where there is one Job: slices would repeat it
            # (kubeflow trainer 3537).
            address = f"{self.name}-workers-0-0.{self.name}:{PORT}"
            command = commands.of_process(command, address, self.nodes, pods.INDEX)
            limits = {"nvidia.com/gpu": self.gpus_per_node}
            labels = {"cloud.google.com/gke-accelerator": self.gpu_type} if self.gpu_type else {}
        return pods.pod(self.image, command, limits, self.grace, labels, self.volume)

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
                f"--name {self.name}: expected {longest} lower-case letters, digits and dashes at "
                f"most, from a letter on."
            )
        if self.accelerator == "tpu" and _chips(self.tpu_topology) % self.tpus_per_node:
            raise Refused(
                f"--tpu-topology {self.tpu_topology}: its {_chips(self.tpu_topology)} chips are "
                f"not a multiple of --tpus-per-node {self.tpus_per_node}."
            )
        self._check_run(command)

    def _check_run(self, command):
        run = commands.option(command, "--run")
        mount = "" if self.volume is None else self.volume.partition(":")[2]
        if self.volume is not None and not mount.startswith("/"):
            raise Refused(f"--volume {self.volume}: expected CLAIM:/path.")
        if run is None or not mount or not run.startswith(mount.rstrip("/") + "/"):
            raise Refused(
                f"the run folder {run or '(no --run)'} is not on what pods share: say --volume "
                f"CLAIM:/runs and --run /runs/FOLDER."
            )


def _chips(topology):
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", topology):
        raise Refused(f"--tpu-topology {topology}: expected sizes such as 4x4 or 2x2x4.")
    return math.prod(map(int, topology.split("x")))
