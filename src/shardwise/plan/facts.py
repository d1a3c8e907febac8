"""A plan as numbers, for `shardwise plan --json`."""

from typing import Any

from shardwise.plan import tables
from shardwise.plan.planning import Candidate, Plan

_TIMES = ("arithmetic", "waited", "hidden", "update", "host", "weights", "seconds", "bound")


def facts(plan: Plan, top: int) -> dict[str, Any]:
    """The best layouts as numbers, for `--json`: bytes, seconds and shares."""
    return {
        "chips": str(plan.chips),
        "devices": plan.chips.devices,
        "batch": plan.batch,
        "sequence": plan.sequence,
        "usable_bytes": plan.usable,
        "layouts": [layout(plan, c) for c in plan.best[:top]],
        "left_out": {
            why: {"count": count, "example": example}
            for why, (count, example) in plan.why_not.items()
        },
        "notes": list(tables.notes(plan, plan.best[:top])),
    }


def layout(plan: Plan, c: Candidate) -> dict[str, Any]:
    """The numbers of one layout, and what realises it."""
    m, s, r = c.memory, c.step, c.roles
    return {
        "roles": r.sizes,
        "microbatches": r.microbatches,
        "remat": r.remat,
        "offload": r.offload,
        "products": r.products,
        "code": tables.code(plan, c) if plan.config else None,
        "flags": tables.flags(plan, c) if plan.config else None,
        "bytes": {
            "parameters": m.parameters,
            "state": m.state,
            "batch": m.batch,
            **m.of_step._asdict(),
            "total": m.total,
        },
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
