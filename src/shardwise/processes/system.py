"""The processes of one system: joining it, agreement among them, and leaving it."""

import contextlib
import json
import os
import signal
import sys
import threading
import zlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardwise import mesh

_TEXT = 2048  # bytes of what each process tells of itself when they differ
_SLURM = ("SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


def join(
    address: str | None = None,
    count: int | None = None,
    index: int | None = None,
    *,
    devices: int = 8,
    heartbeat: int = 20,
) -> None:
    """Make this process one of `count`, with its share of so many devices, simulated or real.

    Without the first three they are what SLURM, Kubernetes or a TPU VM says, and where none of them
    says anything, this is one process. Call it before anything touches a device. `heartbeat` is
    after how many seconds a process that is silent is taken for dead. SIGTERM stays with Python and
    its handlers; JAX's preemption service, which would take it, is off.

    Raises:
      ValueError: some of address, count and index without the others; devices that the processes
        cannot share evenly.
    """
    given = {"address": address, "count": count, "index": index}
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < 3:
        raise ValueError(
            f"processes.join: processes.{missing[0]} is missing; give address, count and index "
            f"together, or none of them where SLURM, Kubernetes or a TPU VM says them."
        )
    mesh.look_for_no_tpu()  # before jax.process_count() looks for devices
    count = count if not missing else _found()
    if count is not None:
        _share(devices, count)  # an error before any process waits for the others
    if count != 1:
        if count is not None:
            jax.config.update("jax_num_cpu_devices", devices // count)
        options = dict(heartbeat_timeout_seconds=heartbeat)
        if not missing:
            options |= dict(coordinator_address=address, num_processes=count, process_id=index)
        if index == 0:  # by default it listens on all of the machine's addresses
            options["coordinator_bind_address"] = address
        _initialize(options)
    # Not jax.process_count() where we know: it would start the backend.
    mesh.simulate(_share(devices, jax.process_count() if count is None else count))


def _initialize(options):
    """Call `jax.distributed.initialize`, without its preemption service.

    The service handles SIGTERM in C++, where a Python handler never hears of it, and once it caught
    one, `jax.distributed.shutdown`, which also runs at exit, may wait for ever.
    """
    if hasattr(jax.config, "jax_enable_preemption_service"):
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(**options)
        return
    before = signal.getsignal(signal.SIGTERM)
    jax.distributed.initialize(**options)
    # Older ones have no such option, and have taken the signal by now: take it back.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def together(who: str) -> Iterator[dict[str, str]]:
    """Raise at the end of the block, in every process, if one raised in it or they differ.

    The block fills the dict that it is given with what must be equal, {name: text}. Every process
    has to come here. With one process nothing is compared.

    Raises:
      RuntimeError: another process raised in the block.
      ValueError: processes differ, with what each of them has.
    """
    facts, error = {}, None
    try:
        yield facts
    except Exception as raised:
        error = raised
    if jax.process_count() > 1:
        _compare(who, facts, error)
    if error is not None:
        raise error


def of_all(values: np.ndarray) -> np.ndarray:
    """The arrays of all processes, of one shape and of 32 bits at most, stacked."""
    if jax.process_count() == 1:
        return values[None]
    return np.asarray(multihost_utils.process_allgather(values))


def leave() -> None:
    """Wait for the others, then leave, process 0 last: if it left first, they would be aborted."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("leaving")
        jax.distributed.shutdown()


def _share(devices, count):
    if devices % count:
        raise ValueError(
            f"processes.join: {devices} devices do not divide among {count} processes; take "
            f"devices={-(-devices // count) * count}, say."
        )
    return devices // count


def _found():
    """The number of processes the environment tells of: 1 for none, None where JAX has to ask."""
    env = os.environ
    if "SLURM_JOB_ID" in env:
        lacks = [name for name in _SLURM if name not in env]
        if lacks:
            # JAX fails here, and older ones take the job for their own.
            print(
                f"processes.join: SLURM_JOB_ID is set and {lacks[0]} is not, as in a shell inside "
                f"a job: this is one process. Start several with srun.",
                file=sys.stderr,
            )
            return 1
        return int(env["SLURM_NTASKS"])
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= env.keys():
        return None
    hosts = len(env.get("TPU_WORKER_HOSTNAMES", "").split(","))
    slices = int(env.get("MEGASCALE_NUM_SLICES", 1))
    return 1 if hosts * slices == 1 else None


def _compare(who, facts, error):
    mine = zlib.crc32(json.dumps(facts, sort_keys=True).encode())
    all_of = of_all(np.array([error is not None, mine], np.uint32))
    failed = all_of[:, 0].astype(bool)
    if not failed.any() and len(set(all_of[:, 1])) == 1:
        return
    told = _exchange(repr(error) if error is not None else _told(facts))
    if error is not None:
        return
    if failed.any():
        process = int(failed.argmax())
        raise RuntimeError(f"{who}: process {process} cannot, so none does: {told[process]}")
    raise ValueError(
        f"{who}: the processes differ. "
        + "; ".join(f"Process {p} has {text}" for p, text in enumerate(told))
    )


def _told(facts):
    """The facts in a few words: a long one as a checksum, which tells that it differs."""
    short = (
        (name, text if len(text) < 100 else f"{zlib.crc32(text.encode()):08x}")
        for name, text in facts.items()
    )
    return ", ".join(f"{name} {text}" for name, text in short)


def _exchange(text):
    mine = np.zeros(_TEXT, np.uint8)
    encoded = np.frombuffer(text.encode()[:_TEXT], np.uint8)
    mine[: encoded.size] = encoded
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in of_all(mine)]
