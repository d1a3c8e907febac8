"""Workers of Ray Train."""

import os
import shlex
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from shardwise.run.launch import local
from shardwise.run.launch.local import Refused


@dataclass(frozen=True)
class Ray:
    """Workers of Ray Train's JaxTrainer (`pip install "ray[train]"`).

    Ray places them and starts them again; each runs the command in a process of its own, and they
    meet at the first one's address. The run folder lies where all workers see it. Tried on CPU with
    a Ray of one machine, on no cluster and no accelerator.
    """

    needs: ClassVar[str] = "ray[train]"  # to be installed

    workers: int = 2
    cpus_per_worker: float = 1.0
    gpus_per_worker: int = 0
    tpu_topology: str | None = None
    """Such as 4x4, with --tpu-type: one worker for each of its hosts."""
    tpu_type: str | None = None
    """Such as TPU-V6E, as Ray names it."""
    tpus_per_worker: int = 4
    address: str | None = None
    """Of a running cluster; without it, a Ray of this machine alone."""
    restarts: int = 0
    """How often workers are started again after a failure; they then go on with --resume."""
    dry_run: bool = False
    """Print what would run, and run nothing."""

    def launch(self, command: Sequence[str]) -> int:
        """Run the command; return the exit status for all workers."""
        local.at_least(1, workers=self.workers)
        if (self.tpu_topology is None) != (self.tpu_type is None):
            raise Refused("--tpu-topology and --tpu-type go together.")
        if self.tpu_type is not None and self.gpus_per_worker:
            raise Refused("--gpus-per-worker and --tpu-type exclude each other.")
        folder = local.run_folder(command, "ray")
        if not self.dry_run:
            return self._fit(folder / "ray", [*command])
        print(f"# JaxTrainer with {self._scaling()}, restarts: {self.restarts}")
        for index in range(self.workers):
            print(shlex.join(local.of_process(command, "RANK-0:PORT", self.workers, index)))
        return 0

    def _scaling(self) -> dict[str, Any]:
        told, resources = {"num_workers": self.workers}, {"CPU": self.cpus_per_worker}
        if self.tpu_type is not None:
            resources["TPU"] = self.tpus_per_worker
            told |= dict(use_tpu=True, topology=self.tpu_topology, accelerator_type=self.tpu_type)
        if self.gpus_per_worker:
            resources["GPU"], told["use_gpu"] = self.gpus_per_worker, True
        return told | {"resources_per_worker": resources}

    def _fit(self, folder, command):
        # Ray Train's JaxTrainer is of its second version, which is asked for before the import.
        os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.v2.api.exceptions import TrainingFailedError
        from ray.train.v2.jax import JaxConfig, JaxTrainer

        if begun_here := not ray.is_initialized():
            ray.init(address=self.address, include_dashboard=False)
        token = uuid.uuid4().hex
        trainer = JaxTrainer(
            work,
            train_loop_config={"command": command, "begun": str(folder / f"{token}.begun")},
            # Neither TPU nor GPU: the command joins the others by itself, as everywhere.
            jax_config=JaxConfig(use_tpu=False, use_gpu=False),
            scaling_config=ScalingConfig(**self._scaling()),
            run_config=RunConfig(
                name=token,  # of an old name, Ray would restore what it knew
                storage_path=str(folder),
                failure_config=FailureConfig(max_failures=self.restarts),
            ),
        )
        try:
            return trainer.fit().return_value
        except TrainingFailedError as failed:
            print(f"[launch] {failed}", file=sys.stderr)
            return 1
        finally:
            if begun_here:
                ray.shutdown()


def work(given: dict[str, Any]) -> int:
    """Run the command as one worker, at the address of worker 0."""
    import ray.train
    import ray.util
    from ray.train.collective import broadcast_from_rank_zero

    here, begun = ray.train.get_context(), Path(given["begun"])
    rank, told = here.get_world_rank(), None
    if rank == 0:
        again = begun.exists()  # workers of this launch have run before
        begun.parent.mkdir(parents=True, exist_ok=True)
        begun.touch()
        told = local.free_address(ray.util.get_node_ip_address(), bind=""), again
    address, again = broadcast_from_rank_zero(told)
    command = [*given["command"], "--resume"] if again else given["command"]
    command = local.of_process(command, address, here.get_world_size(), rank)
    return local.one_of_many("worker", command, rank)
