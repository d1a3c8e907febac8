"""Joining the processes of one system, as a run's settings say it, and leaving it."""

from shardwise import processes as system
from shardwise.run import signals
from shardwise.run.loop import Result
from shardwise.run.settings import Processes


def join(processes: Processes | None = None, devices: int = 8) -> None:
    """Call `shardwise.processes.join` with the settings of a run.

    From here to `leave` a signal that asks for a stop is remembered: one that comes before the
    first step, while data are read or programs compiled, is heard when that is done.
    """
    told = processes or Processes()
    given = told.address, told.count, told.index
    stop = None if signals.standing() else signals.Stop().begin()
    try:
        system.join(*given, devices=devices, heartbeat=told.heartbeat)
    except BaseException:
        if stop is not None:
            stop.end()
        raise


def leave(result: Result | None = None) -> int:
    """Call `shardwise.processes.leave`; return the exit status that says how a run ended.

    It is 0 when the run is done, 75 when a signal stopped it.
    """
    system.leave()
    if stop := signals.standing():
        stop.end()
    return signals.STOPPED if result is not None and result.stopped else 0
