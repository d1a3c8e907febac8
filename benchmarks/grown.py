"""A model grown until it does not fit, and what makes it fit, by the TPU compiler.

`python benchmarks/grown.py` compiles what the chapter `making_room` shows and does not wait for
(thirteen programs, some ten seconds to a minute each on an idle core; what was compiled is kept),
and writes what the compiler said to src/shardwise/topology/grown.json, which the chapter reads.
The programs are the chapter's own: its cells with the tag `recorded` are executed here.
Needs IPython, and libtpu: `pip install "shardwise[tpu]"`.
"""

import datetime
import json
import pathlib
import sys
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager

from shardwise import measure, topology
from shardwise.topology import child

ROOT = pathlib.Path(__file__).parents[1]
CHAPTER = ROOT / "chapters" / "making_room.ipynb"
RECORD = ROOT / "src" / "shardwise" / "topology" / "grown.json"


def chapter() -> dict[str, Any]:
    """What the chapter's cells with the tag `recorded` define."""
    names, python = {}, TransformerManager()  # of a cell whose %pip is for Colab alone
    for cell in json.loads(CHAPTER.read_text())["cells"]:
        if "recorded" in cell["metadata"].get("tags", ()):
            exec(python.transform_cell("".join(cell["source"])), names)
    return names


def wanted(page: dict[str, Any]) -> dict[str, tuple[str, int, dict[str, Any]]]:
    """{name: (chips, layers, keywords of the chapter's `asked`)}."""
    return page["programs"]


def said(page: dict[str, Any], chips: str, layers: int, how: dict[str, Any]) -> dict[str, Any]:
    """What the compiler says of one, as it is recorded; bytes, FLOPs and seconds of a device."""
    grid = topology.chips(chips).mesh(fsdp=-1)
    function, arguments = page["asked"](grid.abstract, layers, **how)
    found = {"chips": chips, "layers": layers}
    try:
        compiled = topology.compile(grid.lower(function, *arguments), grid)
        found |= _read(compiled, grid.chips.chip)
    except topology.DoesNotFit as refusal:
        found |= {"needed": refusal.needed, "fits": False}
    return found | {"date": datetime.date.today().isoformat(), "versions": child.versions()}


def _read(compiled, chip):
    fit, counted = measure.fits(compiled), measure.collectives(compiled)
    beside = measure.overlap(compiled, chip)
    sums = [b for b in beside.found if "gather" not in b.op.kind]
    longest = max(sums, key=lambda b: b.seconds)
    return {
        "needed": fit.needed,
        "fits": bool(fit),
        "sum": fit.memory.total,
        "arguments": fit.memory.arguments,
        "flops": measure.flops(compiled),
        "sent": counted.ring_bytes,
        "windowed": any("windowed" in op.notes for op in counted.ops),
        "beside": sum(b.times * b.op.ring_bytes for b in beside.found if b.products),
        "exposed": beside.exposed,
        "strategy": longest.op.strategy,
        "lanes": longest.lanes,
    }


def main() -> int:
    """Compile all, and write the record."""
    page = chapter()
    record = {name: said(page, *asked) for name, asked in wanted(page).items()}
    told = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in record.items())
    RECORD.write_text(f"{{\n{told}\n}}\n")
    for name, each in record.items():
        print(f"{name:22} {each['needed'] / 2**30:6.2f} GiB, {'fits' if each['fits'] else 'not'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
