"""`shardwise plan`: the best layouts on some chips; or of each kind of chips the fewest that do."""

import dataclasses
import json
import math
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from shardwise import topology
from shardwise.costs.arrays import ORDER
from shardwise.model import Config
from shardwise.plan import compiling, published, runs, tables
from shardwise.plan.own import own as plan_own
from shardwise.plan.planning import Plan, plan
from shardwise.plan.seconds import model_flops
from shardwise.topology.slices import CHIPS, usual
from shardwise.train import Optimizer

_DAY = 86_400
_GB = 1e9, 2**30  # makers' GB are either
_NEXT = "GiB are of a device. Name chips (--chips) for more of their plan."
_UNITS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


@dataclasses.dataclass(frozen=True)
class Asked:
    """Propose layouts of a decoder on TPUs or GPUs, by formula, or of your own program.

    Args:
      model: a published model's name (llama3-8b, llama3-70b, llama3-405b, llama2-7b,
        llama2-70b, mixtral-8x7b), or a config.json, or its folder: of Llama, Mistral, Mixtral,
        Qwen 2 and 3, Gemma, Phi 3 and 4, OLMo, Granite, SmolLM or DeepSeek.
      batch: rows of a step, of all devices together, or its tokens, as 4M (about).
      sequence: tokens of a row.
      document: tokens of a document, where several are packed into a row.
      chips: their kind and shape, such as v5p:4x4x8 (128 TPUs) or h100:16x8 (16 nodes of 8
        GPUs). Left out: which kinds, and how many of each, would do.
      slices: of these TPUs, joined by the data centre's network.
      only: layouts with these sizes of roles alone, such as stage=4,tensor=4.
      why: sizes of roles, such as tensor=8: why they lose against the best.
      explain: show every term of the best, of what is held, sent and done.
      top: how many layouts are shown.
      json: print JSON on stdout, and nothing else there.
      compile: how many of the best the chips' compiler checks (TPUs: needs shardwise[tpu];
        GPUs: python -m shardwise.topology, once).
      count: without --chips, the fewest and the most to try (1..16384).
      memory_of: without --chips, the memory that each is to have, such as 16GB.
      tokens: without --chips, those to train on, such as 15T.
      days: without --chips, the time in which --tokens are to be done.
      optimizer: its name in optax (adamw); one whose update multiplies no matrices.
      moments: the first moment's dtype, such as bfloat16.
      own: instead of a model, a Python file with create, loss, tx and batch as plan.own takes
        them, and if need be has_aux and settings.
    """

    model: str | None = None
    batch: str | None = None
    sequence: int | None = None
    document: int | None = None
    chips: str | None = None
    slices: int = 1
    only: str = ""
    why: str = ""
    explain: bool = False
    top: int = 10
    json: bool = False
    compile: int = 0
    count: str | None = None
    memory_of: str | None = None
    tokens: str | None = None
    days: float = math.inf
    optimizer: str | None = None
    moments: str | None = None
    own: Path | None = None


def main(argv: Sequence[str]) -> int:
    """Run the command line, and return its exit status."""
    asked = tyro.cli(Asked, prog="shardwise plan", args=list(argv))
    for shown, others in {"why": "json compile only explain", "explain": "json compile"}.items():
        if getattr(asked, shown):
            _refuse(asked, others, f"cannot stand beside --{shown}")
    if asked.own is not None:
        flags = "model batch sequence document optimizer moments count memory-of tokens days"
        _refuse(asked, flags, "is the file's, or not asked: leave it out beside --own")
        if asked.chips is None:
            raise ValueError("plan: --own needs --chips, such as v5e:4x4.")
        return _show(asked, _own(asked), str(asked.own), ())
    if missing := [n for n in ("model", "batch", "sequence") if getattr(asked, n) is None]:
        raise ValueError(f"plan: --{missing[0]} is missing; see shardwise plan --help.")
    tx = Optimizer(name=asked.optimizer or "adamw", moments=asked.moments)
    if asked.chips is None:
        _refuse(asked, "why explain slices only json compile document", "needs --chips")
        if not asked.tokens:
            _refuse(asked, "days", "needs --tokens, such as 15T")
        return _survey(asked, tx)
    _refuse(asked, "memory-of tokens count days", "asks which chips would do; leave --chips out")
    chips = _chips(asked)
    rows, read = _rows(asked.batch, asked.sequence, chips.devices), _config(asked.model)
    found = plan(read.config, chips, rows, asked.sequence, tx, asked.document)
    return _show(asked, found, asked.model, read.notes)


