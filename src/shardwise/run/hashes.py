"""Hashes of a run's arrays, and the command `shardwise diff`: at which step two runs part."""

import hashlib
from pathlib import Path
from typing import Annotated, Any

import jax
import jaxlib
import numpy as np
import tyro

from shardwise import rules
from shardwise import tree as trees
from shardwise.run import reports
from shardwise.run.folder import Folder


def hashes(tree: Any) -> dict[str, str]:
    """{path: 16 hexadecimal digits} of the bytes of each array, whole; every process takes part."""
    return {path: _digest(x) for path, x in trees.leaves(tree)}  # one at a time on the host


def line(step: int, loss: float, tree: Any) -> dict[str, Any]:
    """A line of hashes.jsonl: step, loss, chip, jaxlib, and the `hashes` of `tree`."""
    chip, release = jax.devices()[0].device_kind, jaxlib.__version__
    return dict(step=step, loss=loss, chip=chip, jaxlib=release, arrays=hashes(tree))


def diff(
    one: Annotated[Path, tyro.conf.Positional], other: Annotated[Path, tyro.conf.Positional]
) -> int:
    """Tell at which step, and in which arrays, two runs with --hash-every part; then exit with 1.

    Args:
      one: a run folder.
      other: another one.
    """
    ours, theirs = ({x["step"]: x for x in reports.read(Folder(p).hashes)} for p in (one, other))
    steps = sorted(ours.keys() & theirs.keys())
    if not steps:
        raise ValueError(
            f"diff: {one} has hashes of {len(ours)} steps and {other} of {len(theirs)} (0: no run "
            f"folder, or none recorded), and no step is the same; record them by --hash-every, the "
            f"same in both runs."
        )
    first = next((s for s in steps if ours[s]["arrays"] != theirs[s]["arrays"]), None)
    a, b = (each[steps[-1] if first is None else first] for each in (ours, theirs))
    if first is None:
        print(f"{len(a['arrays'])} arrays are equal in steps {_listed(steps)}.")
    else:
        paths = sorted({path for path, _ in a["arrays"].items() ^ b["arrays"].items()})
        more = f", and {len(paths) - 8} more" if len(paths) > 8 else ""
        before = [step for step in steps if step < first]
        equal = f"equal in steps {_listed(before)}" if before else "the first that both recorded"
        print(f"They part by step {first}, {equal}: {', '.join(paths[:8])}{more}.")
    for name in ("chip", "jaxlib"):
        if a[name] != b[name]:
            told = f"One ran with {name} {a[name]}, the other with {b[name]}"
            print(f"{told}: equality is not promised.")
    return int(first is not None)


def _digest(x):
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    whole = np.ascontiguousarray(rules.whole(x))
    found = hashlib.blake2b(f"{whole.dtype}{x.shape}".encode(), digest_size=8)
    found.update(whole.view(np.uint8))
    return found.hexdigest()


def _listed(steps):
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]} ({len(steps)})"
