"""Every pair and triple of roles that fits eight devices, by hand and by the compiler."""

import itertools

from shardwise.layouts import Layout, catalogue

ROLES = ("stage", "data", "fsdp", "expert", "context", "tensor")
COMBINED = [
    (*roles, by)
    for by in ("hand", "compiler")
    for size in (2, 3)
    for roles in itertools.combinations(ROLES, size)
]


def layout_of(case: tuple[str, ...], n: int = 8) -> Layout:
    """That of one of `COMBINED`, in microbatches, on so many devices."""
    *roles, by = case
    settings = dict(microbatches=4 if "stage" in roles else 2, by=by)
    if by == "hand" and "context" in roles:
        settings["attention"] = "zigzag" if "fsdp" in roles else "ulysses"
    return catalogue.over(tuple(roles), n, **settings)
