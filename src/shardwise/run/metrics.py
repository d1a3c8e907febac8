"""Files of JSON lines, one for each step; a step that is done again replaces its line."""

import json
import math
from pathlib import Path
from typing import Any

from shardwise.run.folder import write


class Lines:
    """The lines of a file, written from step `first` on; those it had from there on are dropped."""

    def __init__(self, file: Path, first: int):
        kept = [line for line in read(file) if line["step"] < first]
        write(file, "".join(_text(line) for line in kept))
        self._file = file.open("a")

    def add(self, line: dict[str, Any]) -> None:
        """Write a line, whole."""
        self._file.write(_text(line))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read(file: Path) -> list[dict[str, Any]]:
    """The lines of a file, in order; a last one that was cut off in writing is left out.

    Raises:
      ValueError: a line that is no step's.
    """
    if not file.exists():
        return []
    *lines, last = file.read_bytes().split(b"\n")
    found = [_parsed(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    return found + [line for line in [_line(last)] if line is not None]


def missing(file: Path, last: int) -> list[tuple[int, int]]:
    """(first, last) of each run of consecutive steps, up to `last`, that have no line."""
    steps = {line["step"] for line in read(file)}
    absent = [step for step in range(1, last + 1) if step not in steps]
    starts = [step for step in absent if step - 1 in steps or step == 1]
    ends = [step for step in absent if step + 1 in steps or step == last]
    return list(zip(starts, ends, strict=True))


def _parsed(file, number, text):
    line = _line(text)
    if line is None:
        raise ValueError(
            f"run: line {number} of {file} is damaged: {text[:60]!r}; expected an object with a "
            f"whole number as its step, and a loss. The checkpoints are not touched by this: take "
            f"the line out, or move the file away, and go on."
        )
    return line


def _line(text):
    """The line of a step, parsed; None for any other text."""
    try:
        found = json.loads(text)
        float(found["loss"])
        return found if type(found["step"]) is int else None
    except (ValueError, TypeError, KeyError):
        return None


def _text(line):
    return json.dumps({name: _finite(x) for name, x in line.items()}) + "\n"


def _finite(x):
    # JSON knows neither infinity nor NaN: these become their names.
    if isinstance(x, list):
        return [_finite(each) for each in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x
