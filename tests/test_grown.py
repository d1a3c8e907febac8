"""What the TPU compiler said of the chapter `making_room`'s larger programs, beside its cells."""

import importlib.resources
import json
import math
import pathlib

import pytest

pytest.importorskip("IPython", reason="the chapter's cells are executed")
ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def benchmark(monkeypatch):
    """The module `benchmarks/grown.py`."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("grown")


def test_the_record_has_what_the_chapters_cells_ask_for(benchmark):
    page = benchmark.chapter()
    record = json.loads(
        (importlib.resources.files("shardwise.topology") / "grown.json").read_text()
    )
    assert benchmark.RECORD == importlib.resources.files("shardwise.topology") / "grown.json"
    wanted = benchmark.wanted(page)
    assert record.keys() == wanted.keys()
    for name, (chips, layers, how) in wanted.items():
        told = record[name]
        assert (told["chips"], told["layers"]) == (chips, layers)
        grid = benchmark.topology.chips(chips).mesh(fsdp=-1)
        _, (params, momentum, rows) = page["asked"](grid.abstract, layers, **how)
        parts = [
            x.sharding.shard_shape(x.shape) for x in [*params.values(), *momentum.values(), rows]
        ]
        assert not told["fits"] or told["arguments"] == 4 * sum(map(math.prod, parts))
