"""The planner's memory as judged by the TPU compiler: the cases, and what is said of them."""

import dataclasses
import importlib
import importlib.resources
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest

from shardwise import topology
from shardwise.costs import memory
from shardwise.plan import roles

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def benchmark():
    """The module `benchmarks/plan.py`."""
    yield from imported("plan")


@pytest.fixture(scope="module")
def on_gpus(benchmark):
    """The module `benchmarks/plan_gpu.py`."""
    yield from imported("plan_gpu")


def imported(name):
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(ROOT / "benchmarks")
        # To draw programs takes two hundred models' shapes, and no value.
        zeros = lambda key, shape, dtype, *limits: jnp.zeros(shape, dtype)  # noqa: E731
        patched.setattr(jax.random, "uniform", zeros)
        yield importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]


def whole(config):
    """A model's sizes, however many layers it has."""
    return dataclasses.replace(config, layers=1)


@pytest.mark.slow
def test_those_judged_are_many_of_all_kinds_and_of_other_models(benchmark):
    fitted = benchmark.FITTED.values()
    judged = [c for n, c in benchmark.JUDGED.items() if n != "llama3-8b, products"]
    drawn = [
        c for n, c in benchmark.CASES.items() if n.startswith(("tpu", "newer", "last", "fourth"))
    ]
    assert not {whole(case.config) for case in judged} & {whole(case.config) for case in fitted}
    devices = {topology.chips(case.chips).devices for case in (*judged, *drawn)}
    assert {8, 192} <= devices and {case.chips.partition(":")[0] for case in drawn} >= {
        "v5e",
        "v5p",
        "v6e",
    }
    used = {role for case in (*judged, *drawn) for role in case.roles.sizes}
    assert used == {*roles.ORDER} and len(drawn) >= 55
    assert any(case.sequence == 32_768 for case in drawn)
    assert max(case.config.vocab for case in drawn) > 250_000
    for trait in (
        lambda case: case.roles.remat,
        lambda case: case.roles.offload,
        lambda case: case.roles.microbatches > 1,
        lambda case: case.config.experts,
    ):
        assert 0 < sum(map(bool, map(trait, (*judged, *drawn)))) < len(judged) + len(drawn)


def test_each_case_can_be(benchmark):
    for name, case in benchmark.CASES.items():
        given = case.config, topology.chips(case.chips)
        assert not roles.refusal(case.roles, *given, case.batch, case.sequence), name


def test_the_page_is_what_the_record_and_the_formula_say(benchmark):
    """Who changes the formula runs `python benchmarks/plan.py --table`."""
    record = benchmark.recorded()
    found = {n: benchmark.candidate(c) for n, c in benchmark.CASES.items() if n in record}
    page = benchmark.plan_table.page(benchmark.CASES, found, record)
    assert benchmark.PAGE.read_text() == page
    assert found.keys() == record.keys()


def test_the_record_of_the_package_is_whole(benchmark):
    """A chapter reads it where only the package is installed."""
    record = importlib.resources.files("shardwise.plan") / "judged.json"
    assert benchmark.RECORD == record and benchmark.recorded() == json.loads(record.read_text())
    assert benchmark.recorded().keys() == benchmark.CASES.keys()


def test_the_formula_keeps_what_was_asked(benchmark):
    record = benchmark.recorded()
    found = {n: benchmark.candidate(c) for n, c in benchmark.CASES.items() if n in record}
    for verdict in benchmark.plan_table.verdicts(benchmark.CASES, found, record).values():
        assert verdict.kept, verdict.told


def test_the_coefficients_are_those_of_the_fit(benchmark):
    ours = benchmark.of_tpus(benchmark.recorded())
    assert tuple(ours) == pytest.approx(tuple(memory.COEFFICIENTS))


def doctored(benchmark, **changes):
    """The verdict on ten cases, all of them right but for what `changes` says of the first."""
    names = [n for n in benchmark.CASES if n.startswith("fitted")][:10]
    found = {name: benchmark.candidate(benchmark.CASES[name]) for name in names}
    record = {}
    for name in names:
        size = found[name].memory.total
        fits = size <= benchmark.plan_table._usable(benchmark.CASES[name])
        record[name] = {"needed": size, "fits": fits, "differences": {}}
    for key, change in changes.items():
        record[names[0]][key] = change(record[names[0]][key])
    table = benchmark.plan_table
    return table.verdict(benchmark.CASES, found, record, table.CHOSEN)


