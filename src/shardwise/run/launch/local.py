"""Processes on this machine."""

import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.run.launch import commands
from shardwise.run.launch.supervising import Limits, report, supervise
from shardwise.run.settings import Settings, option


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
        commands.at_least(1, processes=self.processes)
        commands.at_least(0, grace=self.grace)
        address, count = free_address(), self.processes
        each = [
            [*program, *commands.of_process(command, address, count, index)]
            for index in range(count)
        ]
        if self.dry_run:
            print(*map(shlex.join, each), sep="\n")
            return 0
        run = option(command, "--run") or str(Settings().run)
        folder = commands.run_folder(["--run", run], "local")
        limits = Limits(self.hang_after, self.hang_after_long, self.grace)
        return report(supervise(each, folder, limits))


def free_address(host: str = "127.0.0.1", bind: str = "127.0.0.1") -> str:
    """An address of this machine, by default for itself alone, at a port that is free now."""
    with socket.socket() as free:
        free.bind((bind, 0))
        return f"{host}:{free.getsockname()[1]}"
