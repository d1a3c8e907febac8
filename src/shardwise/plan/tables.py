"""A plan as text and as numbers for `--json`; a layout by its terms, and why others lose."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from shardwise.costs.terms import Terms
from shardwise.measure import counts
from shardwise.plan import compiling, notes, runs
from shardwise.plan.planning import Candidate, Plan
from shardwise.plan.seconds import WAITED

_GIB, _GB = 2**30, 1e9
_MUCH = 0.5  # of what products take: transfers beside them that a reader is told of
_BESIDE = "beside products"
# What each term of `costs.terms.Terms` is, in a few words.
_MEANT = Terms(
    gradients="gradients of the device's shares",
    weights="weights gathered, or cast, for use",
    kept="activations, kept from forward to backward",
    layer="the backward pass of one layer",
    around="activations whole, around tensor's products",
    logits="logits, the head and its gradient, or some of them",
    ring="keys and values on their way round context",
    dispatch="rows on their way to experts and back",
    summed="gradients summed over microbatches",
    pending="of a pipeline: what the weights' gradients wait for",
    copied="of a pipeline: a copy of that, but for the head's",
    beside="gradients of logits and head, where the compiler chose so",
    whole="gradients of a layer, or its experts, whole",
    heads="the backward pass of a layer's latent attention",
)
_OF_OWN = _MEANT._replace(logits="the largest gradient, or what a loop has")


def text(plan: Plan, top: int) -> str:
    """A text on a plan, with the best layout in words, the `top` best as a table, and the rest."""
    best = plan.best[:top]
    of_tokens = f" of {plan.sequence:,} tokens" if plan.sequence else ""
    of_tokens += f" in documents of {plan.document:,}" if plan.document else ""
    devices = f"{plan.chips.devices} devices of {plan.usable / _GIB:.1f} GiB"
    fit = f"{len(plan.fitting):,} layouts fit, in {len(plan.best):,} divisions"
    title = f"{plan.batch:,} rows{of_tokens} on {plan.chips}, {devices}: {fit}."
    lines = [title, "", *(_summary(plan, best[0]) if best else ["Nothing fits."])]
    rows = []
    for i, c in enumerate(best, 1):
        s, gib = c.step, f"{c.memory.total / _GIB:.2f}"
        shares = f"{s.seconds:.4g}", f"{c.mfu:.1%}", f"{c.mfu_bound:.1%}"
        rows.append((str(i), str(c.roles), gib, f"{s.waited:.3g}", *shares, s.binds))
    columns = ("", "layout", "GiB", "waits s", "step s", "MFU", "at most", "binds")
    lines += ["", *table(columns, rows)] if rows else []
    lines += ["", "Left out:"]
    lines += [f"  {n:6,}  {why}; such as {example}" for why, (n, example) in plan.why_not.items()]
    return "\n".join([*lines, "", *notes.of(plan, best)])


def _summary(plan, c: Candidate):
    s = c.step
    longest = sorted(_times(c), key=lambda x: -x.seconds)
    terms = [f"{x.what} ({_seconds(x.seconds)})" for x in longest if x.seconds > 0.01 * s.seconds]
    waits = s.seconds > 1.005 * s.bound
    least = f", or {_seconds(s.bound)} if nothing were waited for" if waits else ""
    beside = (
        f"{_seconds(s.hidden)} of transfers to run beside {_seconds(s.arithmetic)} of products; "
        f"one after the other, a step takes {_seconds(s.in_turn)}"
    )
    memory = f"{c.memory.total / _GIB:.1f} of {plan.usable / _GIB:.1f} GiB on a device"
    memory += f", up to {c.memory.most / _GIB:.1f}" if c.memory.most > c.memory.total else ""
    told = [
        ("best", words(plan, c)),
        ("memory", memory),
        ("step", f"{_seconds(s.seconds)}{least}; longest {terms[0]}"),
        ("", "then " + " and ".join(terms[1:3])) if terms[1:] else None,
        ("counts on", beside) if s.hidden > _MUCH * s.arithmetic else None,
        ("MFU", f"at most {c.mfu_bound:.0%}{_reached(plan, c)}"),
    ]
    told.append(("code", compiling.code(c.roles, plan)))
    if plan.config:
        told += [
            ("command", f"shardwise train {compiling.flags(c.roles, plan)}"),
            ("", "with your text or tokens (--data.text, --data.tokens), --steps and --run"),
        ]
    return [f"  {name:11}{said}" for name, said in filter(None, told)]


def words(plan: Plan, c: Candidate) -> str:
    """A layout in words: each role's size, and where among the chips its devices are."""
    pairs = (zip(t.sent.roles, t.over, strict=True) for t in c.step.transfers)
    over = dict(pair for each in pairs for pair in each)
    told = [
        f"{'FSDP' if role == 'fsdp' else role} over {size}" + _where(over.get(role), plan.chips)
        for role, size in c.roles.sizes.items()
    ]
    told += [f"{c.roles.microbatches} microbatches"] if c.roles.microbatches > 1 else []
    if c.roles.remat:
        how = " but for products" * c.roles.products + " from the host" * c.roles.offload
        told.append("layers recomputed" + how)
    told += [f"the loss in {c.roles.loss_chunks} chunks"] if c.roles.loss_chunks > 1 else []
    return ", ".join(told or ["one device"])


