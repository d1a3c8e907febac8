"""`shardwise plan`: what it prints, and what it says of flags that are wrong."""

import dataclasses
import importlib.util
import json
import math
import os
import shlex
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from sampling import IN_FULL

from shardwise import __main__ as command
from shardwise import context, layouts, mesh, model, plan, topology
from shardwise.measure.differences import Difference, Differences
from shardwise.measure.memory import Fit
from shardwise.plan import (
    arrays,
    compiling,
    planning,
    roles,
    runs,
    tables,
)
from shardwise.plan.command import Fewest, survey
from shardwise.run import settings
from shardwise.topology.slices import usual
from shardwise.train import Optimizer

ARGUMENTS = ["plan", "--model", "llama3-8b", "--chips", "v5e:4x4", "--batch", "64"]
ARGUMENTS += ["--sequence", "4096"]


def test_json_is_all_that_stands_on_stdout(capsys):
    assert command.main([*ARGUMENTS, "--json", "--top", "3"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = plan.plan("llama3-8b", "v5e:4x4", 64, 4096)
    assert [x["roles"] for x in told["layouts"]] == [c.roles.sizes for c in found.best[:3]]
    for one, c in zip(told["layouts"], found.best, strict=False):
        parts = one["bytes"]
        assert parts.pop("total") == c.memory.total == sum(parts.values())
        assert parts["parameters"] == c.memory.parameters and one["mfu"] == c.mfu
        assert (one["offload"], one["bytes_on_host"]) == (c.roles.offload, c.memory.host)
        assert {tuple(s["along"]): s["bytes"] for s in one["sent"] if s["kind"] == "weights"} == {
            s.roles: s.bytes for s in c.sent if s.kind == "weights"
        }
    assert {why: x["count"] for why, x in told["left_out"].items()} == {
        why: count for why, (count, _) in found.why_not.items()
    }
    assert (told["devices"], told["usable_bytes"]) == (16, topology.CHIPS["v5e"].usable_hbm)


def test_the_first_screen_says_the_best_in_words_then_all_as_a_table(capsys):
    assert command.main([*ARGUMENTS, "--top", "2"]) == 0
    out = capsys.readouterr().out
    found = plan.plan("llama3-8b", "v5e:4x4", 64, 4096)
    best, low = found.best[0], runs.reached(found.chips.chip).low
    assert f"best       {tables.words(found, best)}\n" in out and "FSDP over" in out
    assert f"{best.memory.total / 2**30:.1f} of 15.8 GiB" in out and best.step.binds in out
    assert f"at most {best.mfu_bound:.0%}; published runs on " in out
    assert f"to {best.flops / best.peak / low:.3g} s a step" in out
    for c in found.best[:2]:
        assert f" {c.roles} " in out and f"{c.memory.total / 2**30:.2f}" in out
        assert f"{c.step.seconds:.4g}" in out and f"{c.mfu:.1%}" in out
    assert str(found.best[2].roles) not in out
    for why, (count, example) in found.why_not.items():
        assert f"{count:6,}  {why}; such as {example}" in out


def test_every_term_of_the_best_is_explained(capsys):
    """The GiB that are there at once add up to all, and what a step waits for to its seconds."""
    assert command.main([*ARGUMENTS, "--explain"]) == 0
    out = capsys.readouterr().out
    c = plan.plan("llama3-8b", "v5e:4x4", 64, 4096).best[0]
    held, took = (part.split("\n\n")[0] for part in out.split(":\n", 2)[1:])
    rows = [line.split(maxsplit=1) for line in held.splitlines()]
    now = [float(n) for n, what in rows if not what.startswith(("in all", "at another", "on the"))]
    assert abs(sum(now) - c.memory.total / 2**30) < 0.01 * len(now)
    assert [n for n, what in rows if what.startswith("in all")] == [f"{c.memory.total / 2**30:.2f}"]
    terms = sum(bool(n) for n in c.memory.terms)
    assert len(rows) == 4 + terms + bool(c.memory.host)  # parameters, state, batch; all
    for t in c.step.transfers:
        if t.sent.kind != "loss":
            assert f"{t.sent.bytes / 1e9:.4g} GB" in took
    assert f"{c.step.seconds:9.4g}  in all" in took


@pytest.mark.parametrize(
    "asked, told",
    [
        ("tensor=2", "more than the best"),
        ("fsdp=1", "It does not fit: a device has too little memory."),
        ("tensor=16", "It cannot be: kv_heads do not divide over tensor (kv_heads=8 over 16"),
        ("expert=2", "It cannot be: the model has no experts"),
        ("data=5", "no such division of 16 devices"),
    ],
)
def test_why_says_what_a_layout_loses_by(asked, told, capsys):
    assert command.main([*ARGUMENTS, "--why", asked]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Why not {asked}? ") and told in out
    if asked == "tensor=2":
        found = plan.plan("llama3-8b", "v5e:4x4", 64, 4096)
        other = next(c for c in found.best if c.roles.tensor == 2)
        a, b = found.best[0].step.seconds, other.step.seconds
        assert [line.split() for line in out.splitlines() if "a step " in line] == [
            ["a", "step", f"{a:.4g}", f"{b:.4g}", f"{b - a:+.4g}"]
        ]
        sent = [line.split()[-3:-1] for line in out.splitlines() if " along " in line]
        assert len(sent) == 2 and all(ours != theirs for ours, theirs in sent)


def test_the_best_is_not_asked_why(capsys):
    best = plan.plan("llama3-8b", "v5e:4x4", 64, 4096).best[0]
    asked = ",".join(f"{role}={size}" for role, size in best.roles.sizes.items())
    assert command.main([*ARGUMENTS, "--why", asked]) == 0
    assert "It is the best." in capsys.readouterr().out


SIZES = dict(embed=64, layers=4, mlp=64, vocab=256)


@pytest.mark.parametrize(
    "each, config",
    [
        (roles.Roles(fsdp=8, remat=True), model.Config(**SIZES)),
        (roles.Roles(data=2, tensor=2, context=2, microbatches=2), model.Config(**SIZES)),
        (roles.Roles(stage=2, data=2, tensor=2, microbatches=2), model.Config(**SIZES)),
        (roles.Roles(fsdp=4, tensor=2), model.Config(**SIZES, dtype=jnp.bfloat16)),
        (roles.Roles(fsdp=8, remat=True, offload=True), model.Config(**SIZES)),
        (roles.Roles(fsdp=8, remat=True, products=True), model.Config(**SIZES)),
        (roles.Roles(fsdp=8, remat=True, loss_chunks=8), model.Config(**SIZES)),
        (roles.Roles(expert=4, fsdp=2), model.Config(**SIZES, experts=4, capacity_factor=1.25)),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "chips, kernel, length",
    [("v5e:2x4", "tiles", 32), ("v5e:2x4", "splash", 128), ("h100:8", "cudnn", 32)],
)
def test_code_and_flags_are_the_layout_that_is_compiled(each, config, chips, kernel, length):
    if kernel == "cudnn":
        config = dataclasses.replace(config, dtype=jnp.bfloat16)
    names = {"context": context, "jax": jax, "jnp": jnp, "layouts": layouts, "mesh": mesh}
    expected = compiling.layout_of(each, config, mesh.make(**each.sizes), kernel)
    optimizer = Optimizer(name="lion", moments="bfloat16") if each.remat else Optimizer()
    given = config, topology.chips(chips), 16, length
    document = 8 if each.remat and kernel != "cudnn" else None
    whole = plan.Plan(*given, (), (), (), optimizer=optimizer, document=document)
    assert eval(compiling.code(each, whole), names) == expected
    told = settings.flags(argv=shlex.split(compiling.flags(each, whole)))
    assert told.layout.layout() == expected
    assert told.model == dataclasses.replace(config, loss_chunks=each.loss_chunks)
    assert told.optimizer == optimizer and told.data.packed == bool(document)
    assert (told.batch, told.sequence, told.ema) == (16, length, None)


def test_a_batch_in_tokens_and_another_optimizer(capsys):
    given = ["--batch", "300k", "--optimizer", "sgd", "--moments", "bfloat16", "--json"]
    assert command.main([*ARGUMENTS, *given, "--top", "1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["batch"] == 80  # 300,000 / 4,096 is 73.2, and 80 are five for each device
    (one,) = told["layouts"]
    optimizer = Optimizer(name="sgd", moments="bfloat16")
    assert one["flags"].endswith("--optimizer.name sgd --optimizer.moments bfloat16")
    assert command.main([*ARGUMENTS, "--batch", "1k", "--json"]) == 0  # one row, of a quarter
    assert json.loads(capsys.readouterr().out)["batch"] == 1
    found = plan.plan("llama3-8b", "v5e:4x4", 80, 4096, optimizer=optimizer)
    assert one["bytes"]["state"] == found.best[0].memory.state


def test_without_chips_the_fewest_of_each_kind_are_told(capsys):
    arguments = ["plan", "--model", "llama3-8b", "--batch", "64", "--sequence", "4096"]
    assert command.main([*arguments, "--count", "2..32", "--memory-of", "16GB"]) == 0
    told = capsys.readouterr().out
    rows = told.split("\n\n")[1].splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["v5e:4x4"]  # on 8 its state alone is too much
    assert "None of v4, v5p, v6e" in told
    assert not plan.plan("llama3-8b", "v5e:2x4", 64, 4096).fitting
    assert command.main([*arguments, "--count", "1..2", "--memory-of", "16GB"]) == 1
    assert "No chips do." in capsys.readouterr().out


def test_in_so_many_days_are_the_fewest_that_are_in_time():
    config = plan.preset("llama3-8b")
    found = {f.plan.chips.kind: f for f in survey(config, 512, 4096, (8, 128), 80, 6e11, 60)}
    assert {"a100", "h100"} == found.keys()
    for f in found.values():
        low, high = f.days(6e11)
        assert low <= high <= 60
        fewer = plan.plan(config, f"{f.plan.chips.kind}:{f.plan.chips.slices // 2}x8", 512, 4096)
        assert Fewest(fewer, f.low).days(6e11)[1] > 60


@pytest.mark.parametrize(
    "kind, number",
    [
        ("v5e", [4, 8, 16, 32, 64, 128, 256, 512]),
        ("v5p", [4, 8, 16, 32, 64, 128, 256, 512]),
        ("gb200", [1, 2, 4, 64, 128, 256]),
    ],
)
def test_usual_shapes_are_shapes(kind, number):
    found = list(usual(kind, 1, 512))
    assert {*number} <= {c.number for c in found}
    assert [c.number for c in found] == sorted(c.number for c in found)
    for c in found:
        name, slices = str(c).partition(" × ")[0], 1 if c.chip.node else c.slices
        assert topology.chips(name, slices) == c


def test_where_nothing_fits_the_exit_status_says_so(capsys):
    arguments = ["plan", "--model", "llama3-405b", "--chips", "v5e:2x2", "--batch", "4"]
    assert command.main([*arguments, "--sequence", "128"]) == 1
    out = capsys.readouterr().out
    assert "Nothing fits" in out and "more memory than a device has" in out


@pytest.mark.parametrize(
    "flag, value, told",
    [
        ("--model", "llama9", "--model 'llama9' is no file or folder, and no name: llama3-8b,"),
        ("--chips", "v5p:4x4", "--chips v5p:4x4: a v5p lies in a torus of 3 axes"),
        ("--chips", "h100:16", "--chips h100:16: NVLink joins the 8 GPUs of a node of h100"),
        ("--batch", "0", "--batch 0; expected 1 or more"),
        ("--batch", "51.2", "--batch '51.2'; expected a number above 0, as in 512 rows or 4M"),
        ("--batch", "4X", "--batch '4X'; expected a number above 0, as in 512 rows or 4M tokens"),
        ("--optimizer", "muon", "the optimizer's update multiplies matrices, which layouts gather"),
        ("--sequence", "-5", "--sequence -5; expected 1 or more"),
        ("--document", "0", "document=0 tokens; expected 1 to the sequence="),
        ("--slices", "0", "--slices 0; expected 1 or more"),
        ("--top", "0", "--top 0; expected 1 or more"),
        ("--only", "stages=2", "--only 'stages=2'; expected sizes of roles, as in stage=4,"),
        ("--compile", "11", "--compile 11; expected 0 to --top 10"),
        ("--why", "tensor", "--why 'tensor'; expected sizes of roles"),
        ("--count", "1..8", "--count asks which chips would do; leave --chips out"),
        ("--tokens", "15T", "--tokens asks which chips would do; leave --chips out"),
    ],
)
def test_an_error_names_its_flag_and_what_would_do(flag, value, told, capsys):
    assert command.main([*ARGUMENTS, flag, value]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("shardwise: plan: ") and told in said.err


def test_only_layouts_with_the_sizes_asked_for_are_shown(capsys):
    assert command.main([*ARGUMENTS, "--only", "tensor=2,context=1", "--json"]) == 0
    shown = [one["roles"] for one in json.loads(capsys.readouterr().out)["layouts"]]
    assert shown and all(one["tensor"] == 2 and "context" not in one for one in shown)


MINE = """
import jax, jax.numpy as jnp, optax

def create(key):
    return {"w": jax.random.normal(key, (512, 1024)), "v": jax.random.normal(key, (1024, 512))}

def loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["x"]) ** 2)

tx = optax.adam(1e-3)
batch = {"x": jax.ShapeDtypeStruct((64, 512), jnp.float32)}
"""


def test_a_program_of_ones_own_is_planned_from_its_file(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    given = ["plan", "--own", str(file), "--chips", "v5e:2x4"]
    assert command.main([*given, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    size = 2 * 512 * 1024
    for one in told["layouts"]:
        cut = one["roles"].get("fsdp", 1)
        assert one["bytes"]["parameters"] == 4 * size // cut
        assert one["bytes"]["state"] == 2 * 4 * size // cut + 4
    assert len(told["layouts"]) == 4 and told["model"] == str(file)
    assert command.main([*given, "--why", "fsdp=3"]) == 0
    assert "no such division" in capsys.readouterr().out
    for more, said in {
        ("--model", "llama3-8b"): "--model is the file's",
        ("--tokens", "15T"): "--tokens is the file's, or not asked",
        ("--optimizer", "lion"): "--optimizer is the file's",
        ("--memory-of", "16GB"): "--memory-of is the file's",
    }.items():
        assert command.main([*given, *more]) == 1 and said in capsys.readouterr().err
    assert command.main(given[:3]) == 1 and "--own needs --chips" in capsys.readouterr().err
    file.write_text("loss = None")
    assert command.main(given) == 1 and "has no create" in capsys.readouterr().err
    assert command.main([*given[:2], str(tmp_path / "no.py"), *given[3:]]) == 1
    assert "no.py: there is no such file" in capsys.readouterr().err


def test_help_and_missing_flags(capsys):
    assert command.main([]) == 2 and "shardwise plan --model" in capsys.readouterr().out
    assert command.main(["plan", "--model", "llama3-8b"]) == 1
    assert "--batch is missing" in capsys.readouterr().err


def test_without_libtpu_one_sentence_says_so(capsys, monkeypatch):
    def missing(chip):
        raise ImportError("topology.compile needs Google's TPU compiler, the package libtpu.")

    monkeypatch.setattr("shardwise.topology.child.versions", missing)
    small = ["plan", "--model", "llama3-8b", "--chips", "v5e:4x4", "--batch", "16"]
    assert command.main([*small, "--sequence", "128", "--compile", "1", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["compiled"] == []
    assert said.err.count("Nothing was compiled. topology.compile needs Google's") == 1


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
def test_the_compiler_checks_the_best_in_silence(tmp_path):
    """What is written by hand is sent as the formula says; nobody looks for a TPU meanwhile."""
    (tmp_path / "llama").mkdir()
    sizes = dict(vocab_size=512, hidden_size=256, num_hidden_layers=1, intermediate_size=512)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=128)
    config = dict(architectures=["LlamaForCausalLM"], torch_dtype="bfloat16", **sizes, **heads)
    (tmp_path / "llama" / "config.json").write_text(json.dumps(config))
    arguments = ["plan", "--model", str(tmp_path / "llama"), "--chips", "v5e:2x4", "--batch", "16"]
    arguments += ["--sequence", "256", "--compile", "1", "--json"]
    unset = {key: os.environ[key] for key in os.environ if key != "JAX_PLATFORMS"}
    unset["SHARDWISE_CACHE"] = str(tmp_path)
    run = [sys.executable, "-m", "shardwise", *arguments]
    done = subprocess.run(run, capture_output=True, text=True, env=unset)
    assert done.returncode == 0, done.stderr
    heading, *lines = done.stderr.strip().splitlines()
    assert heading.startswith("Compiled, GiB") and all(line.startswith("  ") for line in lines)
    (one,) = json.loads(done.stdout)["compiled"]
    assert one["fits"] and one["sent_by_hand_lowered"] == one["sent_by_hand_by_formula"]
    became = one["differences"]
    assert "left over" not in became and became["as written"]["written"] > 0
    assert math.isclose(sum(d["compiled"] for d in became.values()), sum(one["sent"].values()))


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
@pytest.mark.skipif(not IN_FULL, reason="half a minute of the compiler's: make stacks runs it")
@pytest.mark.parametrize("cut, dtype", [("fsdp", jnp.float32), ("tensor", jnp.bfloat16)])
def test_the_compiler_checks_stages_too(cut, dtype, tmp_path, monkeypatch):
    """Beside fsdp by hand; and beside tensor, with weights that are cast where they are used."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    config = model.Config(
        vocab=512, embed=128, layers=4, heads=4, kv_heads=4, head_dim=64, mlp=256, dtype=dtype
    )
    each = roles.Roles(stage=2, microbatches=2, **{cut: 4})
    given = config, arrays.of_decoder(config), topology.chips("v5e:2x4"), 16, 256
    found = planning.candidate(each, *given)
    whole = plan.Plan(config, *given[2:], (), (), ())
    if cut == "tensor" and jax.__version_info__ < (0, 8):  # the command says "not compiled"
        with pytest.raises(NotImplementedError, match="Mosaic kernels"):
            compiling.check(found, whole)
        return
    said = compiling.check(found, whole)
    by_hand = [s for s in found.sent if s.roles != ("tensor",)]
    if cut == "fsdp":  # what tensor cuts is whole in a lowered program
        assert said.lowered == sum(s.bytes for s in by_hand)
    assert said.fit and said.differences and "left over" not in said.differences
    assert said.fit.needed > found.memory.parameters + found.memory.state
    assert found.memory.total == pytest.approx(said.fit.needed, rel=0.2)


def test_what_cannot_be_compiled_is_said_and_the_next_is(capsys, monkeypatch):
    def check(candidate, whole):
        raise ValueError("arrays on the host")

    monkeypatch.setattr(compiling, "check", check)
    assert command.main([*ARGUMENTS, "--compile", "2"]) == 0
    assert capsys.readouterr().out.count("not compiled. arrays on the host") == 2


def test_what_the_compiler_says_stands_beside_the_formula(capsys, monkeypatch):
    def check(candidate, whole):
        needed = int(candidate.memory.total / 1.25)
        fit = Fit(needed, whole.usable)
        became = Differences({"all-reduce": Difference(2, 3e6, 5e6)})
        return compiling.Check(candidate, fit, 7.0, {"all-gather": 3e9}, 12.0, became)

    monkeypatch.setattr(compiling, "check", check)
    assert command.main([*ARGUMENTS, "--compile", "2"]) == 0
    lines = capsys.readouterr().out.partition("Compiled, GiB")[2].splitlines()[1:]
    found = plan.plan("llama3-8b", "v5e:4x4", 64, 4096)
    chosen = found.best[:2]
    assert [line.partition(": ")[2] for line in lines[1::2]] == ["all-reduce 3.0 MB (+2.0)"] * 2
    for line, c in zip(lines[::2], chosen, strict=True):
        assert line.startswith(
            f"  {c.roles}: fits, {c.memory.total / 1.25 / 2**30:.2f}, by formula"
        )
        assert "(+25%)" in line and "sends all-gather 3 GB" in line
    assert command.main([*ARGUMENTS, "--compile", "1", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["compiled"]
    by_hand = sum(s.bytes for s in chosen[0].sent if s.roles != ("tensor",))
    assert one["sent_by_hand_by_formula"] == by_hand and one["sent_by_hand_lowered"] == 7.0
    assert one["roles"] == chosen[0].roles.sizes and one["fits"]
    told = {"static": 2, "written": 3e6, "compiled": 5e6}
    assert one["differences"] == {"all-reduce": told}
