"""Joining the processes of one system, as a run's settings say it, and leaving it."""

from shardwise import processes as system
from shardwise.run.loop import Result
from shardwise.run.settings import Processes
from shardwise.run.signals import STOPPED


def join(processes: Processes | None = None, devices: int = 8) -> None:
    """`shardwise.processes.join`, by the settings of a run."""
    told = processes or Processes()
    given = told.address, told.count, told.index
    system.join(*given, devices=devices, heartbeat=told.heartbeat)


def leave(result: Result | None = None) -> int:
    """`shardwise.processes.leave`; the exit status that says how a run ended.

    0 when it is done, 75 when a signal stopped it.
    """
    system.leave()
    return STOPPED if result is not None and result.stopped else 0
