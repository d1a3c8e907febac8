"""Files of JSON lines, one for each step; a step that is done again replaces its line."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

from shardwise.run.folder import Folder, write


def cut(file: Path, first: int) -> None:
    """Drop a file's lines from step `first` on, or begin the file: they are done again."""
    kept = [line for line in read(file) if line["step"] < first]
    write(file, "".join(_text(line) for line in kept))


def add(file: Path, line: dict[str, Any]) -> None:
    """Write a line at the end of a file, whole."""
    with file.open("a") as end:
        end.write(_text(line))


def read(file: Path) -> list[dict[str, Any]]:
    """The lines of a file, without a last one cut in writing; a ValueError for a damaged one."""
    if not file.exists():
        return []
    found, texts = [], file.read_bytes().split(b"\n")
    for number, text in enumerate(texts, 1):
        line = _line(text)
        if line is not None:
            found.append(line)
        elif text.strip() and number < len(texts):
            raise ValueError(
                f"run: line {number} of {file} is damaged: {text[:60]!r}; expected an object with "
                f"a whole number as its step, and a loss. The checkpoints are not touched by "
                f"this: take the line out, or move the file away, and go on."
            )
    return found


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


def plot(folder: Folder) -> None:
    """Draw metrics.png, where matplotlib is installed, of what is done."""
    lines = [x for x in read(folder.metrics) if isinstance(x["loss"], float)]
    if not lines or importlib.util.find_spec("matplotlib") is None:
        return
    from matplotlib.figure import Figure

    held_out = [x for x in read(folder.evaluations) if isinstance(x["loss"], float)]
    figure = Figure(figsize=(7, 5), layout="constrained")
    loss, speed = figure.subplots(2, 1, sharex=True)
    steps = [x["step"] for x in lines]
    loss.plot(steps, [x["loss"] for x in lines], label="training")
    if held_out:
        at = [x["step"] for x in held_out]
        loss.plot(at, [x["loss"] for x in held_out], "o--", label="held out")
        if "loss_of_mean" in held_out[0]:
            values = [x["loss_of_mean"] for x in held_out]
            loss.plot(at, values, "s:", label="held out, mean of the parameters")
        loss.legend()
    loss.set_ylabel("loss")
    what = "tokens" if "tokens" in lines[0] else "rows"
    speed.plot(steps, [x.get(f"{what}_per_second", math.nan) for x in lines])
    speed.set(xlabel="step", ylabel=f"{what}/s", ylim=(0, None))
    figure.savefig(folder.path / "metrics.png", dpi=150)
