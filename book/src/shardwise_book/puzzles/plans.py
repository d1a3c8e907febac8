"""Puzzles on plans: the smallest slice, divisions of chips, the seconds of a gather."""

import functools
import math
import random
from collections.abc import Callable, Sequence

from shardwise import plan, topology
from shardwise.plan import links, roles
from shardwise.plan.links import Side, Way
from shardwise_book.puzzles.judging import Verdict, Wrong, puzzle

_SHAPES = ["2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8"]
_planned = functools.cache(plan.plan)


@puzzle('put a name such as `"v5p:4x4x4"` in the place of the dots.')
def smallest(name: str) -> Verdict:
    """Check the name of the smallest slice of v5p for Llama 3 70B with 64 rows of 4,096 tokens."""
    if not isinstance(name, str):
        raise Wrong(f"expected a name such as 'v5p:4x4x4', and got {name!r}.")
    found = topology.chips(name)
    if found.kind != "v5p":
        raise Wrong(f"{name} are {found.kind}; the slice is to be of v5p.")
    least = _least(name)
    if least > found.usable_hbm:
        raise Wrong(
            f"on {found.number} chips the smallest layout needs {least / 2**30:.0f} GiB of "
            f"{found.usable_hbm / 2**30:.1f}."
        )
    for shape in _SHAPES:
        fewer = topology.chips(f"v5p:{shape}")
        if fewer.number < found.number and _least(str(fewer)) <= fewer.usable_hbm:
            raise Wrong(f"it fits on {found.number} chips, and on {fewer.number} too.")
    return f"{found.number} chips, where the smallest layout needs {least / 2**30:.0f} GiB."


def _least(name):
    """Bytes of the layout that needs least, of those that can be."""
    found = _planned("llama3-70b", name, 64, 4096)
    return min((c.memory.total for c in found.fitting + found.too_large), default=math.inf)


@puzzle("put `plan.Roles(...)` in the place of the dots.")
def division(answer: plan.Roles) -> Verdict:
    """Check `plan.Roles` as `split` does: Llama 3 8B, 64 v5e chips, 64 rows of 1,024 tokens."""
    return _near_the_best(answer, "llama3-8b", "v5e:8x8", 64, 1024)


@puzzle("put `plan.Roles(...)` in the place of the dots.")
def split(answer: plan.Roles) -> Verdict:
    """Check `plan.Roles` for Llama 3 70B on 4,096 H100s, with 1,024 rows of 8,192 tokens.

    By the planner's count they may take 5 % longer than the fastest that fit, without stages.
    """
    return _near_the_best(answer, "llama3-70b", "h100:512x8", 1024, 8192)


def _near_the_best(answer, *asked):
    """What is said of roles that take at most 5 % longer than the fastest without stages."""
    if not isinstance(answer, plan.Roles):
        raise Wrong(f"expected `plan.Roles(...)`, and got {answer!r}.")
    found = _planned(*asked)
    config, chips, batch, sequence = found.config, found.chips, found.batch, found.sequence
    devices = math.prod(answer.sizes.values())
    if devices != chips.devices:
        raise Wrong(f"{answer} are {devices} devices, and there are {chips.devices}.")
    if answer.stage > 1:
        raise Wrong("stages are left out here.")
    if told := roles.refusal(answer, config, chips, batch, sequence):
        raise Wrong(f"{told.kind}: {told.reason}.")
    ours = next((c for c in found.fitting + found.too_large if str(c.roles) == str(answer)), None)
    if ours is None:
        rows = batch // answer.rows
        raise Wrong(f"the planner has none with {answer.microbatches} microbatches of {rows} rows.")
    if lacks := found.lacking(ours):
        raise Wrong(f"it needs {lacks[1] / 2**30:.1f} GiB of {lacks[2] / 2**30:.2f}.")
    best = next(c.step.seconds for c in found.fitting if c.roles.stage == 1)
    took = ours.step.seconds
    if took > 1.05 * best:
        raise Wrong(f"it takes {took:.3f} s, bound by {ours.step.binds}; the best {best:.3f}.")
    return f"{took:.3f} s, and the best takes {best:.3f}."


@puzzle("write the body, and return seconds.")
def gather_seconds(fn: Callable[[float, Sequence[int], float, int], float]) -> Verdict:
    """Check a formula for the seconds of a gather over whole sides of a torus.

    `fn(sent, sides, link, ring_from)` returns them, where a chip sends `sent` bytes, `sides` are
    the numbers of chips along the sides, `link` is a link's bytes/s, one way, and a side is a ring
    if its number is a multiple of `ring_from`, else a line.
    """
    draw = random.Random(0)
    for _ in range(20):
        chip = topology.CHIPS[draw.choice(["v5p", "v5e"])]
        sides = [draw.choice([2, 4, 8, 16]) for _ in range(draw.randint(1, chip.dimensions))]
        sent = float(draw.randint(1, 9)) * 1e9
        way = Way(tuple(Side(size, 1, size) for size in sides))
        right = links.ring_seconds(chip, [way], sent)
        told = fn(sent, tuple(sides), chip.link_bandwidth, chip.ring_from)
        if not math.isclose(told, right, rel_tol=1e-6):
            shape = "×".join(map(str, sides))
            raise Wrong(
                f"{sent / 1e9:g} GB over sides of {shape} on {chip.kind} (rings from "
                f"{chip.ring_from}) take {right:.4f} s, and it says {told!r}."
            )
    return "right for twenty gathers, over rings, lines and both."
