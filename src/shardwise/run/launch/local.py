"""Processes on this machine; and what every launcher makes of the command that it is given."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.processes.fresh import free_address
from shardwise.run.folder import Folder
from shardwise.run.launch.supervising import WELL, Limits, supervise
from shardwise.run.settings import Settings, option


class Refused(ValueError):
    """The error of a command that cannot be launched, found before anything ran."""


@dataclass(frozen=True)
class Local(Limits):
    """Processes on this machine, with their output line by line; the first failure ends all.

    A signal that asks for a stop (SIGTERM, SIGINT, SIGQUIT, SIGHUP, SIGUSR1, SIGUSR2) is passed on
    once; a second one kills all. None outlives this one, however it ends (on Linux).
    """

    processes: int = 2
    """How many; by default they share out eight simulated devices. For a GPU each, say --devices,
    and let each see its own (CUDA_VISIBLE_DEVICES).
    """
    dry_run: bool = False
    """Print what would run, and run nothing."""

    def launch(self, command: Sequence[str]) -> int:
        """Run the command; return the exit status for all processes."""
        at_least(1, processes=self.processes)
        at_least(0, grace=self.grace)
        folder, place = run_folder(command), (command, free_address(), self.processes)
        each = [of_process(*place, index) for index in range(self.processes)]
        if self.dry_run:
            print(*map(shlex.join, each), sep="\n")
            return 0
        return supervise(each, folder, self).status


def one_of_many(
    who: str, command: Sequence[str], rank: int, patient: bool = False, **environment: str
) -> int:
    """Run one of a cluster's processes; return its status, 0 or 75, or raise that it failed."""
    never = Limits(hang_after=0)  # its own watchdog tells, and the others'
    end = supervise([command], run_folder(command), never, environment, rank, patient)
    if end.status not in WELL:
        raise RuntimeError(f"{who} {rank}: {end.report[-1]}")
    return end.status


def run_folder(command: Sequence[str], launcher: str | None = None) -> Path:
    """The run folder here, which a `launcher` that writes to it is told; Refused where none is."""
    run = option(command, "--run")
    if run is None and launcher:
        raise Refused(f"{launcher} keeps its files in the run folder; say --run FOLDER after --.")
    try:
        return Folder(run or Settings().run).path
    except ValueError as error:
        raise Refused(str(error)) from None


def of_process(command: Sequence[str], address: str, count: int, index: int) -> list[str]:
    """The command of one of several processes that meet at an address."""
    flags = {"address": address, "count": count, "index": index}
    return [*command, *(x for k, v in flags.items() for x in (f"--processes.{k}", str(v)))]


def at_least(least: int, **values: float) -> None:
    """Raise Refused where a flag's value is smaller."""
    for name, value in values.items():
        if value < least:
            raise Refused(f"--{name.replace('_', '-')} {value}: expected {least} or more.")
