"""The benchmark of layouts runs: one small row, beside what a user would pick instead."""

import dataclasses
import importlib
import pathlib
import re
import sys
import types

import pytest
from sampling import IN_FULL

from shardwise.measure.memory import DeviceBytes

ROOM = pathlib.Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    """Of `benchmarks/layouts.py` the module, on a decoder of two layers and short rows."""
    monkeypatch.syspath_prepend(ROOM)
    decoders = importlib.import_module("decoders")
    small = dataclasses.replace(decoders.DENSE, embed=16, layers=2, heads=2, kv_heads=2, mlp=32)
    decoders.DENSE, decoders.LENGTH = small, 8
    yield importlib.import_module("layouts")
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(ROOM)):
            del sys.modules[name]


@pytest.mark.slow
def test_a_row_equals_one_device_and_sends_what_its_formula_says(benchmark, capsys):
    assert benchmark.compare(["data"], 1) == []
    printed = capsys.readouterr().out
    for told in ("one device", "rules, constrained", "/0.", "1.00"):
        assert told in printed


@pytest.mark.slow
@pytest.mark.skipif(not IN_FULL, reason="a long compilation: make stacks runs it")
def test_a_row_with_experts_in_stages_sends_what_its_formula_says(benchmark, capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "others", lambda names: [])
    assert benchmark.compare(["stage, fsdp, expert by hand"], 0) == []
    row = capsys.readouterr().out.splitlines()[-1]
    pairs = re.findall(r"([a-z×]+) ([\d.]+)/([\d.]+)", row)
    assert {name for name, *_ in pairs} == {"fsdp", "stage", "expert", "fsdp×expert"}
    assert all(float(sent) == float(asked) for _, sent, asked in pairs)
    assert sum(float(sent) > 0 for _, sent, _ in pairs) == 3  # the fourth are a few numbers


def test_what_sends_or_holds_too_much_is_told(benchmark):
    layout = benchmark.layouts.LAYOUTS["hybrid"](8)

    def row(name, sent, limit, temporaries, arguments=5, strategy=""):
        memory = DeviceBytes(arguments, 0, 0, temporaries)
        sent = {("fsdp",): sent}
        told = dict(layout=layout, strategy=strategy, limit=limit, memory=memory, sent=sent)
        return types.SimpleNamespace(name=name, **told)

    best, right = row("best", 99, None, 10), row("right", 8, {("fsdp",): 8}, 12)
    wrong = row("wrong", 9, {("fsdp",): 8}, 13)
    other = row("other", 0, None, 1, strategy="ZeRO 1")  # not to be compared with
    rows = [best, right, wrong, other]
    assert not [told for fine in (best, right) for told in benchmark.misses(fine, rows)]
    sends, holds = benchmark.misses(wrong, rows)
    assert "wrong sends 9 along ('fsdp',), and its formula says 8" in sends
    assert "wrong holds 1.30 of the temporaries of best" in holds
    more = row("more", 8, {("fsdp",): 8}, 10, arguments=8)  # what others gather, it keeps
    (holds,) = benchmark.misses(more, [*rows, more])
    assert "more holds 1.30 of the temporaries of best" in holds
