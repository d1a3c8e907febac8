"""The planner beside XLA's compiler for GPUs: memory and bytes sent of drawn programs.

`python benchmarks/plan_gpu.py` compiles whole training steps for GPUs that are not there (some ten
seconds each; what was compiled before is kept), fits the coefficients of the memory formula on
programs of made-up models, drawn by one seed, judges them by programs of published models' sizes,
drawn by another, and writes what the compiler said to benchmarks/plan_gpu.json and the table to
book/judged_gpus.md. With `--table` it compiles nothing. Needs the compiler:
`python -m shardwise.topology`.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import random
import sys

import jax.numpy as jnp
import plan
import plan_table
from plan_cases import Case

from shardwise import mesh, model, topology
from shardwise.plan import configs, memory, roles

ROOT = pathlib.Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "plan_gpu.json"
PAGE = ROOT / "book" / "judged_gpus.md"
DECODERS = ROOT / "tests" / "decoders.json"
PAGE_TEXT = """# The planner on GPUs, judged

<!-- Written by `python benchmarks/plan_gpu.py`; edits are lost. -->

XLA's compiler for NVIDIA's GPUs runs without a GPU ({{doc}}`how </chapters/real_compiler>`). It
compiled whole training steps, {dates}, with {versions}.
Nothing ran on a GPU: this is the memory that the compiler reserves, as it is without a GPU on which
it could try kernels. Attention is computed in tiles by XLA, where a run might use a kernel of
cuDNN's; what NCCL and CUDA hold for themselves is not counted.

Five coefficients of the formula were fitted on {fitted_number} programs of made-up models, drawn by
the seed {fitted_seed}. What is judged are {judged_number} programs of published models' sizes, most
with fewer layers, on layouts and GPUs drawn by the seed {judged_seed}, which was committed before
the first of them was compiled.

{verdict}

GiB on a device in all, exact parts included, and how far the formula is from the compiler: with +
it says too much.

{judged}

Then {held_number} more, of published decoders as their `config.json` has them, with tied
embeddings, biases, and norms elsewhere, drawn by the seed {held_seed} and committed before any was
compiled. One count had been added before, learnt from programs that nobody drew: of one row on a
device, the float32 copies in norms lie there a second time, transposed. {verdict_of_held}

{held}

The same for the models on which the coefficients were fitted.

{fitted}

## Bytes sent

What the compiled programs send, over the formula's bytes. Of programs that are more than a GPU
holds it was not recorded.

{sent}

Scatters stay scatters, and bfloat16 stays bfloat16. Of a ring over a context axis the compiler
leaves out hops whose values it has, and narrows the last one of the gradients. Along a tensor axis
the formula is Megatron's, and of experts what the TPUs' compiler inserts; this one inserts more of
some, most of all beside experts.
"""


CASES = {name: case for which in SEEDS for name, case in drawn(which).items()}


def recorded() -> dict[str, dict]:
    """What the compiler said, by the names of `CASES`; of cases as they are."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return {n: s for n, s in record.items() if n in CASES and s["case"] == plan.told(CASES[n])}


def write(record: dict[str, dict]) -> None:
    """In the order of `CASES`."""
    told = (f"{json.dumps(n)}: {json.dumps(record[n])}" for n in CASES if n in record)
    RECORD.write_text("{\n" + ",\n".join(told) + "\n}\n")


def fitted(record: dict[str, dict]) -> memory.Terms:
    """The coefficients, by least squares: of what all programs have, of a context, of experts."""
    found = {n: plan.candidate(CASES[n]).memory for n in record if n.startswith("fitted")}

    def best(names, terms, tried, start):
        def squares(c):
            ours = {n: sum(memory.counted(found[n].terms, c)) for n in names}
            held = {n: found[n].total - found[n].step for n in names}
            off = ((held[n] + ours[n]) / record[n]["needed"] - 1 for n in names)
            return sum(x**2 for x in off)

        options = [start._replace(**dict(zip(terms, values, strict=True))) for values in tried]
        return min(options, key=squares)

    mixed = [n for n in found if found[n].terms.dispatch]
    around = [n for n in found if found[n].terms.ring and n not in mixed]
    plain = [n for n in found if n not in mixed and n not in around]
    grid = (
        [i / 20 for i in range(12, 25)],
        [i / 2 for i in range(14)],
        [i / 20 for i in range(18, 25)],
    )
    tenths = [(i / 10,) for i in range(16)]
    start = best(plain, ("layer", "around", "logits"), itertools.product(*grid), memory.OF_GPUS)
    start = best(around, ("ring",), tenths, start)
    return best(mixed, ("dispatch",), tenths, start)


