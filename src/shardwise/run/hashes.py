"""Hashes of a run's arrays, and the command `shardwise diff`: at which step two runs part."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jaxlib
import numpy as np
import tyro

from shardwise import rules
from shardwise import tree as trees
from shardwise.run import metrics
from shardwise.run.folder import Folder


def hashes(tree: Any) -> dict[str, str]:
    """{path: 16 hexadecimal digits} of the bytes of each array, whole; one at a time on the host.

    Every process takes part.
    """
    return {path: _digest(x) for path, x in trees.leaves(tree)}


def line(step: int, loss: float, tree: Any) -> dict[str, Any]:
    """A line of the run's hashes: with the kind of chip and release for which equality is promised.

    Every process takes part.
    """
    chip = jax.devices()[0].device_kind
    arrays = hashes(tree)
    return dict(step=step, loss=loss, chip=chip, jaxlib=jaxlib.__version__, arrays=arrays)


def parted(one: Path, other: Path) -> tuple[bool, str]:
    """(whether the runs in two folders part, what can be said of it), from what both recorded.

    Raises:
      ValueError: they recorded no hashes of the same step.
    """
    folders = [Folder(path) for path in (one, other)]
    found = [{x["step"]: x for x in metrics.read(folder.hashes)} for folder in folders]
    steps = sorted(found[0].keys() & found[1].keys())
    if missing := [str(each.path) for each in folders if not each.path.exists()]:
        raise ValueError(f"diff: there is no run folder {missing[0]}.")
    if not steps:
        raise ValueError(
            f"diff: {one} and {other} have no hashes of one step; record them by --hash-every, the "
            f"same in both runs."
        )
    told = [
        f"They were computed by {name} {a} and {b}, for which the same bits are not promised."
        for name in ("chip", "jaxlib")
        if (a := found[0][steps[-1]][name]) != (b := found[1][steps[-1]][name])
    ]
    differs = {step: _differing(*(each[step]["arrays"] for each in found)) for step in steps}
    first = next((step for step in steps if differs[step]), None)
    if first is None:
        arrays = len(found[0][steps[-1]]["arrays"])
        return False, " ".join([f"{arrays} arrays are equal in steps {_listed(steps)}.", *told])
    paths, before = differs[first], [step for step in steps if step < first]
    equal = f"equal in steps {_listed(before)}" if before else "not recorded as equal before"
    more = f", and {len(paths) - 8} more" if len(paths) > 8 else ""
    lines = [f"They part by step {first}, {equal}: {', '.join(paths[:8])}{more}.", *told]
    losses = [{x["step"]: x["loss"] for x in metrics.read(each.metrics)} for each in folders]
    common = sorted(losses[0].keys() & losses[1].keys())
    told_apart = ((step, *(str(each[step]) for each in losses)) for step in common)
    for step, a, b in (each for each in told_apart if each[1] != each[2]):
        lines.insert(1, f"The first loss that differs is step {step}'s: {a} and {b}.")
        break
    return True, "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Compare two runs; the exit status is 1 where they part."""

    def arguments(
        one: Annotated[Path, tyro.conf.Positional],
        other: Annotated[Path, tyro.conf.Positional],
    ) -> int:
        """Tell at which step, and in which arrays, two runs with --hash-every part.

        Args:
          one: a run folder.
          other: another one.
        """
        differ, told = parted(one, other)
        print(told)
        return int(differ)

    return tyro.cli(arguments, prog="shardwise diff", args=list(argv))


def _digest(x):
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    whole = np.ascontiguousarray(rules.whole(x))
    kind = f"{whole.dtype}{whole.shape}".encode()
    return hashlib.blake2b(kind + whole.tobytes(), digest_size=8).hexdigest()


def _differing(one, other):
    return [path for path in {**one, **other} if one.get(path) != other.get(path)]


def _listed(steps):
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]} ({len(steps)})"