def _where(way, chips):
    if way is None or way.across > 1:
        return f" ({way})" if way else ""
    if chips.chip.node:
        return " (within a node)" if chips.slices > 1 else ""
    sides = " × ".join("a chip" if side.on_chip else str(side.size) for side in way.sides)
    return f" ({sides} of the torus)" if sides else ""


class _Time(NamedTuple):
    """The seconds of one thing that a step does, and how it stands to the rest."""

    seconds: float
    what: str
    how: str
    more: str = ""


def _times(c: Candidate) -> list[_Time]:
    """What a step takes, but for transfers of a few numbers; as if nothing else ran beside it."""
    s, sent = c.step, []
    for t in (t for t in s.transfers if t.sent.kind not in ("loss", "counts")):
        over = f", {t.sent.bytes / _GB:.4g} GB over {' and '.join(map(str, t.over))}"
        how = "waited for" if t.sent.kind in WAITED else _BESIDE
        sent += [_Time(t.seconds, f"{t.sent.kind} along {' × '.join(t.sent.roles)}", how, over)]
    return [
        _Time(s.arithmetic, "arithmetic", "products, at the chip's peak"),
        _Time(s.weights, "reading weights", _BESIDE),
        *sent,
        _Time(2 * s.host, "to the host and back", _BESIDE),
        _Time(s.bubble * (s.seconds - s.update), "idle", "in the pipeline's bubble"),
        _Time(s.update, "the optimizer's update", "from memory and back"),
    ]


