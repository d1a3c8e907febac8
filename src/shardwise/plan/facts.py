"""A plan, and what the compiler says of it, as numbers for `shardwise plan --json`."""

from typing import Any

from shardwise.plan import compiling, tables
from shardwise.plan.planning import Candidate, Plan
from shardwise.plan.roles import Roles

_TIMES = ("arithmetic", "waited", "hidden", "update", "host", "weights", "seconds", "bound")


def of_plan(plan: Plan, top: int) -> dict[str, Any]:
    """The best layouts as numbers, for `--json`: bytes, seconds and shares."""
    return {
        "chips": str(plan.chips),
        "devices": plan.chips.devices,
        "batch": plan.batch,
        "sequence": plan.sequence,
        "usable_bytes": plan.usable,
        "layouts": [_of_layout(plan, c) for c in plan.best[:top]],
        "left_out": {
            why: {"count": count, "example": example}
            for why, (count, example) in plan.why_not.items()
        },
        "notes": list(tables.notes(plan, plan.best[:top])),
    }


def _of_roles(r: Roles):
    names = "microbatches", "remat", "offload", "products"
    return {"roles": r.sizes} | {name: getattr(r, name) for name in names}


def _of_layout(plan: Plan, c: Candidate):
    """The numbers of one layout, and what realises it."""
    m, s = c.memory, c.step
    held = {name: getattr(m, name) for name in ("parameters", "state", "batch")}
    return {
        **_of_roles(c.roles),
        "code": compiling.code(c.roles, plan) if plan.config else None,
        "flags": compiling.flags(c.roles, plan) if plan.config else None,
        "bytes": {**held, **m.of_step._asdict(), "total": m.total},
        "bytes_on_host": m.host,
        "sent": [
            {
                "along": list(t.sent.roles),
                "kind": t.sent.kind,
                "bytes": t.sent.bytes,
                "over": [str(way) for way in t.over],
                "seconds": t.seconds,
            }
            for t in s.transfers
        ],
        "seconds": {name: getattr(s, name) for name in _TIMES},
        "bubble": s.bubble,
        "binds": s.binds,
        "mfu": c.mfu,
        "mfu_bound": c.mfu_bound,
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
