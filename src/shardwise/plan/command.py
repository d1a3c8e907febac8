"""`shardwise plan`: the best layouts of a model on some chips, as tables or as JSON."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from shardwise import llama, topology
from shardwise.model import Config
from shardwise.plan import tables
from shardwise.plan.planning import PRESETS, plan
from shardwise.plan.roles import ORDER

_ONE = dict.fromkeys(ORDER, 1)


def main(argv: Sequence[str]) -> int:
    """Run the command line, and return its exit status."""

    def arguments(
        model: str,
        chips: str,
        batch: int,
        sequence: int,
        slices: int = 1,
        only: str = "",
        top: int = 10,
        as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
        compiled: Annotated[int, tyro.conf.arg(name="compile")] = 0,
    ) -> int:
        """Propose layouts of a decoder on TPUs or GPUs, by formula; the best first.

        Args:
          model: a published model's name (llama3-8b, llama3-70b, llama3-405b, llama2-70b,
            mixtral-8x7b), or a folder with the config.json of a Llama.
          chips: their kind and shape, such as v5p:4x4x8 (128 TPUs) or h100:16x8 (16 nodes of 8
            GPUs).
          batch: rows of a step, of all devices together.
          sequence: tokens of a row.
          slices: of these TPUs, joined by the data centre's network.
          only: layouts with these sizes of roles alone, such as stage=4,tensor=4.
          top: how many layouts are shown.
          as_json: print JSON on stdout, and nothing else there.
          compiled: how many of the best the chips' compiler checks (TPUs: needs shardwise[tpu];
            GPUs: python -m shardwise.topology, once).
        """
        return _run(model, chips, batch, sequence, slices, only, top, as_json, compiled)

    return tyro.cli(arguments, prog="shardwise plan", args=list(argv))


def _run(model, chips, batch, sequence, slices, only, top, as_json, compiled):
    for flag, value in (("batch", batch), ("sequence", sequence), ("slices", slices), ("top", top)):
        if value < 1:
            raise ValueError(f"plan: --{flag} {value}; expected 1 or more.")
    if not 0 <= compiled <= top:
        raise ValueError(f"plan: --compile {compiled}; expected 0 to --top {top}.")
    asked = _sizes(only)
    found = plan(_config(model), _chips(chips, slices), batch, sequence)
    fitting = (c for c in found.fitting if asked.items() <= {**_ONE, **c.roles.sizes}.items())
    found = dataclasses.replace(found, fitting=tuple(fitting))
    if not as_json:
        print(tables.text(found, top), flush=True)
    told = tables.facts(found, top) | {"model": model}
    if compiled:
        from shardwise.plan import compiling

        told["compiled"] = compiling.checked(found, compiled, sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(told, indent=1))
    return 0 if found.fitting else 1


def _sizes(only: str) -> dict[str, int]:
    """{role: number of devices}, as --only has them."""
    pairs = [pair.partition("=") for pair in only.split(",") if pair]
    if any(role not in _ONE or not size.isdigit() for role, _, size in pairs):
        raise ValueError(
            f"plan: --only {only!r}; expected sizes of roles, as in stage=4,tensor=4; the roles "
            f"are {', '.join(_ONE)}."
        )
    return {role: int(size) for role, _, size in pairs}


def _config(model: str) -> Config:
    if model in PRESETS:
        return PRESETS[model].config
    if Path(model).is_dir():
        return llama.config(model)
    raise ValueError(
        f"plan: --model {model!r} is no folder, and no name: {', '.join(PRESETS)} are known."
    )


def _chips(name, slices):
    try:
        return topology.chips(name, slices)
    except ValueError as error:
        told = str(error).partition(": ")[2]
        raise ValueError(f"plan: --chips {name}: {told}") from None
