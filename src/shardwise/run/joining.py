"""Joining the processes of one system, as flags or a cluster's environment say it."""

import os
import sys

import jax
from jax.experimental import multihost_utils

from shardwise import mesh
from shardwise.run.loop import Result
from shardwise.run.settings import Processes
from shardwise.run.signals import STOPPED

_SLURM = ("SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


def join(processes: Processes | None = None, devices: int = 8) -> None:
    """Make this process one of several, if it is one, with its share of so many devices.

    To be called before anything touches a device; of one process it is `mesh.simulate`.

    Raises:
      ValueError: some of address, count and index without the others; devices that the processes
        cannot share evenly.
    """
    processes = processes or Processes()
    given = {n: getattr(processes, n) for n in ("address", "count", "index")}
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < 3:
        raise ValueError(
            f"run: processes.{missing[0]} is missing; give address, count and index together, or "
            f"none of them where SLURM, Kubernetes or a TPU VM says them."
        )
    count = processes.count if not missing else _found()
    if count is not None:
        _share(devices, count)  # an error before any process waits for the others
    if count != 1:
        if count is not None:
            jax.config.update("jax_num_cpu_devices", devices // count)
        options = dict(heartbeat_timeout_seconds=processes.heartbeat)
        if not missing:
            options |= dict(
                coordinator_address=processes.address,
                num_processes=count,
                process_id=processes.index,
            )
        if processes.index == 0:  # by default it listens on all of the machine's addresses
            options["coordinator_bind_address"] = processes.address
        jax.distributed.initialize(**options)
    # Not jax.process_count() where we know: it would start the backend.
    mesh.simulate(_share(devices, jax.process_count() if count is None else count))


def _share(devices, count):
    if devices % count:
        raise ValueError(
            f"run: {devices} devices do not divide among {count} processes; take "
            f"--devices {-(-devices // count) * count}."
        )
    return devices // count


def leave(result: Result | None = None) -> int:
    """Wait for the others, then leave, process 0 last: if it left first, they would be aborted.

    The exit status that says how a run ended: 0 when done, 75 when a signal stopped it.
    """
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("run: leaving")
        jax.distributed.shutdown()
    return STOPPED if result is not None and result.stopped else 0


def _found():
    """How many processes the environment tells of: 1 for none, None where JAX has to ask."""
    env = os.environ
    if "SLURM_JOB_ID" in env:
        lacks = [name for name in _SLURM if name not in env]
        if lacks:
            # JAX would take the job for its own, and wait for others that nobody started.
            print(
                f"run: SLURM_JOB_ID is set and {lacks[0]} is not, as in a shell inside a job: this "
                f"is one process. Start several with srun.",
                file=sys.stderr,
            )
            return 1
        return int(env["SLURM_NTASKS"])
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= env.keys():
        return None
    hosts = len(env.get("TPU_WORKER_HOSTNAMES", "").split(","))
    slices = int(env.get("MEGASCALE_NUM_SLICES", 1))
    return 1 if hosts * slices == 1 else None
