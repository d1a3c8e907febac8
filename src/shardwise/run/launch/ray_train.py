"""Workers of Ray Train."""

import os
import socket
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.run.launch import commands, statuses
from shardwise.run.launch.commands import Refused
from shardwise.run.launch.local import report
from shardwise.run.launch.supervising import Limits, supervise


@dataclass(frozen=True)
class Ray:
    """Workers of Ray Train's JaxTrainer (`pip install "ray[train]"`).

    Ray places them and starts them again; each runs the command in a process of its own, and they
    meet at the first one's address. Tried on CPU with a Ray of one machine, on no cluster and no
    accelerator. The run folder lies where all workers see it; Ray's own session files lie where Ray
    puts them (/tmp/ray).
    """

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

    def launch(self, command: Sequence[str], program: Sequence[str]) -> int:
        """Run the command; return the exit status for all workers."""
        self._check()
        folder = commands.run_folder(command, "ray")
        if self.dry_run:
            print(f"# JaxTrainer with {self._scaling()}, restarts: {self.restarts}")
            for index in range(self.workers):
                one = commands.of_process(command, "RANK-0:PORT", self.workers, index)
                print(commands.shown([*program, *one]))
            return 0
        return self._fit(_ray(), folder / "ray", [*program], [*command])

    def _check(self):
        if self.workers < 1:
            raise Refused(f"--workers {self.workers}: expected 1 or more.")
        if (self.tpu_topology is None) != (self.tpu_type is None):
            raise Refused("--tpu-topology and --tpu-type go together.")
        if self.tpu_type is not None and self.gpus_per_worker:
            raise Refused("--gpus-per-worker and --tpu-type exclude each other.")

    def _scaling(self) -> dict[str, Any]:
        told = {"num_workers": self.workers}
        resources = {"CPU": self.cpus_per_worker}
        if self.tpu_type is not None:
            resources["TPU"] = self.tpus_per_worker
            told |= {"use_tpu": True, "topology": self.tpu_topology}
            told |= {"accelerator_type": self.tpu_type}
        if self.gpus_per_worker:
            resources["GPU"] = self.gpus_per_worker
            told["use_gpu"] = True
        return told | {"resources_per_worker": resources}

    def _fit(self, ray, folder, program, command):
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.v2.api.exceptions import TrainingFailedError
        from ray.train.v2.jax import JaxConfig, JaxTrainer

        started = not ray.is_initialized()
        if started:
            ray.init(address=self.address, include_dashboard=False)
        token = uuid.uuid4().hex
        given = {"program": program, "command": command, "token": token}
        trainer = JaxTrainer(
            work,
            train_loop_config=given,
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
            if started:
                ray.shutdown()


def _ray():
    # Ray Train's JaxTrainer is of its second version, which is asked for before the import.
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    try:
        import ray
        import ray.train
    except ImportError:
        raise Refused(
            'ray goes by Ray Train, which is not here: pip install "ray[train]"'
        ) from None
    return ray


def work(given: dict[str, Any]) -> int:
    """Run the command as one worker, at the address of worker 0.

    Raises:
      RuntimeError: the process failed; the message says how.
    """
    import ray.train
    from ray.train.collective import broadcast_from_rank_zero

    here = ray.train.get_context()
    rank, count = here.get_world_rank(), here.get_world_size()
    folder = commands.run_folder(given["command"], "ray")
    told = (_reachable_address(), _is_again(folder, given["token"])) if rank == 0 else None
    address, again = broadcast_from_rank_zero(told)
    command = commands.resuming(given["command"]) if again else given["command"]
    command = commands.of_process(command, address, count, rank)
    end = supervise([[*given["program"], *command]], folder, Limits(hang_after=0), first=rank)
    if report(end) not in statuses.WELL:
        raise RuntimeError(f"worker {rank}: {end.report[-1]}")
    return end.status


def _is_again(folder, token):
    """Whether workers of this launch have run before; a file in the run folder remembers."""
    file = folder / "ray" / "launch"
    if file.exists() and file.read_text() == token:
        return True
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(token)
    return False


def _reachable_address():
    import ray.util

    with socket.socket() as free:
        free.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"
