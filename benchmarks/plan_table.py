"""What the compiler said of each case beside the formula: rows, a verdict, and the book's page."""

from collections.abc import Mapping
from typing import NamedTuple

from plan_cases import Case

from shardwise import plan, topology
from shardwise.plan.planning import usable

_GIB, _MB = 2**30, 1e6
_TARGET, _LIMIT, _SHARE = 0.15, 0.30, 0.8  # eight of ten within 15 %, all within 30
_NEAR = 1.2  # what is too large by under 20 %: of it at most one in five compiles
PAGE = """# The planner, judged

<!-- Written by `python benchmarks/plan.py`; edits are lost. -->

`shardwise plan` counts parameters and state, and what is sent, exactly; what a step needs besides
is a formula with a few fitted coefficients ({{ref}}`api-plan`). Here Google's TPU compiler compiles
whole training steps, and stands beside it: the coefficients were fitted on some models, and judged
on others, of other widths, heads, vocabularies and experts. (What there is to count, which arrays
are held when, was read from the compiler's reports on some of both; before the parts of the head's
products were counted, after two of those judged, 26 of 30 were within 15 %.) Nothing ran on a chip:
this is what the compiler reserves and writes. `python benchmarks/plan.py`, which anyone can run,
compiled it {dates}, with {versions}.

{verdict}

## Memory

GiB on a device, and how far the formula is from the compiler.

{memory}

The same for the models on which the coefficients were fitted.

{fitted}

## Bytes sent

MB that a device sends in a step, as a ring would count them: what is written by hand (in the
lowered program exactly what the formula says), with what the formula expects the compiler to insert
along the tensor axis; and what the compiled program sends more or less, each by its reason, as
{{ref}}`measure.differences <api-measure>` names them. {left}

{sent}
"""


class Verdict(NamedTuple):
    """Whether what is judged keeps what was asked, and in sentences how far."""

    kept: bool
    told: tuple[str, ...]


def row(name: str, case: Case, found: plan.Candidate, said: Mapping) -> tuple[str, ...]:
    """A line of the table of memory."""
    told = "" if said["fits"] else ", refused"
    needed, ours = said["needed"] / _GIB, found.memory.total / _GIB
    share = f"{_off(found, said):+.1%}"
    return name, f"{needed:.2f}{told}", f"{ours:.2f}", share, f"{case.roles}", case.chips


def _off(found, said):
    return found.memory.total / said["needed"] - 1


def _usable(case):
    return usable(topology.chips(case.chips))


def verdict(
    cases: Mapping[str, Case], found: Mapping[str, plan.Candidate], record: Mapping[str, Mapping]
) -> Verdict:
    """Of those judged: memory within 15 and 30 %, fitting and refused, and that no byte is left."""
    names = [n for n in found if not n.startswith("fitted: ")]
    errors = {n: abs(_off(found[n], record[n])) for n in names}
    worst = max(errors, key=lambda n: errors[n])
    near = sum(e <= _TARGET for e in errors.values())
    share = {n: found[n].memory.total / _usable(cases[n]) for n in names}
    wrong = [n for n in names if share[n] <= 1 and not record[n]["fits"]]
    over = [n for n in names if 1 < share[n] < _NEAR]
    compiles = [n for n in over if record[n]["fits"]]
    left = [n for n in record if "left over" in record[n]["differences"]]
    of = sum(not n.startswith("fitted: ") for n in cases)
    so_far = f"Of {of} programs {len(names)} are compiled so far. " if len(names) < of else ""
    told = (
        f"{so_far}{near} of {len(names)} are within 15 % of the compiler, and all within "
        f"{max(errors.values()):.0%}; the worst is “{worst}”.",
        f"Of {sum(x <= 1 for x in share.values())} that the formula calls fitting the compiler "
        f"refuses {len(wrong)}; of {len(over)} that it calls too large by under 20 %, "
        f"{len(compiles)} compile.",
    )
    kept = near >= _SHARE * len(names) and max(errors.values()) <= _LIMIT
    kept = kept and not wrong and not left and len(compiles) <= len(over) / 5
    return Verdict(kept, told)


def page(
    cases: Mapping[str, Case], found: Mapping[str, plan.Candidate], record: Mapping[str, Mapping]
) -> str:
    """The book's page: what the record has, beside the formula as it is."""
    rows = {n: row(n.removeprefix("fitted: "), cases[n], found[n], record[n]) for n in found}
    columns = ("program", "compiler", "formula", "off", "layout", "chips")
    first = [r for n, r in rows.items() if n.startswith("fitted: ")]
    second = [r for n, r in rows.items() if not n.startswith("fitted: ")]
    return PAGE.format(
        dates=_dates(record),
        versions=_versions(record),
        verdict=" ".join(verdict(cases, found, record).told),
        memory=_table(columns, second),
        fitted=_table(columns, first),
        left=_left(record),
        sent=_sent(record),
    )


def _left(record):
    names = [n for n, said in record.items() if "left over" in said["differences"]]
    return f"Left over, without a reason: {', '.join(names)}." if names else "Nothing is left over."


def _sent(record):
    """Columns of the reasons that occur, each what is sent more, or less, for it."""
    known = {n: s["differences"] for n, s in record.items() if s["differences"]}
    reasons = dict.fromkeys(r for d in known.values() for r in d)
    shown = [r for r in reasons if any(r in d and d[r][2] != d[r][1] for d in known.values())]
    rows = []
    for name, became in known.items():
        more = [became[r][2] - became[r][1] if r in became else 0 for r in shown]
        total = sum(d[1] for d in became.values())
        told = [_megabytes(x) for x in more]
        rows.append((name, f"{total / _MB:,.1f}", *told))
    return _table(("program", "formula", *shown), rows)


def _megabytes(size):
    if abs(size) < 0.05 * _MB:
        return "< 0.1" if size else ""
    return f"{size / _MB:+,.1f}"


def _table(columns, rows):
    lines = [columns, ["---", *["---"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _dates(record):
    days = sorted({said["date"] for said in record.values()})
    return f"on {days[0]}" if len(days) == 1 else f"from {days[0]} to {days[-1]}"


def _versions(record):
    found = {tuple(sorted(said["versions"].items())) for said in record.values()}
    told = [", ".join(f"{name} {version}" for name, version in each) for each in sorted(found)]
    return "; ".join(told)
