"""Launchers: a command of shardwise as several processes, on one machine or on many."""

import sys
from collections.abc import Sequence

import tyro

from shardwise.run.launch.local import Local, Refused, of_process
from shardwise.run.launch.ray_train import Ray
from shardwise.run.launch.slurm import Slurm
from shardwise.run.settings import option


def main(argv: Sequence[str], program: Sequence[str] = (sys.executable, "-m", "shardwise")) -> int:
    """Launch the command after `--` as the arguments before it say; return the exit status.

    `argv` is what follows `shardwise launch`; `program` is what runs a command of shardwise, and
    Python runs a file of the user's own. The status is 2 where nothing could be launched, else as
    `supervising.overall` has it; of a task of SLURM's or a worker of Ray's that failed, 1.
    """
    argv = list(argv)
    at = argv.index("--") if "--" in argv else len(argv)
    launcher = tyro.extras.subcommand_cli_from_dict(
        {"local": Local, "slurm": Slurm, "ray": Ray},
        prog="shardwise launch",
        description="Launch a command of shardwise, or a Python file that takes its flags, written "
        "after --, as several processes.",
        args=argv[:at],
    )
    words = argv[at + 1 :]
    try:
        _check(words)
        program = [sys.executable] if words[0].endswith(".py") else program
        return launcher.launch([*program, *words])
    except ImportError as missing:
        if isinstance(launcher, Local):
            raise
        told = f'{missing}; pip install "{launcher.needs}"'
    except Refused as refused:
        told = refused
    print(f"shardwise launch: {told}", file=sys.stderr)
    return 2


def _check(words):
    """Refuse what is no command, or sets a flag that the launcher sets."""
    if not words or words[0].startswith("-"):
        raise Refused(
            f"after -- stands {repr(words[0]) if words else 'nothing'}; write a command of "
            f"shardwise there, as -- train --run runs/first, or a file of yours, -- mine.py."
        )
    for name in of_process((), "", 1, 0)[::2]:
        if option(words, name):
            raise Refused(f"{name} is what the launcher gives each process; leave it out.")
