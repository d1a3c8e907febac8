"""Traced programs (jaxprs): what stands in them, what follows from what, and how to run parts."""

from shardwise.jaxprs.equations import (
    CALLS,
    REMAT,
    Equation,
    Step,
    bind,
    equations,
    inlined,
    named_as,
    needed,
    read,
    run,
    steps,
    variables,
)
from shardwise.jaxprs.walking import NOTHING, Follower, carries, every, inner

__all__ = [
    "CALLS",
    "NOTHING",
    "REMAT",
    "Equation",
    "Follower",
    "Step",
    "bind",
    "carries",
    "equations",
    "every",
    "inlined",
    "inner",
    "named_as",
    "needed",
    "read",
    "run",
    "steps",
    "variables",
]
