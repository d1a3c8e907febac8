"""The same programs, compiled for TPUs by each supported JAX: `make observe` writes the results.

Each stack of `tests/stacks.py` has its environment in .stacks, as `make stacks` makes it; the
variable INTERPRETERS names ones that exist, to be taken as they are:

    make observe                            # all stacks, as many as there are Pythons for
    make observe STACKS="newest colab"
    make observe INTERPRETERS="newest=/path/to/python colab=/path/to/python"   # these alone

What was written before of other releases of JAX stays, with its date, in book/observatory.json,
from which the appendix "What changes with a release" is drawn. Minutes for each stack; 64-bit Linux
on x86 only, where there is a TPU compiler.
"""

import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import stacks

from shardwise_book.observatory import FILE

PATH = stacks.ROOT / FILE
WORKER = stacks.ROOT / "benchmarks/observed.py"


def entry(lines: list[str], today: str) -> dict[str, Any]:
    """An entry of the file, of what `benchmarks/observed.py` printed.

    Raises:
      ValueError: it did not come to an end, or printed something else.
    """
    told = [json.loads(line) for line in lines if line.startswith("{")]
    if len(told) < 2 or "versions" not in told[0]:
        raise ValueError("no programs were compiled")
    programs = {one.pop("name"): one for one in told[1:]}
    return {"date": today, **told[0], "programs": programs}


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The new entries, and of the old those of other releases of JAX."""
    seen = {one["versions"]["jax"] for one in new}
    return [*(one for one in old if one["versions"]["jax"] not in seen), *new]


def observe(python: Path) -> dict[str, Any]:
    """What the programs are with this interpreter.

    Raises:
      ValueError: as `entry`, with the end of what it said.
    """
    settings = {"PYTHONPATH": str(stacks.ROOT / "src"), "JAX_PLATFORMS": "cpu"}
    command = [str(python), str(WORKER)]
    with tempfile.TemporaryDirectory() as cache:  # an empty one: seconds are the compiler's
        given = {**os.environ, **settings, "SHARDWISE_CACHE": cache}
        done = subprocess.run(command, env=given, cwd=stacks.ROOT, capture_output=True, text=True)
    try:
        return entry(done.stdout.splitlines(), datetime.date.today().isoformat())
    except ValueError as error:
        said = done.stderr.strip().splitlines()[-1:] or [""]
        raise ValueError(f"{error}: {said[0][:300]}") from None


def interpreters() -> dict[str, Path | None]:
    """{stack: its interpreter}, those named in INTERPRETERS, or all; None where it cannot be had.

    Raises:
      ValueError: the name of no stack.
    """
    given = dict(item.split("=", 1) for item in os.environ.get("INTERPRETERS", "").split())
    asked = list(given) or os.environ.get("STACKS", "").split() or list(stacks.STACKS)
    if unknown := sorted({*asked} - {*stacks.STACKS}):
        raise ValueError(f"no stack {', '.join(unknown)}: there are {', '.join(stacks.STACKS)}")
    if given:
        return {name: Path(path) for name, path in given.items()}
    return {name: stacks.environment(name, stacks.STACKS[name]) for name in asked}


def write(found: list[dict[str, Any]]) -> None:
    """Put them in the file, in the order of releases."""
    old = json.loads(PATH.read_text())["stacks"] if PATH.exists() else []
    every = merged(old, found)
    every.sort(key=lambda one: [int(number) for number in one["versions"]["jax"].split(".")])
    PATH.write_text(json.dumps({"stacks": every}, indent=1) + "\n")


def main() -> int:
    """1 if a stack could not be observed; what was found is written."""
    status = 0
    for name, python in interpreters().items():
        print(f"{name}: compiling", flush=True)
        try:
            found = python and observe(python)
        except ValueError as error:
            found = print(f"{name}: {error}", flush=True)
        if found:
            write([found])
            print(f"{name}: JAX {found['versions']['jax']} written to {FILE}", flush=True)
        else:
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
