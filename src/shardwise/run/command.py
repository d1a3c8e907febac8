"""The command `shardwise`: train, sample, profile, launch, plan, doctor."""

import dataclasses
import json
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import tyro

from shardwise import mesh, processes
from shardwise.run import decoding, joining, parsing, profiling
from shardwise.run.folder import Folder
from shardwise.run.output import OUT, open_closed
from shardwise.run.settings import Processes

UNREAD = 128 + signal.SIGPIPE  # of a command whose reader is gone, as a shell has it

HELP = """shardwise: training across devices in JAX

  shardwise train                 train a decoder on eight devices, simulated or real
  shardwise train --run FOLDER --resume
  shardwise sample FOLDER         write text from a checkpoint
  shardwise profile FOLDER        what devices did in the steps of `train --profile 10:13`
  shardwise launch local --processes 4 -- train ...
  shardwise plan --model llama3-8b --chips v5p:4x4x8 --batch 1024 --sequence 8192
  shardwise doctor --mesh data=2,fsdp=4    whether these devices compute what they should

Each has --help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, `sys.argv` by default, and return its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    open_closed()
    mesh.look_for_no_tpu()  # whatever comes first: an error too asks how many processes there are
    try:
        return _flushed(argv)
    except Exception as error:
        if _is_unread(error):
            return _end(UNREAD)
        if _told(error) and not os.environ.get("SHARDWISE_TRACEBACK"):
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
    commands = {"train": train, "sample": sample, "profile": profile, "launch": launch}
    commands |= {"plan": plan, "doctor": doctor}
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP)
        return 0 if argv else 2
    if argv[0] not in commands:
        print(
            f"shardwise: no command {argv[0]!r}; there are {', '.join(commands)}.", file=sys.stderr
        )
        return 2
    return commands[argv[0]](argv[1:])


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


def train(argv: Sequence[str]) -> int:
    """Train; the exit status is 0 when done, 75 when a signal stopped the run after saving."""
    settings = parsing.flags(argv=argv, prog="shardwise train")
    joining.join(settings.processes, settings.devices)
    layout = settings.layout.layout()
    if jax.process_index() == 0:
        kind = mesh.devices()[0].device_kind
        print(f"On {len(mesh.devices())} devices, {kind}. {layout}", file=OUT, flush=True)
    result = decoding.run(settings)
    if jax.process_index() == 0:
        more = "" if result.stopped else f" --steps {2 * settings.steps}"
        plot = settings.run / "metrics.png"
        drawn = f"Look:   {plot}" if plot.exists() else "No plot: pip install matplotlib draws one."
        run = shlex.quote(str(settings.run))
        told = (
            f"Go on:  shardwise train --run {run} --resume{more}",
            f"Write:  shardwise sample {run}",
        )
        print(drawn, *told, sep="\n", file=OUT, flush=True)
    return joining.leave(result)


def sample(argv: Sequence[str]) -> int:
    """Write text from a checkpoint."""

    def arguments(
        run: tyro.conf.Positional[Path],
        prompt: str = decoding.PROMPT,
        tokens: int = 400,
        temperature: float = 0.8,
        seed: int = 0,
        mean: bool = False,
        step: int | None = None,
        devices: int = 1,
    ) -> str:
        """Write text from a run's checkpoint.

        Args:
          run: the run folder.
          prompt: what the text begins with.
          tokens: how many are written.
          temperature: of the draws; 0 takes the likeliest.
          seed: of the draws.
          mean: whether the mean of the parameters writes (EMA), or they themselves.
          step: which checkpoint; by default the newest.
          devices: over how many the parameters are cut, simulated where there are fewer.
        """
        mesh.simulate(devices)
        return decoding.sample(run, prompt, tokens, temperature, seed, mean, step)

    print(tyro.cli(arguments, prog="shardwise sample", args=list(argv)))
    return 0


def profile(argv: Sequence[str]) -> int:
    """Read a run's newest trace."""

    def arguments(run: tyro.conf.Positional[Path]) -> Folder:
        """Show what each device did in the steps of a run's newest trace.

        Args:
          run: the run folder.
        """
        return Folder(run)

    folder = tyro.cli(arguments, prog="shardwise profile", args=list(argv))
    ops = profiling.read(folder.path / "profile")
    print(profiling.table(profiling.times(ops)))
    drawn = profiling.draw(ops, folder.path / "profile.png")
    print(f"Look: {drawn}" if drawn else "No picture: matplotlib is not installed.")
    return 0