def _seconds(seconds):
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _reached(plan, c: Candidate):
    if not plan.config:
        return ""
    found = runs.reached(plan.chips.chip, bool(plan.config.experts))
    told = f"; published runs on {found.on} reached {found.low:.0%} to {found.high:.0%}"
    if found.low >= c.mfu:
        return told
    low, high = (c.flops / c.peak / share for share in (found.low, min(found.high, c.mfu)))
    return f"{told}, here {_seconds(high)} to {_seconds(low)} a step"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of aligned columns, of which layouts and what binds stand on the left."""
    return [f"  {line}" for line in counts.table(columns, rows, ("chips", "layout", "binds"))]


def explained(plan: Plan, c: Candidate) -> str:
    """Every term of a layout: what a device holds, and when; what a step does, sends and takes."""
    m, s, meant = c.memory, c.step, _OF_OWN if plan.own else _MEANT
    held = [(m.parameters, "parameters"), (m.state, "the optimizer's state"), (m.batch, "batch")]
    terms = list(zip(m.coefficients, m.terms, m.of_step, meant, strict=True))
    held += [(now, what) for *_, now, what in terms if now]
    lines = [f"{c.roles}, explained", "", "  GiB on a device, when it is fullest:"]
    lines += [f"  {n / _GIB:9.2f}  {what}" for n, what in held]
    lines += [f"  {m.total / _GIB:9.2f}  in all, of {plan.usable / _GIB:.2f}"]
    other = [(k * n, what) for k, n, now, what in terms if k * n and not now]
    lines += [f"  {n / _GIB:9.2f}  at another time: {what}" for n, what in other]
    lines += [f"  {m.most / _GIB:9.2f}  in all on a GPU, up to"] if m.most > m.total else []
    lines += [f"  {m.host / _GIB:9.2f}  on the host"] if m.host else []
    lines += ["", "  Seconds of a step:"]
    lines += [f"  {x.seconds:9.4g}  {x.what}: {x.how}{x.more}" for x in _times(c) if x.seconds]
    return "\n".join([*lines, f"  {s.seconds:9.4g}  in all"])


def why(plan: Plan, asked: Mapping[str, int]) -> str:
    """Why the layouts with these sizes of roles are not the best: seconds, memory, or a reason."""
    told = f"Why not {', '.join(f'{role}={size}' for role, size in asked.items())}? "
    groups = plan.best, plan.too_large, plan.refused
    fitting, large, refused = ([x for x in group if x.roles.has(asked)] for group in groups)
    if fitting:
        return told + _slower(plan.best[0], fitting[0])
    if large:
        least = min(large, key=lambda c: c.memory.most)
        of = {"device": "a device", "host": "its host"}[plan.lacking(least)[0]]
        return f"{told}It does not fit: {of} has too little memory.\n\n{explained(plan, least)}"
    if refused:
        first = min(refused, key=lambda x: len(x.roles.sizes.keys() - asked.keys()))
        return f"{told}It cannot be: {first.kind} ({first.reason})."
    return f"{told}There is no such division of {plan.chips.devices} devices."


def _slower(best, other):
    if other is best:
        return "It is the best."
    a, b = ({f"{x.what}, {x.how}": x.seconds for x in _times(c)} for c in (best, other))
    both = [(name, a.get(name, 0.0), b.get(name, 0.0)) for name in a | b]
    rows = sorted((x for x in both if x[1] != x[2]), key=lambda x: -abs(x[2] - x[1]))
    rows += [("a step", best.step.seconds, other.step.seconds)]
    rows += [("GiB on a device", best.memory.total / _GIB, other.memory.total / _GIB)]
    rows = [(name, f"{a:.4g}", f"{b:.4g}", f"{b - a:+.4g}") for name, a, b in rows]
    slower = other.step.seconds - best.step.seconds
    told = (
        f"{other.roles} takes {_seconds(other.step.seconds)}, {_seconds(slower)} more than the "
        f"best, {best.roles}. Seconds of each, as if alone, and GiB:"
    )
    return "\n".join([told, "", *table(("layout", "best", "this", "more"), rows)])


def _named(record, names):
    return {name: getattr(record, name) for name in names.split()}


def of_plan(plan: Plan, top: int) -> dict[str, Any]:
    """The best layouts as numbers, for `--json`: bytes, seconds and shares."""
    return {
        "chips": str(plan.chips),
        "devices": plan.chips.devices,
        **_named(plan, "batch sequence document"),
        "usable_bytes": plan.usable,
        "layouts": [_of_layout(plan, c) for c in plan.best[:top]],
        "left_out": {
            reason: {"count": count, "example": example}
            for reason, (count, example) in plan.why_not.items()
        },
        "notes": list(notes.of(plan, plan.best[:top])),
    }


def _of_roles(r):
    return {"roles": r.sizes, **_named(r, "microbatches remat offload products loss_chunks")}


def _of_layout(plan: Plan, c: Candidate):
    m, times = c.memory, "arithmetic waited hidden update host weights seconds in_turn bound"
    return {
        **_of_roles(c.roles),
        "code": compiling.code(c.roles, plan),
        "flags": compiling.flags(c.roles, plan) if plan.config else None,
        "bytes": _named(m, "parameters state batch") | m.of_step._asdict() | _named(m, "total"),
        "bytes_at_most": m.most,
        "bytes_on_host": m.host,
        "sent": [
            {"along": list(t.sent.roles)}
            | _named(t.sent, "kind bytes")
            | {"over": [*map(str, t.over)], "seconds": t.seconds}
            for t in c.step.transfers
        ],
        "seconds": _named(c.step, times),
        **_named(c.step, "bubble binds"),
        **_named(c, "mfu mfu_bound"),
    }


def of_check(found: compiling.Check) -> dict[str, Any]:
    """The compiler's numbers of one layout, beside those by formula."""
    c, fit = found.candidate, found.fit
    by_hand = [s.bytes for s in c.sent if s.roles != ("tensor",)]
    return {
        **_of_roles(c.roles),
        "fits": bool(fit),
        "bytes": fit.needed,
        "bytes_by_formula": c.memory.total,
        "bytes_at_most": c.memory.most,
        "memory": fit.memory and fit.memory._asdict(),
        "sent_by_hand_lowered": found.lowered,
        "sent_by_hand_by_formula": sum(by_hand),
        "sent": found.sent,
        "differences": {name: d._asdict() for name, d in found.differences.items()},
        "seconds": found.seconds,
    }