def _refuse(asked, flags, why):
    """Raise where one of these flags was given."""
    for flag in flags.split():
        name = flag.replace("-", "_")
        if getattr(asked, name) != getattr(Asked, name):
            raise ValueError(f"plan: --{flag} {why}.")


def _positive(name, value):
    if value < 1:
        raise ValueError(f"plan: --{name} {value}; expected 1 or more.")
    return value


def _rows(batch, sequence, devices=0):
    """The rows of a batch, given as such, 512, or as tokens, 4M: about that, in rows that divide
    over the devices, or a power of two.
    """
    _positive("sequence", sequence)
    if batch.isdigit():
        return _positive("batch", int(batch))
    rows = max(1, _number("--batch", batch, "512 rows or 4M tokens", "[KMBGT]|E") / sequence)
    return round(rows / devices) * devices if rows > devices > 0 else 2 ** round(math.log2(rows))


def _number(flag, written, such, needs=""):
    """A number with a unit of a thousand: 15T, 2.5e9; `such` would do, with what it `needs`."""
    found = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:E\d+)?) ?([KMBGT]?)", written.upper())
    found = found if re.search(needs, written.upper()) else None
    value = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not value > 0:
        raise ValueError(f"plan: {flag} {written!r}; expected a number above 0, as in {such}.")
    return value


def _survey(asked, tx):
    rows = _rows(asked.batch, asked.sequence)
    count, days = asked.count or "1..16384", asked.days
    low, _, high = count.partition("..")
    if not (low.isdigit() and high.isdigit() and 0 < int(low) <= int(high)):
        raise ValueError(f"plan: --count {count!r}; expected the fewest and the most, as 8..512.")
    if not days > 0:
        raise ValueError(f"plan: --days {days}; expected more than 0.")
    tokens = _number("--tokens", asked.tokens, "15T or 2e12") if asked.tokens else 0.0
    of = asked.memory_of and re.sub("(?i)(gi?)?b?$", "", asked.memory_of)
    memory = of and _number("--memory-of", of, "16GB")
    read, counts = _config(asked.model), (int(low), int(high))
    found = survey(read.config, rows, asked.sequence, counts, memory, tokens, days, tx)
    _tell(_surveyed(found, tokens), asked.model, read.notes)
    return 0 if found else 1


@dataclasses.dataclass(frozen=True)
class Fewest:
    """The fewest chips of a kind that do, and the plan for them."""

    plan: Plan
    low: float  # the lowest MFU that published runs reached on such chips

    def days(self, tokens: float) -> tuple[float, float]:
        """(by the plan, by the lowest published MFU): the days that so many tokens take."""
        c, steps = self.plan.best[0], tokens / (self.plan.batch * self.plan.sequence)
        slow = max(c.step.seconds, c.flops / c.peak / self.low)
        return c.step.seconds * steps / _DAY, slow * steps / _DAY


def survey(
    config: Config,
    batch: int,
    sequence: int,
    counts: tuple[int, int] = (1, 16_384),
    memory: float | None = None,
    tokens: float = 0.0,
    days: float = math.inf,
    optimizer: Optimizer | None = None,
) -> list[Fewest]:
    """Of each kind of chips the fewest, in usual shapes, on which a step fits; the fewest first.

    `counts` are the fewest and the most to try, `memory` the GB that a chip is to have. `tokens`
    are to take no more than `days`, at the lowest MFU that published runs reached on such chips, or
    the plan's, if lower.
    """
    flops = model_flops(config, batch, sequence) / (batch * sequence) * tokens
    found = []
    for chip in CHIPS.values():
        if memory and not any(math.isclose(memory * b, chip.hbm_bytes, rel_tol=0.02) for b in _GB):
            continue
        low = runs.reached(chip, bool(config.experts)).low
        least = flops / (days * _DAY * low * chip.peak() * chip.devices)
        for chips in usual(chip.kind, max(counts[0], math.ceil(least)), counts[1]):
            told = plan(config, chips, batch, sequence, optimizer=optimizer or Optimizer())
            if told.fitting and Fewest(told, low).days(tokens)[1] <= days:
                found.append(Fewest(told, low))
                break
    return sorted(found, key=lambda f: f.plan.chips.number)