def launch(argv: Sequence[str]) -> int:
    """Start several processes of a command."""
    from shardwise.run import launch as launchers

    return launchers.main(argv)


def plan(argv: Sequence[str]) -> int:
    """Propose layouts for chips that need not be here."""
    from shardwise.plan import command

    return command.main(argv)


def doctor(argv: Sequence[str]) -> int:
    """Try the devices; the exit status is 1 when something is wrong."""
    from shardwise import doctor as room

    def arguments(
        system: Annotated[Processes, tyro.conf.arg(name="processes")],
        axes: Annotated[str, tyro.conf.arg(name="mesh")] = "fsdp=-1",
        devices: int = 8,
        as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    ) -> int:
        """Try collectives, gradients, donation and random draws on the devices of a run.

        Args:
          system: the processes, as of `shardwise train`.
          axes: names and sizes of mesh axes, as data=2,fsdp=4; one size may be -1.
          devices: simulated, where there are fewer real ones; of all processes together.
          as_json: print JSON on stdout, and nothing else there.
        """
        sizes = _sizes(axes)
        told = system.address, system.count, system.index
        processes.join(*told, devices=devices, heartbeat=system.heartbeat)
        tried = mesh.make(**sizes)
        found = room.examine(tried)
        if jax.process_index() == 0:
            print(_examined(tried, found, as_json), flush=True)
        processes.leave()
        return 0 if all(each.ok for each in found) else 1

    return tyro.cli(arguments, prog="shardwise doctor", args=list(argv))


def _sizes(axes):
    """The {axis: size} of words such as data=2,fsdp=4."""
    parts = [part.partition("=") for part in axes.split(",")]
    sizes = {name: size for name, _, size in parts}
    well = all(re.fullmatch(r"[^\W\d]\w*=-?\d+", "".join(part)) for part in parts)
    if not well or len(sizes) < len(parts):
        raise ValueError(f"doctor: --mesh {axes}: expected names and sizes, such as data=2,fsdp=4.")
    return {name: int(size) for name, size in sizes.items()}


def _examined(tried, found, as_json):
    """What the doctor found, in lines or as JSON."""
    kind, count = tried.devices.flat[0].device_kind, jax.process_count()
    wrong = sum(not each.ok for each in found)
    if as_json:
        facts = dict(mesh=dict(tried.shape), device_kind=kind, processes=count, ok=not wrong)
        return json.dumps(facts | {"findings": [*map(dataclasses.asdict, found)]}, indent=1)
    axes = " × ".join(f"{name} {size}" for name, size in tried.shape.items())
    first = f"On {tried.size} devices, {kind}, of {count} process{'es' * (count > 1)}: {axes}."
    last = f"{wrong} check{' is' if wrong == 1 else 's are'} wrong." if wrong else "All is right."
    return "\n".join([first, *map(str, found), last])


_ROOMS = ("run", "data", "layouts", "checkpoint", "mesh", "fsdp", "pipeline", "rules", "llama")
_ROOMS = (*_ROOMS, "plan", "processes", "topology", "doctor")


def _told(error):
    """Whether the error's message is one of this package's, which say what is wrong."""
    first = re.match(r"(\w+)[\w.]*(\([^)]*\))?( |:)", str(error))
    expected = ValueError, TypeError, OSError, ImportError, RuntimeError
    return isinstance(error, expected) and bool(first) and first[1] in (*_ROOMS, "Config")


def _end(status):
    """Return the status; of several processes, one in trouble exits, and waits for no other."""
    if jax.process_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
