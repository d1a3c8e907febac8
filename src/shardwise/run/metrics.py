"""Files of JSON lines, one for each step; a step that is done again replaces its line."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

from shardwise.run.folder import write


class Lines:
    """The lines of a file from step `first` on; those that were there from it on are dropped."""

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
    """The lines, in order; one that was cut off while it was written is left out."""
    found = []
    if file.exists():
        for line in file.read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def _text(line):
    return json.dumps({name: _finite(x) for name, x in line.items()}) + "\n"


def _finite(x):
    # JSON knows neither infinity nor NaN: these become their names.
    if isinstance(x, list):
        return [_finite(each) for each in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x