def _surveyed(found, tokens):
    if not found:
        return "No chips do. Give more of them (--count), of any memory, or more days."
    columns, rows = ["chips", "number", "layout", "GiB", "of", "step s", "at most"], []
    columns += ["days"] if tokens else []
    for f, c in ((f, f.plan.best[0]) for f in found):
        sizes = (f"{size / 2**30:.1f}" for size in (c.memory.total, f.plan.usable))
        row = [str(f.plan.chips), f"{f.plan.chips.number:,}", str(c.roles), *sizes]
        row += [f"{c.step.seconds:.3g}", f"{c.mfu_bound:.0%}"]
        rows.append(row + (["{:.3g} to {:.3g}".format(*f.days(tokens))] if tokens else []))
    told = ["The fewest of each kind that do, in shapes that clouds offer (powers of two)."]
    if tokens:
        told += ["Days: by the plan's seconds, and by the lowest MFU of published runs on such."]
    missing = ", ".join(kind for kind in CHIPS if kind not in {f.plan.chips.kind for f in found})
    last = ["", f"None of {missing} do within these limits."] if missing else []
    return "\n".join([*told, "", *tables.table(columns, rows), *last, _NEXT])


def _tell(text, model, notes):
    print("\n".join([text, *(f"Of {model}: {note}." for note in notes)]), flush=True)


def _own(asked):
    chips, file = _chips(asked), asked.own
    if not file.is_file():
        raise ValueError(f"plan: --own {file}: there is no such file.")
    names = runpy.run_path(str(file))
    if lacks := [name for name in ("create", "loss", "tx", "batch") if name not in names]:
        raise ValueError(
            f"plan: --own {file} has no {lacks[0]}; expected create(key), loss(params, batch), tx, "
            f"and batch as arrays or shapes."
        )
    job = names["create"], names["loss"], names["tx"], chips, names["batch"]
    return plan_own(*job, names.get("has_aux", False), **names.get("settings", {}))


def _show(asked, found, model, notes):
    top = _positive("top", asked.top)
    if not 0 <= asked.compile <= top:
        raise ValueError(f"plan: --compile {asked.compile}; expected 0 to --top {top}.")
    only, doubted = _sizes("only", asked.only), _sizes("why", asked.why)
    found = dataclasses.replace(found, fitting=tuple(c for c in found.fitting if c.roles.has(only)))
    if doubted or (asked.explain and found.fitting):
        said = tables.why(found, doubted) if doubted else tables.explained(found, found.best[0])
        _tell(said, model, notes)
        return 0
    if not asked.json:
        _tell(tables.text(found, top), model, notes)
    told = {"model": model, "notes_of_model": notes}
    if asked.compile:
        checks = compiling.checked(found, asked.compile, sys.stderr if asked.json else sys.stdout)
        told["compiled"] = [tables.of_check(each) for each in checks]
    if asked.json:
        print(json.dumps(tables.of_plan(found, top) | told, indent=1))
    return 0 if found.fitting else 1


def _sizes(flag, given):
    """{role: number of devices}, as --only and --why have them."""
    pairs = [pair.partition("=") for pair in given.split(",") if pair]
    if not all(role in ORDER and size.isdigit() for role, _, size in pairs):
        raise ValueError(
            f"plan: --{flag} {given!r}; expected sizes of roles, as in stage=4,tensor=4; the roles "
            f"are {', '.join(ORDER)}."
        )
    return {role: int(size) for role, _, size in pairs}


def _config(model):
    if model in published.PRESETS or Path(model).exists():
        return published.read(model)
    raise ValueError(
        f"plan: --model {model!r} is no file or folder, and no name: "
        f"{', '.join(published.PRESETS)} are known."
    )


def _chips(asked):
    _positive("slices", asked.slices)
    try:
        return topology.chips(asked.chips, asked.slices)
    except ValueError as error:
        told = str(error).partition(": ")[2]
        raise ValueError(f"plan: --chips {asked.chips}: {told}") from None
