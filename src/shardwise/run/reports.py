"""The reports of a run: lines on standard output, and in the metrics."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from shardwise.run.folder import Folder
from shardwise.run.metrics import add, cut, plot, read
from shardwise.run.settings import Settings

_EVERY = 10  # seconds between two lines


def say(text: str) -> None:
    """Write a line to standard output, whose terminal may close, disk fill or reader end, and whose
    encoding may lack characters.

    That it ended is said once on standard error; from then on what is written is dropped.
    """
    try:
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(f"{text}\n".encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except (OSError, ValueError) as error:  # ValueError: it was closed here
        # What is still held back would fail again when the program ends.
        sys.stdout = open(os.devnull, "w")
        with contextlib.suppress(OSError):
            os.dup2(sys.stdout.fileno(), 1)
        with contextlib.suppress(OSError, AttributeError, ValueError):
            print(f"run: no more output ({error}); it goes on.", file=sys.stderr, flush=True)


class Report:
    """The report of one process; only process 0 writes and prints anything.

    `rows` are some of a batch, `held` the bytes of the state on a device, `rate` the learning rate
    by step, and `at_peak` the seconds of a step's products at the chips' peak, where known. `loss`
    is the last step's.
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
        """Write a step, with the seconds since the one before, and show it now and then; return its
        text.
        """
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
