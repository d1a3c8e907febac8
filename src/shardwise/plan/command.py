"""`shardwise plan`: the best layouts of a model on some chips, as tables or as JSON."""

import dataclasses
import json
import math
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from shardwise import topology
from shardwise.plan import configs, facts, survey, tables
from shardwise.plan.own import own as plan_own
from shardwise.plan.planning import plan
from shardwise.plan.published import PRESETS
from shardwise.plan.roles import ORDER
from shardwise.train import Optimizer

_ONE = dict.fromkeys(ORDER, 1)


def main(argv: Sequence[str]) -> int:
    """Run the command line, and return its exit status."""

    def arguments(
        model: str | None = None,
        batch: str | None = None,
        sequence: int | None = None,
        chips: str | None = None,
        slices: int = 1,
        only: str = "",
        why: str = "",
        explain: bool = False,
        top: int = 10,
        as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
        compiled: Annotated[int, tyro.conf.arg(name="compile")] = 0,
        count: str | None = None,
        memory_of: str | None = None,
        tokens: str | None = None,
        days: float | None = None,
        optimizer: str | None = None,
        moments: str | None = None,
        own: Path | None = None,
    ) -> int:
        """Propose layouts of a decoder on TPUs or GPUs, by formula, or of your own program.

        Args:
          model: a published model's name (llama3-8b, llama3-70b, llama3-405b, llama2-7b,
            llama2-70b, mixtral-8x7b), or a config.json, or its folder: of Llama, Mistral, Mixtral,
            Qwen 2 and 3, Gemma, Phi 3 and 4, OLMo, Granite or SmolLM.
          batch: rows of a step, of all devices together, or its tokens, as 4M (about).
          sequence: tokens of a row.
          chips: their kind and shape, such as v5p:4x4x8 (128 TPUs) or h100:16x8 (16 nodes of 8
            GPUs). Left out: which kinds, and how many of each, would do.
          slices: of these TPUs, joined by the data centre's network.
          only: layouts with these sizes of roles alone, such as stage=4,tensor=4.
          why: sizes of roles, such as tensor=8: why they lose against the best.
          explain: show every term of the best, of what is held, sent and done.
          top: how many layouts are shown.
          as_json: print JSON on stdout, and nothing else there.
          compiled: how many of the best the chips' compiler checks (TPUs: needs shardwise[tpu];
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
        shown = {"why": why, "explain": explain}
        needed = {"model": model, "batch": batch, "sequence": sequence}
        if own is not None:
            given = needed | {"optimizer": optimizer, "moments": moments, "count": count}
            given |= {"memory-of": memory_of, "tokens": tokens, "days": days}
            _refuse(given, "is the file's, or not asked: leave it out beside --own")
            if chips is None:
                raise ValueError("plan: --own needs --chips, such as v5e:4x4.")
            found = _own(own, _chips(chips, slices))
            return _show(found, str(own), (), only, why, explain, top, as_json, compiled)
        if lacks := [name for name, value in needed.items() if value is None]:
            raise ValueError(f"plan: --{lacks[0]} is missing; see shardwise plan --help.")
        tx = Optimizer(name=optimizer or "adamw", moments=moments)
        on = chips and _chips(chips, slices)
        rows = _rows(batch, sequence, on.devices if on else 0)
        if chips is None:
            given = shown | {"slices": slices > 1, "only": only}
            _refuse(given | {"json": as_json, "compile": compiled}, "needs --chips")
            _refuse({} if tokens else {"days": days}, "needs --tokens, such as 15T")
            return _survey(model, rows, sequence, tx, count, memory_of, tokens, days)
        given = {"memory-of": memory_of, "tokens": tokens, "count": count, "days": days}
        _refuse(given, "asks which chips would do; leave --chips out")
        if why or explain:
            name = "why" if why else "explain"
            _refuse({"json": as_json, "compile": compiled}, f"cannot stand beside --{name}")
        _refuse(why and {"only": only, "explain": explain}, "cannot stand beside --why")
        read = _config(model)
        found = plan(read.config, on, rows, sequence, optimizer=tx)
        return _show(found, model, read.notes, only, why, explain, top, as_json, compiled)

    return tyro.cli(arguments, prog="shardwise plan", args=list(argv))


def _refuse(given, why):
    for flag in (name for name, value in (given or {}).items() if value):
        raise ValueError(f"plan: --{flag} {why}.")


def _positive(**values):
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"plan: --{name} {value}; expected 1 or more.")


def _rows(batch, sequence, devices):
    """The rows of a batch, which is told as such, 512, or by its tokens, 4M: those nearest to which
    there are equally many for each device, or a power of two.
    """
    _positive(sequence=sequence)
    if batch.isdigit():
        _positive(batch=int(batch))
        return int(batch)
    such = "512 rows or 4M tokens"
    if batch[-1:].isdigit() and "e" not in batch.lower():
        raise ValueError(f"plan: --batch {batch!r}; expected a number above 0, as in {such}.")
    rows = max(1, survey.number("--batch", batch, such) / sequence)
    return round(rows / devices) * devices if rows > devices > 0 else 2 ** round(math.log2(rows))


def _survey(model, batch, sequence, tx, count, memory_of, tokens, days):
    count, days = count or "1..16384", math.inf if days is None else days
    low, _, high = count.partition("..")
    if not (low.isdigit() and high.isdigit() and 0 < int(low) <= int(high)):
        raise ValueError(f"plan: --count {count!r}; expected the fewest and the most, as 8..512.")
    if not days > 0:
        raise ValueError(f"plan: --days {days}; expected more than 0.")
    given = survey.number("--tokens", tokens, "15T or 2e12") if tokens else 0.0
    of = memory_of and memory_of.upper().removesuffix("B").removesuffix("I").removesuffix("G")
    memory = of and survey.number("--memory-of", of, "16GB")
    read, counts = _config(model), (int(low), int(high))
    found = survey.survey(read.config, batch, sequence, counts, memory, given, days, tx)
    print(survey.text(found, given))
    _tell(model, read.notes)
    return 0 if found else 1


def _tell(model, notes):
    for note in notes:
        print(f"Of {model}: {note}.", flush=True)


def _own(file, chips):
    """The plan of the program that a file has."""
    try:
        names = runpy.run_path(str(file))
    except OSError as error:
        raise ValueError(f"plan: --own {file} cannot be read: {error.strerror}.") from None
    if lacks := [name for name in ("create", "loss", "tx", "batch") if name not in names]:
        raise ValueError(
            f"plan: --own {file} has no {lacks[0]}; expected create(key), loss(params, batch), tx, "
            f"and batch as arrays or shapes."
        )
    job = names["create"], names["loss"], names["tx"], chips, names["batch"]
    return plan_own(*job, names.get("has_aux", False), **names.get("settings", {}))


def _show(found, model, notes, only, why, explain, top, as_json, compiled):
    _positive(top=top)
    if not 0 <= compiled <= top:
        raise ValueError(f"plan: --compile {compiled}; expected 0 to --top {top}.")
    asked, doubted = _sizes("only", only), _sizes("why", why)
    if doubted:
        print(tables.why(found, doubted))
        _tell(model, notes)
        return 0
    fitting = (c for c in found.fitting if asked.items() <= {**_ONE, **c.roles.sizes}.items())
    found = dataclasses.replace(found, fitting=tuple(fitting))
    if explain and found.fitting:
        print(tables.explained(found, found.best[0]))
        _tell(model, notes)
        return 0
    if not as_json:
        print(tables.text(found, top), flush=True)
        _tell(model, notes)
    told = facts.facts(found, top) | {"model": model, "notes_of_model": notes}
    if compiled:
        from shardwise.plan import compiling

        told["compiled"] = compiling.checked(found, compiled, sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(told, indent=1))
    return 0 if found.fitting else 1


def _sizes(flag: str, given: str) -> dict[str, int]:
    """{role: number of devices}, as --only and --why have them."""
    pairs = [pair.partition("=") for pair in given.split(",") if pair]
    if any(role not in _ONE or not size.isdigit() for role, _, size in pairs):
        raise ValueError(
            f"plan: --{flag} {given!r}; expected sizes of roles, as in stage=4,tensor=4; the roles "
            f"are {', '.join(_ONE)}."
        )
    return {role: int(size) for role, _, size in pairs}


def _config(model: str) -> configs.Reading:
    if model in PRESETS:
        return configs.Reading(PRESETS[model].config, 0, ())
    if Path(model).exists():
        return configs.read(model)
    raise ValueError(
        f"plan: --model {model!r} is no file or folder, and no name: {', '.join(PRESETS)} are "
        f"known."
    )


def _chips(name, slices):
    _positive(slices=slices)
    try:
        return topology.chips(name, slices)
    except ValueError as error:
        told = str(error).partition(": ")[2]
        raise ValueError(f"plan: --chips {name}: {told}") from None
