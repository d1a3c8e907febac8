"""A plan as text: the best layout in words, all of them as a table, one explained by its terms,
and why others lose.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shardwise.measure import counts
from shardwise.plan import compiling, published
from shardwise.plan.memory import Terms
from shardwise.plan.planning import Candidate, Plan
from shardwise.plan.seconds import WAITED, Transfer

_GIB, _GB = 2**30, 1e9
_MUCH = 0.5  # of what products take: transfers beside them that a reader is told of
_BESIDE = "beside products"
_EXACT = "Parameters and state are exact; the rest of a device's memory is "
_ROOFLINE = (
    "Seconds are a roofline: products at the chip's peak; they wait for activations and tokens, "
    "and all else is sent beside them. At most: nothing waits. Norms, softmax, starts of kernels, "
    "the latency of collectives and devices that lag are left out. MFU counts "
)
NOTES = (
    f"{_EXACT}a formula, fitted to the chips' compiler. Scores of attention are never kept.",
    f"{_ROOFLINE}the half of attention that a causal mask lets through.",
)
NOTES_OF_OWN = (
    f"{_EXACT}what JAX keeps for the backward pass, less what follows from the rest entry by "
    "entry, and the largest gradient, or a rematerialised layer's.",
    f"{_ROOFLINE}three times the forward pass, or both passes where that is less.",
)
NOTE_OF_HOST = "With offload, what enters layers waits on the host between the passes."
NOTE_OF_GPUS = (
    "Of a GPU's memory a program has what JAX takes when it starts: three quarters, or the share "
    "that XLA_CLIENT_MEM_FRACTION says. NCCL and CUDA need theirs beside it."
)
# What each term of `memory.Terms` is, in a few words.
_MEANT = Terms(
    gradients="gradients of the device's shares",
    weights="weights gathered, or cast, for use",
    kept="activations, kept from forward to backward",
    layer="the backward pass of one layer",
    around="activations whole, around tensor's products",
    logits="logits, or the head's gradient",
    ring="keys and values on their way round context",
    dispatch="rows on their way to experts and back",
    summed="gradients summed over microbatches",
    pending="of a pipeline: what the weights' gradients wait for",
    task="of a pipeline: what a task has just computed",
)

_MEANT_OF_OWN = _MEANT._replace(logits="the gradient of the largest array that is kept")


def text(plan: Plan, top: int) -> str:
    """The best layout in words, the `top` best as a table, and what was left out."""
    best = plan.best[:top]
    of_tokens = f" of {plan.sequence:,} tokens" if plan.sequence else ""
    title = (
        f"{plan.batch:,} rows{of_tokens} on {plan.chips}, {plan.chips.devices} devices of "
        f"{plan.usable / _GIB:.1f} GiB: {len(plan.fitting):,} layouts fit, in "
        f"{len(plan.best):,} divisions."
    )
    lines = [title, "", *(_summary(plan, best[0]) if best else ["Nothing fits."])]
    rows = []
    for i, c in enumerate(best, 1):
        s, gib = c.step, f"{c.memory.total / _GIB:.2f}"
        shares = f"{s.seconds:.4g}", f"{c.mfu:.1%}", f"{c.mfu_bound:.1%}"
        rows.append((str(i), str(c.roles), gib, f"{s.waited:.3g}", *shares, s.binds))
    columns = ("", "layout", "GiB", "waits s", "step s", "MFU", "at most", "binds")
    lines += ["", *table(columns, rows)] if rows else []
    lines += ["", "Left out:"]
    for why, (count, example) in plan.why_not.items():
        lines.append(f"  {count:6,}  {why}; such as {example}")
    return "\n".join([*lines, "", *notes(plan, best)])


def notes(plan: Plan, shown: Iterable[Candidate]) -> tuple[str, ...]:
    """What has to be known of the numbers of a plan."""
    told = NOTES_OF_OWN if plan.own else NOTES
    told += (NOTE_OF_GPUS,) if plan.chips.chip.node else ()
    return (*told, NOTE_OF_HOST) if any(c.roles.offload for c in shown) else told


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
    told = [
        ("best", words(plan, c)),
        ("memory", f"{c.memory.total / _GIB:.1f} of {plan.usable / _GIB:.1f} GiB on a device"),
        ("step", f"{_seconds(s.seconds)}{least}; longest {terms[0]}"),
        ("", "then " + " and ".join(terms[1:3])) if terms[1:] else None,
        ("counts on", beside) if s.hidden > _MUCH * s.arithmetic else None,
        ("MFU", f"at most {c.mfu_bound:.0%}{_reached(plan, c)}"),
    ]
    if plan.config:
        told += [
            ("code", compiling.code(c.roles, plan)),
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
    return ", ".join(told or ["one device"])


def _where(way, chips):
    if way is None:
        return ""
    if way.across > 1:
        return f" ({way})"
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
    s = c.step
    return [
        _Time(s.arithmetic, "arithmetic", "products, at the chip's peak"),
        _Time(s.weights, "reading weights", _BESIDE),
        *(_of_transfer(t) for t in s.transfers if t.sent.kind not in ("loss", "counts")),
        _Time(2 * s.host, "to the host and back", _BESIDE),
        _Time(s.bubble * (s.seconds - s.update), "idle", "in the pipeline's bubble"),
        _Time(s.update, "the optimizer's update", "from memory and back"),
    ]


def _of_transfer(t: Transfer):
    over = f", {t.sent.bytes / _GB:.4g} GB over {' and '.join(map(str, t.over))}"
    what = f"{t.sent.kind} along {' × '.join(t.sent.roles)}"
    return _Time(t.seconds, what, "waited for" if t.sent.kind in WAITED else _BESIDE, over)


def _seconds(seconds):
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _reached(plan, c: Candidate):
    if not plan.config:
        return ""
    found = published.reached(plan.chips.chip, bool(plan.config.experts))
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
    m, s, meant = c.memory, c.step, _MEANT_OF_OWN if plan.own else _MEANT
    held = [(m.parameters, "parameters"), (m.state, "the optimizer's state"), (m.batch, "batch")]
    every = [c * n for c, n in zip(m.coefficients, m.terms, strict=True)]
    terms = list(zip(every, m.of_step, meant, strict=True))
    held += [(now, what) for _, now, what in terms if now]
    lines = [f"{c.roles}, explained", "", "  GiB on a device, when it is fullest:"]
    lines += [f"  {n / _GIB:9.2f}  {what}" for n, what in held]
    lines += [f"  {m.total / _GIB:9.2f}  in all, of {plan.usable / _GIB:.2f}"]
    other = [(n, what) for n, now, what in terms if n and not now]
    lines += [f"  {n / _GIB:9.2f}  at another time: {what}" for n, what in other]
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
        least = min(large, key=lambda c: c.memory.total)
        of = "a device" if least.memory.total > plan.usable else "its host"
        return f"{told}It does not fit: {of} has too little memory.\n\n{explained(plan, least)}"
    if refused:
        first = min(refused, key=lambda x: len(x.roles.sizes.keys() - asked.keys()))
        return f"{told}It cannot be: {first.kind} ({first.reason})."
    return f"{told}There is no such division of {plan.chips.devices} devices."


def _slower(best, other):
    if other is best:
        return "It is the best."
    pair = [{f"{x.what}, {x.how}": x.seconds for x in _times(c)} for c in (best, other)]
    ours = {name: [each.get(name, 0.0) for each in pair] for name in pair[0] | pair[1]}
    ranked = sorted(ours.items(), key=lambda x: -abs(x[1][1] - x[1][0]))
    ranked = [(name, x) for name, x in ranked if x[0] != x[1]]
    last = [("a step", [best.step.seconds, other.step.seconds])]
    last += [("GiB on a device", [c.memory.total / _GIB for c in (best, other)])]
    rows = [(name, f"{a:.4g}", f"{b:.4g}", f"{b - a:+.4g}") for name, (a, b) in ranked + last]
    slower = other.step.seconds - best.step.seconds
    told = (
        f"{other.roles} takes {_seconds(other.step.seconds)}, {_seconds(slower)} more than the "
        f"best, {best.roles}. Seconds of each, as if alone, and GiB:"
    )
    return "\n".join([told, "", *table(("layout", "best", "this", "more"), rows)])
