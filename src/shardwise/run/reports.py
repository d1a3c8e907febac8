"""The reports of a run: on standard output, and in files of JSON lines, one for each step; a step
that is done again replaces its line.
"""

import contextlib
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from shardwise.run.folder import Folder, write
from shardwise.run.settings import Settings

_EVERY = 10  # seconds between two lines


def say(text: str) -> None:
    """Write a line to standard output, whose terminal may close, disk fill or reader end, and whose
    encoding may lack characters.

    That it ended is said once on standard error; from then on what is written is dropped.
    """
    try:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        sys.stdout.write(f"{text}\n".encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except (OSError, ValueError) as error:  # ValueError: it was closed here
        # What is still held back would fail again when the program ends.
        sys.stdout = open(os.devnull, "w")
        with contextlib.suppress(OSError):
            os.dup2(sys.stdout.fileno(), 1)
        with contextlib.suppress(OSError, AttributeError, ValueError):
            print(f"run: no more output ({error}); it goes on.", file=sys.stderr, flush=True)


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
        try:
            line = json.loads(text)
            if type(line["step"]) is not int:
                raise ValueError("its step is no whole number")
            float(line["loss"])
            found.append(line)
        except (ValueError, TypeError, KeyError):
            if text.strip() and number < len(texts):
                raise ValueError(
                    f"run: line {number} of {file} is damaged: {text[:60]!r}; expected an object "
                    f"with a whole number as its step, and a loss. The checkpoints are not touched "
                    f"by this: take the line out, or move the file away, and go on."
                ) from None
    return found


def _text(line):
    return json.dumps({name: _finite(x) for name, x in line.items()}) + "\n"


def _finite(x):
    # JSON knows neither infinity nor NaN: these become their names.
    if isinstance(x, list):
        return [_finite(each) for each in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


class Report:
    """The report of one process; only process 0 writes and prints anything.

    `rows` are some of a batch, `held` the bytes of the state on a device, `rate` the learning rate
    by step, `at_peak` a step's seconds of products at the chips' peak, or None. `loss` is the last.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Folder,
        first: int,
        rows: Any,
        held: int,
        rate: Callable | None = None,
        at_peak: float | None = None,
    ):
        self._settings, self._folder, self._held = settings, folder, held
        self._rate, self._at_peak = rate, at_peak
        self._unit, self._count = "rows", settings.batch
        if isinstance(rows, dict) and "tokens" in rows:
            self._unit, self._count = "tokens", settings.batch * rows["tokens"][0].size
        before = [line for line in read(folder.metrics) if line["step"] < first]
        self._skipped = sum(bool(line.get("bad")) for line in before)
        self.loss = float(before[-1]["loss"]) if before else math.nan
        self._since, self._said = time.perf_counter(), -math.inf
        self._main = jax.process_index() == 0
        for file in folder.lines if self._main else ():
            cut(file, first)

    def step(self, step: int, record: dict[str, Any], bad: bool) -> str:
        """Write a step, with the seconds since the last, show it now and then, return its text."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self.loss, steps, speed = record["loss"], self._settings.steps, self._count / seconds
        line = {"step": step, "loss": self.loss, self._unit: self._count}
        line |= {f"{self._unit}_per_second": round(speed, 1), "seconds": round(seconds, 6)}
        text = f"step {step:,} of {steps:,}  loss {self.loss:.4f}  {speed:,.0f} {self._unit}/s"
        if self._at_peak:
            line["mfu"] = round(self._at_peak / seconds, 4)
            text += f"  MFU {line['mfu']:.1%}"
        if self._rate is not None:
            line["learning_rate"] = float(self._rate(step - 1 - self._skipped))
        line |= {"bytes": self._held, "time": round(time.time(), 3), **record}
        if bad:
            line["bad"] = True
            self._skipped += 1
        self.add(self._folder.metrics, line)
        if now - self._said > _EVERY or step == steps:
            self._said = now
            self.print(text)
        return text

    def restart(self) -> None:
        """Count a step's seconds from now on: what was done since the last step was no step."""
        self._since = time.perf_counter()

    def print(self, text: str) -> None:
        if self._main:
            say(text)

    def add(self, file: Path, line: dict[str, Any]) -> None:
        """Write a line to one of the folder's files."""
        if self._main:
            add(file, line)

    def evaluated(self, step: int, loss: float, mean: float | None = None, text: str = "") -> None:
        """Write an evaluation and show it."""
        told = "" if mean is None else f", of the mean of the parameters {mean:.4f}"
        self.print(f"step {step:,}  held-out loss {loss:.4f}{told}")
        if text:
            self.print(f"  wrote: {text!r}")
        means = {} if mean is None else {"loss_of_mean": mean}
        self.add(self._folder.evaluations, {"step": step, "loss": loss, **means, "sample": text})

    def finish(self, step: int, stopped: bool) -> None:
        """Say how the run ended, and draw it."""
        if self._main:
            plot(self._folder)
            told = f"Stopped, and saved, at step {step:,}" if stopped else f"Done at step {step:,}"
            self.print(f"{told}; all is in {self._settings.run}")


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
