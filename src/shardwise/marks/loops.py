"""The mark of a loop whose number of turns depends on data, for those who count what it does."""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from fractions import Fraction

import jax

_SAID = re.compile(r"\bturns ([\d,]+) of (\d+)\)*/while$")


def turns(times: int | Sequence[int], of: int = 1) -> AbstractContextManager:
    """The scope of a loop whose body runs `times` in `of` runs of the loop.

    A task of a pipeline of 22 ticks is such a loop, of one turn or none; if it runs 8 times on the
    first device, and never on the second:

        with marks.turns([8, 0], of=22):
            carry = jax.lax.fori_loop(0, is_now.astype(int), body, carry)

    A program carries the names of its scopes, and `measure` counts by this one: of devices that
    differ (`times` of each, in one order in all scopes of a program), the one that does most.
    """
    each = [times] if isinstance(times, int) else times
    return jax.named_scope(f"turns {','.join(str(int(n)) for n in each)} of {of}")


def turns_said(name: str) -> tuple[Fraction, ...] | None:
    """The turns of a loop per run, on each device, by its operation's name; None if not said."""
    said = _SAID.search(name)
    return tuple(Fraction(int(n), int(said[2])) for n in said[1].split(",")) if said else None
