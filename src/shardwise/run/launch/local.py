"""Processes on this machine."""

import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.run.launch import commands
from shardwise.run.launch.commands import Refused
from shardwise.run.launch.supervising import End, Limits, supervise

FIRST = "runs/first"  # where `train` writes without --run


@dataclass(frozen=True)
class Local:
    """Processes on this machine, with their output line by line; the first failure ends all.

    A signal that asks for a stop (SIGTERM, SIGINT, SIGQUIT, SIGHUP, SIGUSR1, SIGUSR2) is passed on
    once, and a second one kills all processes. None of them outlives this one, however it ends (on
    Linux).
    """

    processes: int = 2
    """How many; devices that are simulated are shared out between them."""
    hang_after: float = 20.0
    """Seconds after which processes that step are ended when no note in the run folder moves (or
    five steps, where these take longer); 0: never."""
    hang_after_long: float = 600.0
    """The same, while one of them starts, compiles, evaluates or saves."""
    grace: float = 5.0
    """Seconds that the others have after a failure, before they are killed."""
    dry_run: bool = False
    """Print what would run, and run nothing."""

    def launch(self, command: Sequence[str], program: Sequence[str]) -> int:
        """Run the command; return the exit status for all processes."""
        if self.processes < 1:
            raise Refused(f"--processes {self.processes}: expected 1 or more.")
        if self.grace < 0:
            raise Refused(f"--grace {self.grace}: expected 0 seconds or more.")
        address, count = free_address(), self.processes
        each = [
            [*program, *commands.of_process(command, address, count, index)]
            for index in range(count)
        ]
        if self.dry_run:
            print(*map(commands.shown, each), sep="\n")
            return 0
        limits = Limits(self.hang_after, self.hang_after_long, self.grace)
        return report(supervise(each, self._folder(command), limits))

    def _folder(self, command):
        run = commands.option(command, "--run") or FIRST
        return commands.run_folder(["--run", run], "local")


def free_address() -> str:
    """An address of this machine alone, at a port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def report(end: End) -> int:
    """Say how processes failed, if they did; return their status."""
    sys.stdout.flush()
    print(
        *(f"[launch] {line}" for line in end.report),
        sep="\n",
        end="\n" * bool(end.report),
        file=sys.stderr,
        flush=True,
    )
    return end.status
