"""The work of one task of a SLURM job."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.run.launch import commands, statuses
from shardwise.run.launch.local import report
from shardwise.run.launch.supervising import Limits, supervise


@dataclass(frozen=True)
class Task:
    """The work of each task: the command in a process of its own, and the queue afterwards.

    With an address, tasks meet there, by submitit's numbers; without, by SLURM's.
    """

    program: tuple[str, ...]
    command: tuple[str, ...]
    address: str | None
    requeue: bool
    gpus: int

    def __call__(self) -> int:
        """Run the command; return its exit status, 0 or 75.

        Raises:
          RuntimeError: the process failed; the message says how.
          SystemExit: it was stopped, and the job is queued again.
        """
        import submitit

        here = submitit.JobEnvironment()
        again = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0
        command = commands.resuming(self.command) if again else list(self.command)
        if self.address is not None:
            command = commands.of_process(command, self.address, here.num_tasks, here.global_rank)
        limits = Limits(hang_after=0, patient=True)  # SLURM sends several signals, and kills
        folder = commands.run_folder(command, "slurm")
        gpus, rank = own_gpus(self.gpus, os.environ), here.global_rank
        end = supervise([[*self.program, *command]], folder, limits, gpus, rank)
        if report(end) not in statuses.WELL:
            raise RuntimeError(f"task {rank}: {end.report[-1]}")
        if end.status == statuses.STOPPED and self.requeue and self.address is None:
            if rank == 0:  # whose process is the last to leave
                subprocess.run(["scontrol", "requeue", here.job_id], check=True)
            raise SystemExit(0)  # no result: the job is not over; and no failure, which ends others
        return end.status


def own_gpus(count: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that tells JAX which of a node's GPUs are the task's own, as {name: value}.

    Without it JAX takes one for each task of SLURM's, however many there are.
    """
    if not count:
        return {}
    first = count * int(environment["SLURM_LOCALID"])
    return {"JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(first, first + count)))}
