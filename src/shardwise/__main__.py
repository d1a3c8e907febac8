"""The command `shardwise`, and `python -m shardwise`, by which each of its commands is called."""

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence

import jax
import tyro

from shardwise import mesh

# Errors of what was given, and of the machine; others are ours, and show where they come from.
_EXPECTED = ValueError, OSError, ImportError, RuntimeError
_OURS = NotImplementedError, RecursionError, jax.errors.JaxRuntimeError

# Each is imported when it is asked for: a plan needs nothing of what a run does.
_COMMANDS = {
    "train": "run.decoder:command",
    "sample": "run.decoder:sample",
    "profile": "run.profiling:show",
    "launch": "run.launch:main",
    "plan": "plan.command:main",
    "doctor": "run.examine:examine",
    "diff": "run.hashes:diff",
}
# These read the words after their names; the parameters of the others become flags.
_READERS = ("train", "launch", "plan")

_HELP = """shardwise: training across devices in JAX

  shardwise train                 train a decoder on all accelerators, or simulated devices
  shardwise train --run FOLDER --resume
  shardwise sample FOLDER         write text from a checkpoint
  shardwise profile FOLDER        what devices did in the steps of `train --profile 10:13`
  shardwise launch local --processes 4 -- train ...
  shardwise plan --model llama3-8b --chips v5p:4x4x8 --batch 1024 --sequence 8192
  shardwise diff FOLDER FOLDER    at which step two runs with --hash-every part
  shardwise doctor                whether these devices compute what they should

Each has --help. With SHARDWISE_TRACEBACK=1 every error shows where it comes from."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, `sys.argv` by default, and return its exit status."""
    _open_closed()
    mesh.look_for_no_tpu()  # whatever comes first: an error too asks how many processes there are
    try:
        try:
            return _command(*(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # all that it printed is out, or cannot be
    except Exception as error:
        if _is_unread(error):
            return _end(128 + signal.SIGPIPE)  # as a shell has it
        expected = isinstance(error, _EXPECTED) and not isinstance(error, _OURS)
        if expected and not os.environ.get("SHARDWISE_TRACEBACK"):
            print(f"shardwise: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        return _end(1)


def _command(name=None, *words):
    if name in (None, "-h", "--help"):
        print(_HELP)
        return 0 if name else 2
    if name not in _COMMANDS:
        print(f"shardwise: no command {name!r}; there are {', '.join(_COMMANDS)}.", file=sys.stderr)
        return 2
    module, _, function = _COMMANDS[name].partition(":")
    called = getattr(importlib.import_module(f"shardwise.{module}"), function)
    if name in _READERS:
        return called(words)
    return tyro.cli(called, prog=f"shardwise {name}", args=words) or 0


def _open_closed():
    """Open stdout and stderr where they are missing: else a file takes their number and output."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest that is free
        pass
    os.close(number)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))


def _is_unread(error):
    """Whether the reader of the output has gone, as in `... | head`; then no more is written."""
    if isinstance(error, BrokenPipeError):
        try:
            os.write(sys.stdout.fileno(), b"\n")  # it may be another pipe that broke
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return True
    return False


def _end(status):
    """Return the status; of several processes, one in trouble exits, and waits for no other."""
    if jax.process_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