def test_a_verdict_finds_each_fault(benchmark):
    assert doctored(benchmark).kept
    assert doctored(benchmark, needed=lambda x: x * 1.2).kept  # one of ten, within 20 %
    assert not doctored(benchmark, needed=lambda x: x * 1.7).kept
    assert not doctored(benchmark, fits=lambda fits: False).kept
    assert not doctored(benchmark, differences=lambda _: {"left over": [0, 1.0, 0]}).kept


def test_the_fit_finds_coefficients_again(benchmark):
    """Of made-up programs, whose sizes are those of coefficients on the grid."""
    made = memory.COEFFICIENTS._replace(layer=0.6, around=3, ring=0.4, dispatch=1.2)
    made = made._replace(heads=5.0)
    record = {}
    for name in benchmark.CASES:
        held = benchmark.candidate(benchmark.CASES[name]).memory
        record[name] = {"needed": dataclasses.replace(held, coefficients=made).total}
    assert tuple(benchmark.of_tpus(record)) == pytest.approx(tuple(made))


def test_gpus_of_a_draw_are_as_the_page_says(benchmark):
    """As the whole page, in fewer programs, with all kept and computed again."""
    record = json.loads((ROOT / "benchmarks" / "plan_gpu.json").read_text())
    cases = benchmark.drawn("again")
    found = {n: benchmark.candidate(c) for n, c in cases.items()}
    table = benchmark.plan_table.memory_of(cases, found, record)
    verdict = benchmark.plan_table.verdict(cases, found, record, benchmark.plan_table.DRAWN)
    page = (ROOT / "book" / "judged_gpus.md").read_text()
    assert verdict.kept and table in page and " ".join(verdict.told) in page


def test_on_a_real_gpu_memory_is_within_what_must_fit(benchmark):
    """Of programs that ran; who changes the formula runs `python benchmarks/gpu.py --table`."""
    gpu = importlib.import_module("gpu")
    record = gpu.recorded()
    here = {n: said for n, said in record.items() if n.endswith("; cudnn")}
    assert len(here) >= 5
    for name, said in here.items():
        found = gpu.planned(gpu.CASES[name]).memory
        assert said["peak"] == pytest.approx(said["needed"], rel=0.01)
        assert found.total <= found.most and 1 < found.most / said["needed"] < 1.1, name
    vocabulary = gpu.planned(gpu.CASES["Qwen 3 0.6B; cudnn"]).memory
    assert vocabulary.total < 0.8 * here["Qwen 3 0.6B; cudnn"]["needed"]  # why there is a `most`
    assert gpu.PAGE.read_text() == gpu.page(record)


@pytest.mark.slow
def test_gpus_are_judged_by_programs_of_published_sizes(on_gpus):
    """Who changes the formula runs `python benchmarks/plan_gpu.py --table`."""
    record = on_gpus.recorded()
    assert record.keys() == on_gpus.CASES.keys()
    judged = {n: c for n, c in on_gpus.CASES.items() if n.startswith("judged")}
    held = {n: c for n, c in on_gpus.CASES.items() if n.startswith("held")}
    assert len(held) >= 24 and {c.config.norms for c in held.values()} == {"before", "both"}
    assert any(c.config.tied for c in held.values())
    assert len(judged) >= 40 and max(c.config.vocab for c in judged.values()) >= 250_000
    widths = {c.config.head_dim for c in judged.values()}
    nodes = {topology.chips(c.chips).slices for c in judged.values()}
    assert widths & {96, 256} and nodes & {3, 6} and max(nodes) > 8
    assert on_gpus.PAGE.read_text() == on_gpus.page(record)
    for verdict in on_gpus.verdicts(record).values():
        assert verdict.kept, verdict.told
    assert tuple(on_gpus.of_gpus(record)) == pytest.approx(tuple(memory.OF_GPUS))