def verdict(record: dict[str, dict], which: str = "judged") -> plan_table.Verdict:
    """Of those judged: eight of ten within 10 %, all within 15, none called fitting that is not."""
    names = [n for n in record if n.startswith(which)]
    off = {n: plan.candidate(CASES[n]).memory.total / record[n]["needed"] - 1 for n in names}
    worst = max(off, key=lambda n: abs(off[n]))
    near, most = sum(abs(x) <= 0.1 for x in off.values()), abs(off[worst])
    low = [n for n in names if not record[n]["fits"] and _fits(n)]
    told = (
        f"{near} of {len(names)} are within 10 % of the compiler, and all within {100 * most:.1f} "
        f"%; the worst is “{worst}”. What the formula calls fitting and is more than JAX takes of "
        f"a GPU's memory: {', '.join(low) or 'none'}.",
    )
    return plan_table.Verdict(near >= 0.8 * len(names) and most <= 0.15 and not low, told)


def _fits(name):
    return plan.candidate(CASES[name]).memory.total <= topology.chips(CASES[name].chips).usable_hbm


def page(record: dict[str, dict]) -> str:
    """The book's page: what the record has, beside the formula as it is."""
    columns = ("program", "compiler", "formula", "off", "layout", "GPUs")
    tables = {
        which: plan_table.table(
            columns,
            [
                plan_table.row(
                    n.removeprefix(f"{which} "), CASES[n], plan.candidate(CASES[n]), said
                )
                for n, said in record.items()
                if n.startswith(which)
            ],
        )
        for which in SEEDS
    }
    return PAGE_TEXT.format(
        dates=plan_table.dates(record),
        versions=plan_table.versions(record),
        verdict=" ".join(verdict(record).told),
        verdict_of_held=" ".join(verdict(record, "held").told),
        sent=_sent(record),
        **{
            f"{which}_{k}": v
            for k, d in (("seed", SEEDS), ("number", NUMBER))
            for which, v in d.items()
        },
        **tables,
    )


def _sent(record):
    """Bytes that the compiled programs send over those by formula, by the axes there are."""
    groups = {
        "neither tensor nor context": lambda r: r.tensor == r.context == 1,
        "context": lambda r: r.context > r.tensor == 1,
        "tensor": lambda r: r.tensor > 1,
    }
    rows = []
    for told, belongs in groups.items():
        shares = [
            sum(said["sent"].values()) / sum(x.bytes for x in plan.candidate(CASES[n]).sent)
            for n, said in record.items()
            if said["sent"] and belongs(CASES[n].roles)
        ]
        rows.append((told, str(len(shares)), f"{min(shares):.3f} to {max(shares):.3f}"))
    return plan_table.table(("axes", "programs", "sent, over the formula"), rows)


def main(argv: list[str]) -> int:
    """0 if all that is judged keeps what `verdict` asks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="compile nothing")
    asked = parser.parse_args(argv)
    mesh.look_for_no_tpu()
    for name in CASES:
        if not asked.table and name not in recorded():
            said = plan.compiled(CASES[name])
            write(recorded() | {name: said})
            print(*plan_table.row(name, CASES[name], plan.candidate(CASES[name]), said), flush=True)
    record = recorded()
    print(f"fitted: {fitted(record)}\nthe planner's: {memory.OF_GPUS}")
    PAGE.write_text(page(record))
    found = [verdict(record, which) for which in ("judged", "held")]
    print("\n".join(line for each in found for line in each.told))
    return int(not all(each.kept for each in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
