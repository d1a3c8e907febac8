"""The planner beside the TPU compiler: memory, and what became of each byte by formula.

`python benchmarks/plan.py` compiles whole training steps (15 s to 3 minutes each on two idle cores;
what was compiled before is kept), fits the coefficients of the memory formula that are no counts
on `plan_cases.FITTED`, and judges the formula by `plan_cases.JUDGED`, of other models, and by
programs drawn by a seed (`plan_drawn`). What the compiler said it writes to
src/shardwise/plan/judged.json, which a chapter reads too, and the table to book/judged.md. With
names it compiles these alone; with `--table` nothing, and writes the table by today's formula.
Needs libtpu: `pip install "shardwise[tpu]"`.
"""

import argparse
import dataclasses
import datetime
import functools
import itertools
import json
import pathlib
import sys
from collections.abc import Iterable, Mapping

import numpy as np
import plan_table
from plan_cases import FITTED, JUDGED, Case, candidate
from plan_cases import told as layout
from plan_drawn import drawn, wide

from shardwise import mesh, plan, topology
from shardwise.costs import memory, sent
from shardwise.costs.arrays import parts
from shardwise.plan import arrays, compiling
from shardwise.topology import child

TAUGHT = "tpu", "newer", "last", "fourth", "fifth", "sixth", "seventh"
ROOT = pathlib.Path(__file__).parents[1]
RECORD = ROOT / "src" / "shardwise" / "plan" / "judged.json"  # chapters read it, too
PAGE = ROOT / "book" / "judged.md"
CASES = {f"fitted: {n}": c for n, c in FITTED.items()} | wide() | JUDGED
CASES |= drawn("tpu") | drawn("newer") | drawn("last") | drawn("fourth")
CASES |= drawn("latent") | drawn("staged") | drawn("fifth") | drawn("sixth") | drawn("seventh")
CASES |= drawn("eighth")


def compiled(case: Case) -> dict:
    """What the compiler says of it, as it is recorded; bytes on a device.

    Raises:
      AssertionError: the program holds or sends by hand other bytes than the formula says.
    """
    chips, found = topology.chips(case.chips), candidate(case)
    whole = plan.Plan(case.config, chips, case.batch, case.sequence, (), (), ())
    check = compiling.check(found, whole)
    if case.roles.stage == 1 or case.roles.tensor == 1:
        by_hand = sent_by_hand(case)
        assert abs(check.lowered - by_hand) <= 1e-9 * by_hand, (case, check.lowered, by_hand)
    held = found.memory.parameters + found.memory.state + found.memory.batch
    if given := check.fit.memory and check.fit.memory.arguments:
        # Shares that fill no tile of the chip are padded: those of few numbers, 72 wide, or, where
        # fsdp cuts the width, 288 (of SmolLM2 135M, 4.7 % in all).
        wide = case.config.embed // case.roles.fsdp % 128 == 0
        most = max((0.02 if wide else 0.05) * held, 4e6)
        assert 0 <= given - held < most, (case, given, held)
    return {
        "case": told(case),
        "needed": check.fit.needed,
        "fits": bool(check.fit),
        "by_hand": check.lowered,
        "sent": check.sent,
        "differences": {name: [*d] for name, d in check.differences.items()},
        "seconds": round(check.seconds),
        "date": datetime.date.today().isoformat(),
        "versions": child.versions(chips.chip),
    }


def sent_by_hand(case: Case) -> float:
    """Bytes by formula of the stage that sends most, but along tensor, as they are written.

    Sums of gradients, and what goes around a ring, are written whole along tensor, where the
    compiler is to cut them. Not of stages beside tensor: there fsdp cuts other axes without it.
    """
    found, whole_kinds = [], ("gradients", "attention")
    for roles in (case.roles, dataclasses.replace(case.roles, tensor=1)):
        given = roles, case.config, arrays.of_decoder(case.config), case.batch, case.sequence
        found.append([sent.sent(part) for part in parts(*given)])
    return max(
        sum(s.bytes for s in cut if s.roles != ("tensor",) and s.kind not in whole_kinds)
        + sum(s.bytes for s in whole if s.kind in whole_kinds)
        for cut, whole in zip(*found, strict=True)
    )


