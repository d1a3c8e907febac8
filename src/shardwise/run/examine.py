"""The command `shardwise doctor`: this machine's devices, tried before a run is trusted."""

import re
from typing import Annotated

import jax
import tyro

from shardwise import doctor, mesh, processes
from shardwise.run.settings import Processes


def examine(
    system: Annotated[Processes, tyro.conf.arg(name="processes")],
    axes: Annotated[str, tyro.conf.arg(name="mesh")] = "fsdp=-1",
    devices: int | None = None,
) -> int:
    """Try collectives, gradients, donation and random draws on the devices of a run.

    Args:
      system: the processes, as of `shardwise train`.
      axes: names and sizes of mesh axes, as data=2,fsdp=4; one size may be -1.
      devices: of all processes together, simulated where there are fewer real ones; by default all
        accelerators, or without any eight simulated devices.
    """
    parts = [part.partition("=") for part in axes.split(",")]
    sizes = {name: size for name, _, size in parts}
    well = all(re.fullmatch(r"[^\W\d]\w*=-?\d+", "".join(part)) for part in parts)
    if not well or len(sizes) < len(parts):
        raise ValueError(f"doctor: --mesh {axes}: expected names and sizes, such as data=2,fsdp=4.")
    told = system.address, system.count, system.index
    processes.join(*told, devices=devices, heartbeat=system.heartbeat)
    tried = mesh.make(**{name: int(size) for name, size in sizes.items()})
    found = doctor.examine(tried)
    wrong = sum(not each.ok for each in found)
    if jax.process_index() == 0:
        kind, count = tried.devices.flat[0].device_kind, jax.process_count()
        told = " × ".join(f"{name} {size}" for name, size in tried.shape.items())
        print(f"On {tried.size} devices, {kind}, of {count} process{'es' * (count > 1)}: {told}.")
        print(*found, sep="\n")
        last = f"{wrong} check{' is' if wrong == 1 else 's are'} wrong."
        print(last if wrong else "All is right.", flush=True)
    processes.leave()
    return int(wrong > 0)
