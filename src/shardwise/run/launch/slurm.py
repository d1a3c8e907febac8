"""A job of SLURM, by submitit: how it is submitted, and the work of each of its tasks."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from shardwise.run.launch import local
from shardwise.run.launch.local import Refused
from shardwise.run.launch.supervising import overall
from shardwise.run.signals import STOPPED


@dataclass(frozen=True)
class Slurm:
    """A job of SLURM, submitted by submitit (`pip install submitit`).

    Every task runs the command with SLURM's variables, by which JAX finds the others. SIGUSR2 comes
    before the end of the job's time: the run saves, and is queued again. Tried with two nodes on
    one machine (`make engines`), on no cluster. The run folder lies where all nodes see it.
    """

    needs: ClassVar[str] = "submitit"  # to be installed

    nodes: int = 1
    tasks_per_node: int = 1
    """Processes on each node."""
    gpus_per_task: int = 0
    cpus_per_task: int | None = None
    time: int = 60
    """Minutes."""
    partition: str | None = None
    account: str | None = None
    name: str = "shardwise"
    signal_before: int = 120
    """Seconds before the end of its time at which the job is told to save and leave."""
    requeue: bool = True
    """Queue a job again that has saved and left; it then goes on with --resume."""
    wait: bool = False
    """Wait for the end of the job, and exit with its status."""
    dry_run: bool = False
    """Print what would be submitted, and submit nothing."""

    def launch(self, command: Sequence[str]) -> int:
        """Submit the job; return 0, or with `wait` the exit status for all tasks."""
        local.at_least(1, nodes=self.nodes, tasks_per_node=self.tasks_per_node, time=self.time)
        if not 0 < self.signal_before < 60 * self.time:
            raise Refused(
                f"--signal-before {self.signal_before}: expected 1 to {60 * self.time - 1} "
                f"seconds, of the {self.time} minutes that the job has."
            )
        folder = local.run_folder(command, "slurm") / "submitit"
        import submitit

        tasks, submitter = self.nodes * self.tasks_per_node, executor(submitit, folder)
        submitter.update_parameters(**self._parameters())
        if self.dry_run:
            print(f"# sbatch, with this file in {folder}:")
            print(submitter._make_submission_file_text(submitter._submitit_command_str, ""))
            print(f"# in each of {tasks} tasks:", shlex.join(command), sep="\n")
            return 0
        if missing := [name for name in ("sbatch", "srun") if shutil.which(name) is None]:
            raise Refused(
                f"{' and '.join(missing)} cannot be found: submit from a machine of the cluster, "
                f"or see by --dry-run what would be."
            )
        job = submitter.submit(work, [*command], self.requeue, self.gpus_per_task)
        print(f"job {job.job_id}; what it prints is in {folder}", flush=True)
        return finish(job, tasks) if self.wait else 0

    def _parameters(self) -> dict[str, Any]:
        told = dict(job_name=self.name, time=self.time, signal_delay_s=self.signal_before)
        # One task that fails ends the others, which would wait for it.
        told |= dict(nodes=self.nodes, ntasks_per_node=self.tasks_per_node)
        told |= dict(srun_args=["--kill-on-bad-exit=1"])
        if self.gpus_per_task:
            # Every task sees all of its node's; JAX is told which of them are its own.
            told["gpus_per_node"] = self.gpus_per_task * self.tasks_per_node
        asked = {name: getattr(self, name) for name in ("cpus_per_task", "partition", "account")}
        told |= {name: value for name, value in asked.items() if value is not None}
        return told | {"additional_parameters": {"requeue" if self.requeue else "no-requeue": True}}


def executor(submitit: Any, folder: Path) -> Any:
    """An executor of submitit's that asks the queue about jobs, not the accounting: not every
    cluster keeps accounts, and without them submitit warns each time that it looks.
    """

    class Watcher(type(submitit.SlurmJob.watcher)):
        def _make_command(self):
            return ["squeue", "--me", "--noheader", "--format=%A|%T"]

        def read_info(self, string):
            states = dict(line.split("|") for line in string.decode().split())
            return {job: {"State": states.get(job, "COMPLETED")} for job in self._registered}

    class Job(submitit.SlurmJob):
        watcher = Watcher(delay_s=30)

    class Executor(submitit.SlurmExecutor):
        job_class = Job

        @classmethod
        def affinity(cls):
            return 1  # who submits has looked for srun; a dry run goes without

    return Executor(folder)


def finish(job: Any, tasks: int) -> int:
    """Wait for a job of submitit's; return the status for all its tasks."""
    codes = []
    for index in range(tasks):
        error = job.task(index).exception()  # it waits
        codes.append(job.task(index).result() if error is None else 1)
        if error is not None:
            print(f"[{index}] {error}", file=sys.stderr)
    return overall(codes)


def work(command: Sequence[str], requeue: bool, gpus: int) -> int:
    """Run the command as one task; return its status; SystemExit where the job is queued again."""
    import submitit

    here = submitit.JobEnvironment()
    rank, again = here.global_rank, int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0
    command = [*command, "--resume"] if again else command
    # SLURM sends several signals, and kills by itself.
    own = own_gpus(gpus, os.environ)
    status = local.one_of_many("task", command, rank, patient=True, **own)
    if status == STOPPED and requeue:
        if rank == 0:  # whose process is the last to leave
            subprocess.run(["scontrol", "requeue", here.job_id], check=True)
        raise SystemExit(0)  # no result: the job is not over; and no failure, which ends others
    return status


def own_gpus(count: int, environment: Mapping[str, str]) -> dict[str, str]:
    """{name: value} that tells JAX which GPUs are the task's own; by itself, it takes one."""
    if not count:
        return {}
    first = count * int(environment["SLURM_LOCALID"])
    return {"JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(first, first + count)))}
