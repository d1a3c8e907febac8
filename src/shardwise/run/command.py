"""The commands `shardwise train`, `sample` and `profile`."""

import shlex
from collections.abc import Sequence

import jax
import tyro

from shardwise import mesh
from shardwise.run import decoder, profiling, settings, signals
from shardwise.run.reports import OUT


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
