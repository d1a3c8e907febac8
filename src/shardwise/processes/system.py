"""The processes of one system: joining it, agreement among them, and leaving it."""

import contextlib
import json
import os
import signal
import sys
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardwise import mesh

_ROOM = 2048  # bytes; texts of all processes travel in a multiple, since each size is a program
_SLURM = ("SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


def join(
    address: str | None = None,
    count: int | None = None,
    index: int | None = None,
    *,
    devices: int | None = 8,
    heartbeat: int = 20,
) -> None:
    """Make this process number `index` of `count`, of which process 0 has `address`, "host:port".

    If these are None, SLURM, Kubernetes or a TPU VM says them, else this is one process. `devices`
    is the number in all processes together, shared evenly: a process with fewer accelerators than
    its share simulates it on CPU. Of more accelerators one process takes the first, several take
    all. `devices=None` means all accelerators, or eight simulated devices where there are none, and
    where several processes of one machine (a loopback address) would each take all of its
    accelerators. For one GPU in each process pass `devices=count`, and set CUDA_VISIBLE_DEVICES.

    Call it before anything touches a device. After `heartbeat` seconds a silent process is taken
    for dead. JAX's preemption service, which takes SIGTERM, is off.

    Raises:
      ValueError: some of address, count and index without the others; devices that do not divide.
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
    alone = count == 1 or not (address or "").startswith(("127.", "localhost", "[::1]"))
    real = devices is None and alone
    if devices is None and not alone:
        jax.config.update("jax_platforms", "cpu")
    # An error before any process waits for the others.
    share = None if count is None else _share(devices, count, real)
    if count != 1:
        options = dict(heartbeat_timeout_seconds=heartbeat)
        if not missing:
            options |= dict(coordinator_address=address, num_processes=count, process_id=index)
        if index == 0:  # by default it listens on all of the machine's addresses
            options["coordinator_bind_address"] = address
        _initialize(options)
    # Not jax.process_count() where we know: it would start the backend.
    mesh.simulate(share or _share(devices, jax.process_count(), real), real=real)


def _initialize(options):
    """Call `jax.distributed.initialize`, without its preemption service.

    The service handles SIGTERM in C++, where a Python handler never hears of it, and once it caught
    one, `jax.distributed.shutdown`, which also runs at exit, may wait for ever.
    """
    if hasattr(jax.config, "jax_enable_preemption_service"):
        jax.config.update("jax_enable_preemption_service", False)
        return jax.distributed.initialize(**options)
    before = signal.getsignal(signal.SIGTERM)
    jax.distributed.initialize(**options)
    # JAX 0.7 has no such option, and has taken the signal by now: take it back.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def together(who: str) -> Iterator[dict[str, Any]]:
    """Raise at the end of the block, in every process, if one raised in it or they differ.

    The block fills its dict, {name: value}, with what has to be equal as text. All processes enter.

    Raises:
      RuntimeError: another process raised in the block.
      ValueError: processes differ, with what each of them has.
    """
    facts, error = {}, None
    try:
        yield facts
    except Exception as raised:
        error = raised
    own = {name: _brief(value) for name, value in facts.items()}
    told = of_all([error and repr(error), own])
    if error is not None:
        raise error
    for process, (its, _) in enumerate(told):
        if its is not None:
            raise RuntimeError(f"{who}: process {process} cannot, so none does: {its}")
    names = dict.fromkeys(name for _, has in told for name in has)
    differ = [n for n in names if any(has.get(n) != told[0][1].get(n) for _, has in told)]
    if differ:
        each = (", ".join(f"{n} {has.get(n, 'missing')}" for n in differ[:3]) for _, has in told)
        every = "; ".join(f"Process {process} has {text}" for process, text in enumerate(each))
        more = f"; and they differ in {len(differ) - 3} more" if differ[3:] else ""
        raise ValueError(f"{who}: the processes differ. {every}{more}")


def of_all(value: Any) -> list[Any]:
    """The values of all processes, in their order; each is one that JSON can hold."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(text.size))
    room = -(-int(sizes.max()) // _ROOM) * _ROOM
    texts = multihost_utils.process_allgather(np.pad(text, (0, room - text.size)))
    return [json.loads(text[:size].tobytes()) for text, size in zip(texts, sizes, strict=True)]


def leave() -> None:
    """Wait for the other processes, then leave; process 0, whose end would abort them, is last."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("leaving")
        jax.distributed.shutdown()


def _share(devices, count, real):
    if real:  # of simulated ones, should there be no real ones
        return max(8 // count, 1)
    devices = 8 if devices is None else devices
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
        if lacks := [name for name in _SLURM if name not in env]:
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
    hosts, slices = env.get("TPU_WORKER_HOSTNAMES", ""), env.get("MEGASCALE_NUM_SLICES", "1")
    return 1 if "," not in hosts and int(slices) == 1 else None


def _brief(value):
    """The value's text, or of a long one a checksum, which tells that it differs."""
    text = str(value)
    return text if len(text) < 100 else f"{zlib.crc32(text.encode()):08x}"
