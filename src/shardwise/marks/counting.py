"""The marks that tell `measure` what a compiled program does not: turns of loops, FLOPs of kernels.

Each is a named scope, which changes nothing; a program carries the names of its scopes.
"""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from fractions import Fraction

import jax

_TURNS = re.compile(r"\bturns ([\d,]+) of (\d+)\)*/while$")
_KERNELS = re.compile(r".*\bkernels((?: \w+=\d+)+)")


def turns(times: int | Sequence[int], of: int = 1) -> AbstractContextManager:
    """The scope of a loop whose body runs `times` in `of` runs of the loop.

    A task of a pipeline of 22 ticks is such a loop, of one turn or none; if it runs 8 times on the
    first device, and never on the second:

        with marks.turns([8, 0], of=22):
            carry = jax.lax.fori_loop(0, is_now.astype(int), body, carry)

    Of devices that differ (`times` of each, in one order in all scopes of a program), the one that
    does most is counted.
    """
    each = [times] if isinstance(times, int) else times
    return jax.named_scope(f"turns {','.join(str(int(n)) for n in each)} of {of}")


def turns_said(name: str) -> tuple[Fraction, ...] | None:
    """The turns of a loop per run, on each device, by its operation's name; None if not said."""
    said = _TURNS.search(name)
    return tuple(Fraction(int(n), int(said[2])) for n in said[1].split(",")) if said else None


def kernels(**flops: int) -> AbstractContextManager:
    """The scope of Pallas kernels that do not state their FLOPs, `{a part of its name: FLOPs}`.

    Of one run on one device, as `pl.CostEstimate` says it for a kernel that one writes oneself.
    """
    return jax.named_scope(" ".join(["kernels", *(f"{k}={n}" for k, n in flops.items())]))


def kernel_said(name: str) -> int | None:
    """The FLOPs of a kernel by its operation's name; None if not said."""
    if said := _KERNELS.match(name):
        within = name[said.end() :]
        for part, flops in re.findall(r"(\w+)=(\d+)", said[1]):
            if part in within:
                return int(flops)
    return None
