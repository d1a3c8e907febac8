"""The command `shardwise doctor`: this machine's devices, tried before a run is trusted."""

import dataclasses
import json
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
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Try collectives, gradients, donation and random draws on the devices of a run.

    Args:
      system: the processes, as of `shardwise train`.
      axes: names and sizes of mesh axes, as data=2,fsdp=4; one size may be -1.
      devices: of all processes together, simulated where there are fewer real ones; by default all
        accelerators, or without any eight simulated devices.
      as_json: print JSON on stdout, and nothing else there.
    """
    sizes = dict(re.findall(r"([^\W\d]\w*)=(-?\d+)", axes))
    if ",".join(f"{name}={size}" for name, size in sizes.items()) != axes or not axes:
        raise ValueError(f"doctor: --mesh {axes}: expected names and sizes, such as data=2,fsdp=4.")
    told = system.address, system.count, system.index
    processes.join(*told, devices=devices, heartbeat=system.heartbeat)
    tried = mesh.make(**{name: int(size) for name, size in sizes.items()})
    found = doctor.examine(tried)
    if jax.process_index() == 0:
        print(_examined(tried, found, as_json), flush=True)
    processes.leave()
    return int(not all(each.ok for each in found))


def _examined(tried, found, as_json):
    """What the doctor found, in lines or as JSON."""
    kind, count = tried.devices.flat[0].device_kind, jax.process_count()
    wrong = sum(not each.ok for each in found)
    if as_json:
        facts = dict(mesh=dict(tried.shape), device_kind=kind, processes=count, ok=not wrong)
        return json.dumps(facts | {"findings": [*map(dataclasses.asdict, found)]}, indent=1)
    axes = " × ".join(f"{name} {size}" for name, size in tried.shape.items())
    first = f"On {tried.size} devices, {kind}, of {count} process{'es' * (count > 1)}: {axes}."
    last = f"{wrong} check{' is' if wrong == 1 else 's are'} wrong." if wrong else "All is right."
    return "\n".join([first, *map(str, found), last])
