"""The command `shardwise`: train, sample, profile, launch, plan, doctor."""

import contextlib
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence

import jax
import tyro

from shardwise import mesh
from shardwise.plan import command as plan
from shardwise.run import decoder, examine, launch, profiling, settings, signals
from shardwise.run.reports import OUT

UNREAD = 128 + signal.SIGPIPE  # of a command whose reader is gone, as a shell has it
# Errors of what was given, and of the machine; others are ours, and show where they come from.
EXPECTED = ValueError, OSError, ImportError, RuntimeError
OURS = NotImplementedError, RecursionError, jax.errors.JaxRuntimeError

HELP = """shardwise: training across devices in JAX

  shardwise train                 train a decoder on eight devices, simulated or real
  shardwise train --run FOLDER --resume
  shardwise sample FOLDER         write text from a checkpoint
  shardwise profile FOLDER        what devices did in the steps of `train --profile 10:13`
  shardwise launch local --processes 4 -- train ...
  shardwise plan --model llama3-8b --chips v5p:4x4x8 --batch 1024 --sequence 8192
  shardwise doctor --mesh data=2,fsdp=4    whether these devices compute what they should

Each has --help. With SHARDWISE_TRACEBACK=1 every error shows where it comes from."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, `sys.argv` by default, and return its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    _open_closed()
    mesh.look_for_no_tpu()  # whatever comes first: an error too asks how many processes there are
    try:
        return _flushed(argv)
    except Exception as error:
        if _is_unread(error):
            return _end(UNREAD)
        expected = isinstance(error, EXPECTED) and not isinstance(error, OURS)
        if expected and not os.environ.get("SHARDWISE_TRACEBACK"):
            print(f"shardwise: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        return _end(1)


def _flushed(argv):
    """The exit status of a command, once all that it printed is out."""
    try:
        return _command(argv)
    finally:
        sys.stdout.flush()


def _command(argv):
    commands = dict(train=train, sample=sample, profile=profile)
    commands |= dict(launch=launch.main, plan=plan.main, doctor=examine.main)
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP)
        return 0 if argv else 2
    if argv[0] not in commands:
        print(
            f"shardwise: no command {argv[0]!r}; there are {', '.join(commands)}.", file=sys.stderr
        )
        return 2
    return commands[argv[0]](argv[1:])


def train(argv: Sequence[str]) -> int:
    """Train; the exit status is 0 when done, 75 when a signal stopped the run after saving."""
    given = settings.flags(argv=argv, prog="shardwise train")
    signals.join(given.processes, given.devices)
    layout = given.layout.layout()
    if jax.process_index() == 0:
        kind = mesh.devices()[0].device_kind
        print(f"On {len(mesh.devices())} devices, {kind}. {layout}", file=OUT, flush=True)
    result = decoder.train(given)
    if jax.process_index() == 0:
        more = "" if result.stopped else f" --steps {2 * given.steps}"
        plot, run = given.run / "metrics.png", shlex.quote(str(given.run))
        told = (
            f"Look:   {plot}" if plot.exists() else "No plot: pip install matplotlib draws one.",
            f"Go on:  shardwise train --run {run} --resume{more}",
            f"Write:  shardwise sample {run}",
        )
        print(*told, sep="\n", file=OUT, flush=True)
    return signals.leave(result)


def sample(argv: Sequence[str]) -> int:
    """Write text from a checkpoint."""
    print(tyro.cli(decoder.sample, prog="shardwise sample", args=list(argv)))
    return 0


def profile(argv: Sequence[str]) -> int:
    """Read a run's newest trace."""
    tyro.cli(profiling.show, prog="shardwise profile", args=list(argv))
    return 0


def _open_closed():
    """Open stdout and stderr where they are missing: else a file takes their number and output."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, "w")
            with contextlib.suppress(OSError):
                os.fstat(number)
                number = nowhere.fileno()  # some file has it already
            if number != nowhere.fileno():
                os.dup2(nowhere.fileno(), number)
            setattr(sys, name, nowhere)


def _is_unread(error):
    """Whether the reader of the output has gone, as in `... | head`; then no more is written."""
    if not isinstance(error, BrokenPipeError):
        return False
    try:
        os.write(sys.stdout.fileno(), b"\n")  # it may be another pipe that broke
        return False
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True


def _end(status):
    """Return the status; of several processes, one in trouble exits, and waits for no other."""
    if jax.process_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
