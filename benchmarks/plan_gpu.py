"""The planner beside XLA's compiler for GPUs: memory and bytes sent of drawn programs.

`python benchmarks/plan_gpu.py` compiles whole training steps for GPUs that are not there (some ten
seconds each; what was compiled before is kept), fits the coefficients of the memory formula on
programs of made-up models, drawn by one seed, judges them by programs of published models' sizes,
drawn by another, and writes what the compiler said to benchmarks/plan_gpu.json and the table to
book/judged_gpus.md. With `--table` it compiles nothing. Needs the compiler:
`python -m shardwise.topology`.
"""

import argparse
import json
import pathlib
import sys

import plan
import plan_table
from plan_drawn import DRAWS, drawn

from shardwise import mesh
from shardwise.costs import memory

ROOT = pathlib.Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "plan_gpu.json"
PAGE = ROOT / "book" / "judged_gpus.md"
PAGE_TEXT = """# The planner on GPUs, judged

<!-- Written by `python benchmarks/plan_gpu.py`; edits are lost. -->

XLA's compiler for NVIDIA's GPUs runs without a GPU ({{doc}}`how </chapters/real_compiler>`). It
compiled whole training steps, {dates}, with {versions}.
Nothing ran on a GPU: this is the memory that the compiler reserves, as it is without a GPU on which
it could try kernels. Attention is computed in tiles by XLA, where a run might use a kernel of
cuDNN's; what NCCL and CUDA hold for themselves is not counted.

Six coefficients of the formula were fitted on {fitted_number} programs of made-up models, drawn by
the seed {fitted_seed}. What is judged are {judged_number} programs of published models' sizes, most
with fewer layers, on layouts and GPUs drawn by the seed {judged_seed}, which was committed before
the first of them was compiled. Which arrays of a layer this compiler works on at once was read from
programs of both sets, and that logits have the head's gradient beside them on TPUs alone, from
those of the last two.

{verdict_of_judged}

GiB on a device in all, exact parts included, and how far the formula is from the compiler: with +
it says too much.

{judged}

Then {held_number} more, of published decoders as their `config.json` has them, with tied
embeddings, biases, and norms elsewhere, drawn by the seed {held_seed} and committed before any was
compiled. One count had been added before, learnt from programs that nobody drew: of one row on a
device, not cut by tensor or context, the float32 copies in norms lie there a second time,
transposed. {verdict_of_held}

{held}

After that the loss was written anew, which left these programs half of the memory at a large
vocabulary, and of the formula its largest term. They were compiled again and the coefficients
fitted again (with the wide loss 37 of the {judged_number} and 23 of the {held_number} had been
within 10 %). So {again_number} more were drawn, by the seed {again_seed}. {verdict_of_again}

{again}

All of these recompute either nothing or all of a layer. Of {products_number} more, drawn by the
seed {products_seed}, each keeps what its weights were multiplied to. {verdict_of_products}

{products}

Last, {chunks_number} with the loss in as many chunks as the planner takes
({{doc}}`why </chapters/fitting>`), drawn by the seed {chunks_seed}. Nothing was fitted for them.
{verdict_of_chunks}

{chunks}

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


NAMES = ("fitted", "judged", "held", "again", "products", "chunks")
JUDGED = NAMES[1:]
CASES = {name: case for which in NAMES for name, case in drawn(which).items()}


def recorded() -> dict[str, dict]:
    """What the compiler said, by the names of `CASES`; of cases as they are."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return {n: s for n, s in record.items() if n in CASES and s["case"] == plan.told(CASES[n])}


def write(record: dict[str, dict]) -> None:
    """In the order of `CASES`."""
    told = (f"{json.dumps(n)}: {json.dumps(record[n])}" for n in CASES if n in record)
    RECORD.write_text("{\n" + ",\n".join(told) + "\n}\n")


def of_gpus(record: dict[str, dict]) -> memory.Terms:
    """The coefficients of XLA's compiler for GPUs."""
    known = {n: said for n, said in record.items() if n.startswith("fitted")}
    grids = {
        "layer": [i / 20 for i in range(12, 25)],
        "around": [i / 2 for i in range(14)],
        "logits": [i / 20 for i in range(18, 25)],
        "summed": [1 + i / 4 for i in range(5)],
    }
    return plan.fitted(CASES, known, memory.OF_GPUS, **grids)


def verdicts(record: dict[str, dict]) -> dict[str, plan_table.Verdict]:
    """By the name of each draw that is judged."""
    found = {n: plan.candidate(CASES[n]) for n in record}
    return {
        which: plan_table.verdict(
            CASES, plan_table.found_of(found, which), record, plan_table.DRAWN
        )
        for which in JUDGED
    }


def page(record: dict[str, dict]) -> str:
    """The book's page: what the record has, beside the formula as it is."""
    found = {n: plan.candidate(CASES[n]) for n in record}
    tables = {
        which: plan_table.memory_of(CASES, plan_table.found_of(found, which), record)
        for which in NAMES
    }
    return PAGE_TEXT.format(
        dates=plan_table.dates(record),
        versions=plan_table.versions(record),
        sent=_sent(record),
        **{f"verdict_of_{which}": " ".join(v.told) for which, v in verdicts(record).items()},
        **{f"{which}_seed": DRAWS[which].seed for which in NAMES},
        **{f"{which}_number": DRAWS[which].number for which in NAMES},
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
    print(f"fitted: {of_gpus(record)}\nthe planner's: {memory.OF_GPUS}")
    if record.keys() != CASES.keys():
        return 1
    PAGE.write_text(page(record))
    found = verdicts(record).values()
    print("\n".join(line for each in found for line in each.told))
    return int(not all(each.kept for each in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
