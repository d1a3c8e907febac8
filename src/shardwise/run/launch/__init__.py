"""Launchers: a command of shardwise as several processes, on one machine or on many."""

import sys
from collections.abc import Sequence

import tyro

from shardwise.run.launch import commands
from shardwise.run.launch.local import Local
from shardwise.run.launch.ray_train import Ray
from shardwise.run.launch.slurm import Slurm

LAUNCHERS = {"local": Local, "slurm": Slurm, "ray": Ray}

__all__ = ["LAUNCHERS", "main"]


def main(argv: Sequence[str], program: Sequence[str] = commands.PROGRAM) -> int:
    """Launch the command after `--` as the arguments before it say; return the exit status.

    `argv` is what follows `shardwise launch`; `program` is what runs a command of shardwise, and
    Python runs a file of the user's own. 0: all processes are done, or nothing was to be run; 75:
    they were stopped by a signal, after saving; 2: refused before anything ran; else the first
    failure's, 128 + signal where a signal killed it. Of a task of SLURM's or a worker of Ray's that
    failed, only 1 is known here.
    """
    given, command = commands.split(argv)
    launcher = tyro.extras.subcommand_cli_from_dict(
        LAUNCHERS,
        prog="shardwise launch",
        description="Launch a command of shardwise, or a Python file that takes its flags, written "
        "after --, as several processes.",
        args=given,
    )
    try:
        commands.check(command)
        file = command[0].endswith(".py")
        return launcher.launch(command, [sys.executable] if file else list(program))
    except commands.Refused as refused:
        print(f"shardwise launch: {refused}", file=sys.stderr)
        return 2
