"""Every pair and triple of roles that fits eight devices, by hand and by the compiler."""

import itertools

from shardwise.layouts import LAYOUTS, Layout, catalogue

ROLES = ("stage", "data", "fsdp", "expert", "context", "tensor")
EVERY = [
    (*roles, by)
    for by in ("hand", "compiler")
    for size in (2, 3)
    for roles in itertools.combinations(ROLES, size)
]


def _refused(case):
    """Whether a Layout refuses it, since XLA's partitioner dies of it."""
    beside = {*case[:-1]} - ({"stage"} if {"tensor", "fsdp"} & {*case} else {"stage", "data"})
    return case[-1] == "compiler" and "stage" in case and len(beside) > 1


COMBINED = [case for case in EVERY if not _refused(case)]

# Of these, those that stand among the layouts by name.
_STANDING = {(frozenset(x.roles()), x.by) for x in (make(8) for make in LAYOUTS.values())}
NAMED = [case for case in COMBINED if (frozenset(case[:-1]), case[-1]) in _STANDING]


def layout_of(case: tuple[str, ...], n: int = 8) -> Layout:
    """That of one of `COMBINED`, in microbatches, on so many devices."""
    *roles, by = case
    settings = dict(microbatches=4 if "stage" in roles else 2, by=by)
    if by == "hand" and "context" in roles:
        settings["attention"] = "zigzag" if "fsdp" in roles else "ulysses"
    return catalogue.over(tuple(roles), n, **settings)
