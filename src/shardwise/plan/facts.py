"""A plan, and what the compiler says of it, as numbers for `shardwise plan --json`."""

from typing import Any

from shardwise.plan import compiling, tables
from shardwise.plan.planning import Candidate, Plan
from shardwise.plan.roles import Roles


def _named(record: Any, names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names.split()}


def of_plan(plan: Plan, top: int) -> dict[str, Any]:
    """The best layouts as numbers, for `--json`: bytes, seconds and shares."""
    return {
        "chips": str(plan.chips),
        "devices": plan.chips.devices,
        **_named(plan, "batch sequence"),
        "usable_bytes": plan.usable,
        "layouts": [_of_layout(plan, c) for c in plan.best[:top]],
        "left_out": {
            why: {"count": count, "example": example}
            for why, (count, example) in plan.why_not.items()
        },
        "notes": list(tables.notes(plan, plan.best[:top])),
    }


def _of_roles(r: Roles):
    return {"roles": r.sizes, **_named(r, "microbatches remat offload products")}


def _of_layout(plan: Plan, c: Candidate):
    """The numbers of one layout, and what realises it."""
    m, times = c.memory, "arithmetic waited hidden update host weights seconds in_turn bound"
    return {
        **_of_roles(c.roles),
        "code": compiling.code(c.roles, plan) if plan.config else None,
        "flags": compiling.flags(c.roles, plan) if plan.config else None,
        "bytes": _named(m, "parameters state batch") | m.of_step._asdict() | _named(m, "total"),
        "bytes_on_host": m.host,
        "sent": [
            {
                "along": list(t.sent.roles),
                **_named(t.sent, "kind bytes"),
                "over": [str(way) for way in t.over],
                "seconds": t.seconds,
            }
            for t in c.step.transfers
        ],
        "seconds": _named(c.step, times),
        **_named(c.step, "bubble binds"),
        **_named(c, "mfu mfu_bound"),
    }


def of_check(found: compiling.Check) -> dict[str, Any]:
    """The compiler's numbers of one layout, beside those by formula."""
    by_hand = [s.bytes for s in found.candidate.sent if s.roles != ("tensor",)]
    return {
        **_of_roles(found.candidate.roles),
        "fits": bool(found.fit),
        "bytes": found.fit.needed,
        "bytes_by_formula": found.candidate.memory.total,
        "memory": found.fit.memory._asdict() if found.fit.memory else None,
        "sent_by_hand_lowered": found.lowered,
        "sent_by_hand_by_formula": sum(by_hand),
        "sent": found.sent,
        "differences": {name: d._asdict() for name, d in found.differences.items()},
        "seconds": found.seconds,
    }
