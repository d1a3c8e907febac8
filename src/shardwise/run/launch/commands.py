"""The command that is launched: what stands after `--`, and what the launchers must know of it."""

import sys
from collections.abc import Sequence
from pathlib import Path

from shardwise.run.folder import on_disk
from shardwise.run.settings import option

PROGRAM = (sys.executable, "-m", "shardwise")


class Refused(ValueError):
    """The error of a command that cannot be launched, found before anything ran."""


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """A launcher's arguments, and the command after the first `--`, empty where there is none."""
    argv = list(argv)
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def check(command: Sequence[str]) -> None:
    """Check that there is a command, and that it leaves the processes to the launcher.

    Raises:
      Refused: it is empty, starts with a flag, or sets a flag that the launcher sets; its run
        folder is an address.
    """
    if not command or command[0].startswith("-"):
        found = f"{command[0]!r}" if command else "nothing"
        raise Refused(
            f"after -- stands {found}; write a command of shardwise there, such as -- train "
            f"--run runs/first, or a file of your own, -- mine.py."
        )
    for word in command:
        if word.startswith("--processes."):
            raise Refused(f"{word} is what the launcher gives each process; leave it out.")
    try:
        on_disk(option(command, "--run") or ".")
    except ValueError as error:
        raise Refused(str(error)) from None


def run_folder(command: Sequence[str], launcher: str) -> Path:
    """The run folder on this machine, for launchers that write to it.

    Raises:
      Refused: no --run.
    """
    run = option(command, "--run")
    if run is None:
        raise Refused(f"{launcher} keeps its files in the run folder; say --run FOLDER after --.")
    return Path(run).expanduser().absolute()


def of_process(command: Sequence[str], address: str, count: int, index: int | str) -> list[str]:
    """The command of one of several processes that meet at an address.

    A single one gets them too: only who has joined a coordinator hears of preemption.
    """
    flags = {"address": address, "count": count, "index": index}
    return [*command, *(x for k, v in flags.items() for x in (f"--processes.{k}", str(v)))]


def resuming(command: Sequence[str]) -> list[str]:
    """The command that goes on where an earlier one stopped."""
    return [*command] if "--resume" in command else [*command, "--resume"]


def at_least(least: int, **values: float) -> None:
    """Raise Refused where a flag's value is smaller."""
    for name, value in values.items():
        if value < least:
            raise Refused(f"--{name.replace('_', '-')} {value}: expected {least} or more.")
