"""Joining the processes of one system, as a run's settings say it."""

from shardwise import processes as system
from shardwise.run.settings import Processes


def join(processes: Processes, devices: int) -> None:
    """`shardwise.processes.join`, by the settings of a run."""
    given = processes.address, processes.count, processes.index
    system.join(*given, devices=devices, heartbeat=processes.heartbeat)


leave = system.leave
