"""A plan as text: what each layout holds, sends and takes, and why others are left out."""

from typing import Any

from shardwise.plan.memory import Terms
from shardwise.plan.planning import Candidate, Plan

_GIB, _GB = 2**30, 1e9
_HELD = ("layout", "parameters", "state")
_TIMES = ("arithmetic", "waited", "hidden", "update")
_SHARES = ("bubble", "step s", "MFU", "at most")
_ROOFLINE = (
    "Seconds of a step are a roofline: products at the chip's peak; they wait for activations and "
    "tokens (waited), all else is sent beside them (hidden). At most: nothing waits. MFU counts "
)
_EXACT = "Memory in GiB on a device: parameters and state are exact; the rest is "
NOTES = (
    f"{_EXACT}a formula, fitted to a "
    "few programs without stages. Scores of attention are never kept.",
    f"{_ROOFLINE}the half of attention that a causal mask lets through.",
)
NOTES_OF_OWN = (
    f"{_EXACT}what JAX keeps for the backward pass, less what follows from the rest entry by "
    "entry, and the largest gradient, or a rematerialised layer's.",
    f"{_ROOFLINE}three times the forward pass.",
)


def text(plan: Plan, top: int) -> str:
    """The best layouts as tables of text, then what each sends, then the rejected by reason."""
    best = plan.best[:top]
    terms = [name for name in Terms._fields if any(getattr(c.memory.of_step, name) for c in best)]
    lines = [_title(plan), ""]
    away = any(c.memory.host for c in best)
    rows = [_memory_row(i, c, terms, away) for i, c in enumerate(best, 1)]
    lines += _table(("", *_HELD, *terms, "all", *["on host"][:away]), rows)
    times = (*_TIMES, *["host"][:away])
    rows = [_row(i, c, times) for i, c in enumerate(best, 1)]
    lines += ["", *_table(("", *times, *_SHARES, "binds"), rows)]
    lines += ["", "Sent by a device in a step, and over which links:"]
    lines += [f"  {i}  {_sends(c)}" for i, c in enumerate(best, 1)]
    if not best:
        lines += ["  Nothing fits."]
    lines += ["", "Left out:"]
    for why, (count, example) in plan.why_not.items():
        lines.append(f"  {count:6,}  {why}; such as {example}")
    return "\n".join([*lines, "", *_notes(plan, best)])


NOTE_OF_HOST = (
    "With offload, what enters layers goes to the host beside the forward pass, and comes back "
    "beside the rest; host: seconds each way."
)


NOTE_OF_GPUS = (
    "Of a GPU's memory a program has what JAX takes when it starts: three quarters, or the share "
    "that XLA_CLIENT_MEM_FRACTION says. NCCL and CUDA need theirs beside it."
)


def _notes(plan, shown):
    notes = NOTES_OF_OWN if plan.own else NOTES
    notes += (NOTE_OF_GPUS,) if plan.chips.chip.node else ()
    return (*notes, NOTE_OF_HOST) if any(c.roles.offload for c in shown) else notes


def _title(plan):
    fitting, gib = len(plan.fitting), plan.usable / _GIB
    of_tokens = f" of {plan.sequence:,} tokens" if plan.sequence else ""
    return (
        f"{plan.batch:,} rows{of_tokens} on {plan.chips}, {plan.chips.devices} "
        f"devices of {gib:.1f} GiB: {fitting:,} layouts fit, in {len(plan.best):,} divisions."
    )


def _memory_row(i, c: Candidate, terms, away):
    m = c.memory
    parts = [m.parameters, m.state, *(getattr(m.of_step, name) for name in terms), m.total]
    parts += [m.host] if away else []
    return (str(i), str(c.roles), *(f"{part / _GIB:.2f}" for part in parts))


def _row(i, c: Candidate, times):
    s = c.step
    shares = f"{s.bubble:.1%}", f"{s.seconds:.4g}", f"{c.mfu:.1%}", f"{c.mfu_bound:.1%}"
    return (str(i), *(f"{getattr(s, name):.4g}" for name in times), *shares, s.binds)


def _sends(c: Candidate):
    told = []
    for t in c.step.transfers:
        if t.sent.kind in ("loss", "counts"):
            continue
        over = " and ".join(map(str, t.over))
        told.append(
            f"{t.sent.kind} along {' × '.join(t.sent.roles)} {t.sent.bytes / _GB:.4g} GB over "
            f"{over} in {t.seconds:.3g} s"
        )
    return "; ".join(told) or "nothing"


def _table(columns, rows):
    rows = [columns, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    aligned = ["<" if name in ("layout", "binds") else ">" for name in columns]
    pairs = list(zip(aligned, widths, strict=True))
    told = [[f"{x:{a}{w}}" for x, (a, w) in zip(row, pairs, strict=True)] for row in rows]
    return ["  " + "  ".join(row).rstrip() for row in told]


def facts(plan: Plan, top: int) -> dict[str, Any]:
    """The best layouts as numbers, for `--json`: bytes, seconds and shares."""
    return {
        "chips": str(plan.chips),
        "devices": plan.chips.devices,
        "batch": plan.batch,
        "sequence": plan.sequence,
        "usable_bytes": plan.usable,
        "layouts": [layout(c) for c in plan.best[:top]],
        "left_out": {
            why: {"count": count, "example": example}
            for why, (count, example) in plan.why_not.items()
        },
        "notes": list(_notes(plan, plan.best[:top])),
    }


def layout(c: Candidate) -> dict[str, Any]:
    """The numbers of one layout."""
    m, s, r = c.memory, c.step, c.roles
    return {
        "roles": r.sizes,
        "microbatches": r.microbatches,
        "remat": r.remat,
        "offload": r.offload,
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
        "seconds": {
            name: getattr(s, name) for name in (*_TIMES, "host", "weights", "seconds", "bound")
        },
        "bubble": s.bubble,
        "binds": s.binds,
        "mfu": c.mfu,
        "mfu_bound": c.mfu_bound,
    }