def recorded() -> dict[str, dict]:
    """What the compiler said, by the names of `CASES`; of cases as they are."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return {n: s for n, s in record.items() if n in CASES and s.get("case") == told(CASES[n])}


def told(case: Case) -> str:
    """All that its memory depends on."""
    sizes = "vocab embed layers heads kv_heads head_dim mlp experts experts_per_token"
    more = "latent query_latent rope_dim value_dim dense_layers dense_mlp shared_experts"
    names = [*sizes.split(), *(more.split() if case.config.latent else ())]
    sizes = (f"{name} {getattr(case.config, name)}" for name in names)
    return (
        f"{', '.join(sizes)}; {case.batch} × {case.sequence} on {case.chips}, {layout(case.roles)}"
    )


def write(record: dict[str, dict]) -> None:
    """In the order of `CASES`, what is no longer one left out."""
    told = (f"{json.dumps(n)}: {json.dumps(record[n])}" for n in CASES if n in record)
    RECORD.write_text("{\n" + ",\n".join(told) + "\n}\n")


def fitted(
    cases: Mapping[str, Case], record: Mapping, start: memory.Terms, **grids: Iterable[float]
) -> memory.Terms:
    """The coefficients that are no counts, by least squares: those of `grids` of what all programs
    have, then of what only a context axis has, or experts.
    """
    found = {name: candidate(cases[name]).memory for name in record}
    mixed = [n for n in found if found[n].terms.dispatch]
    around = [n for n in found if found[n].terms.ring and n not in mixed]
    plain = [n for n in found if n not in mixed and n not in around]
    tenths = [i / 10 for i in range(16)]
    best = _best(found, record, plain, grids, start)
    best = _best(found, record, around, {"ring": tenths}, best)
    return _best(found, record, mixed, {"dispatch": tenths}, best)


def _best(found, record, names, grids, start):
    """Of all combinations of what the grids have, at once, that of the least squares."""
    tried = list(itertools.product(*grids.values()))
    c = start._replace(**dict(zip(grids, np.array(tried).T, strict=True)))
    squares = np.zeros(len(tried))
    for n in names:
        m = found[n]
        phases = (
            sum(getattr(c, name) * getattr(m.terms, name) for name in phase)
            for phase in memory.PHASES
        )
        step = functools.reduce(np.maximum, phases)
        squares += ((m.total - m.step + step) / record[n]["needed"] - 1) ** 2
    return start._replace(**dict(zip(grids, tried[np.argmin(squares)], strict=True)))


def of_tpus(record: Mapping) -> memory.Terms:
    """The coefficients of the TPUs' compiler, by what of the record is there to fit them: the small
    programs, and the draws that taught; that of wide heads by the chosen ones and DeepSeek's draw.
    """
    known = {n: said for n, said in record.items() if n.startswith(("fitted: ", *TAUGHT))}
    grids = {"layer": [i / 50 for i in range(51)], "around": [i / 2 for i in range(20)]}
    best = fitted(CASES, known, memory.COEFFICIENTS, **grids)
    wide = {
        n: candidate(CASES[n]).memory for n in record if n.startswith(("fitted, wide: ", "latent"))
    }
    return _best(wide, record, wide, {"heads": [i / 4 for i in range(25)]}, best)


def main(argv: list[str]) -> int:
    """0 if all that is judged keeps what `plan_table.verdict` asks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of cases; all by default")
    parser.add_argument("--table", action="store_true", help="compile nothing")
    asked = parser.parse_args(argv)
    mesh.look_for_no_tpu()  # of this machine: its absence would be told at length
    for name in [] if asked.table else asked.names or CASES:
        said = compiled(CASES[name])
        write(recorded() | {name: said})
        row = plan_table.row(name, CASES[name], candidate(CASES[name]), said)
        print(*row, sep="  ", flush=True)
    record = recorded()
    print(f"fitted: {of_tpus(record)}\nthe planner's: {memory.COEFFICIENTS}")
    if record.keys() != CASES.keys():
        return 1
    found = {name: candidate(case) for name, case in CASES.items()}
    PAGE.write_text(plan_table.page(CASES, found, record))
    verdicts = plan_table.verdicts(CASES, found, record)
    print("\n".join(line for verdict in verdicts.values() for line in verdict.told))
    return int(not all(verdict.kept for verdict in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
