"""Puzzles on plans: the smallest slice, divisions of chips, the seconds of a gather."""

import functools
import math
import random
from collections.abc import Callable, Sequence

from shardwise import plan, topology
from shardwise.plan import arrays, links, planning, roles
from shardwise.plan.links import Side, Way
from shardwise_book.puzzles.judging import Verdict, Wrong, puzzle

_SHAPES = ["2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8"]
_JOB = 64, 4096  # rows, tokens of a row
_FEW = 64, 1024
_LONG = 1024, 8192


@puzzle('put a name such as `"v5p:4x4x4"` in the place of the dots.')
def smallest(name: str) -> Verdict:
    """Check the name, such as "v5p:4x4x4", of the smallest slice on which Llama 3 70B fits.

    It is to fit in some layout, with 64 rows of 4,096 tokens.
    """
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


@functools.cache
def _least(name):
    """Bytes of the layout that needs least, of those that can be."""
    found = plan.plan("llama3-70b", name, *_JOB)
    return min((c.memory.total for c in found.fitting + found.too_large), default=math.inf)


@puzzle("put `plan.Roles(...)` in the place of the dots.")
def division(answer: plan.Roles) -> Verdict:
    """Check `plan.Roles` for Llama 3 8B on 64 v5e chips, with 64 rows of 1,024 tokens.

    By the planner's count they may take 5 % longer than the fastest that fit, without stages.
    """
    return _near_the_best(answer, "llama3-8b", "v5e:8x8", *_FEW)


@puzzle("put `plan.Roles(...)` in the place of the dots.")
def split(answer: plan.Roles) -> Verdict:
    """Check `plan.Roles` for Llama 3 70B on 4,096 H100s, with 1,024 rows of 8,192 tokens.

    By the planner's count they may take 5 % longer than the fastest that fit, without stages.
    """
    return _near_the_best(answer, "llama3-70b", "h100:512x8", *_LONG)


def _near_the_best(answer, model, name, batch, sequence):
    """What is said of roles that take at most 5 % longer than the fastest without stages."""
    if not isinstance(answer, plan.Roles):
        raise Wrong(f"expected `plan.Roles(...)`, and got {answer!r}.")
    config, chips = plan.preset(model), topology.chips(name)
    given = config, arrays.of_decoder(config), chips, batch, sequence
    devices = math.prod(answer.sizes.values())
    if devices != chips.devices:
        raise Wrong(f"{answer} are {devices} devices, and there are {chips.devices}.")
    if answer.stage > 1:
        raise Wrong("stages are left out here.")
    if told := roles.refusal(answer, config, chips, batch, sequence):
        raise Wrong(f"{told.kind}: {told.reason}.")
    if answer not in roles.variants(answer, batch, chips):
        raise Wrong(f"a device's {batch // answer.rows} rows do not divide into microbatches.")
    ours, room = planning.candidate(answer, *given), chips.usable_hbm
    if ours.memory.total > room:
        raise Wrong(f"it needs {ours.memory.total / 2**30:.1f} GiB of {room / 2**30:.2f}.")
    best, took = _best(*given), ours.step.seconds
    if took > 1.05 * best:
        raise Wrong(f"it takes {took:.3f} s, bound by {ours.step.binds}; the best {best:.3f}.")
    return f"{took:.3f} s, and the best takes {best:.3f}."


@functools.cache
def _best(config, held, chips, batch, sequence):
    """Seconds of the fastest without stages that fits."""
    given = config, held, chips, batch, sequence
    found = []
    for division in roles.every(chips.devices):
        if division.stage == 1 and not roles.refusal(division, config, chips, batch, sequence):
            each = (planning.candidate(r, *given) for r in roles.variants(division, batch, chips))
            found += [c.step.seconds for c in each if c.memory.total <= chips.usable_hbm]
    return min(found)


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
