"""The reports of a run: lines on a terminal or in a log, events, plots."""

import math
import time
from collections.abc import Callable
from typing import Any

import jax

from shardwise.run.folder import Folder
from shardwise.run.metrics import Lines, read
from shardwise.run.output import OUT
from shardwise.run.plots import plot
from shardwise.run.settings import Settings

_EVERY = 10  # seconds between two plain lines


class Report:
    """The report of one process; only process 0 writes and prints anything."""

    def __init__(
        self,
        settings: Settings,
        folder: Folder,
        first: int,
        rate: Callable | None = None,
        at_peak: float | None = None,
    ):
        self._settings, self._folder, self._rate = settings, folder, rate
        self._at_peak = at_peak  # seconds of a step's products
        before = [line for line in read(folder.metrics) if line["step"] < first]
        self._skipped = sum(bool(line.get("bad")) for line in before)
        self._main = jax.process_index() == 0
        self._since, self._said = time.perf_counter(), -math.inf
        self._progress = self._bar(first) if self._main and OUT.isatty() else None
        self._events = self._writer() if self._main and settings.tensorboard else None
        files = (folder.metrics, folder.evaluations) if self._main else ()
        self._files = [Lines(file, first) for file in files]

    def _bar(self, first):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
        progress = Progress(*columns, console=Console(file=OUT))
        progress.start()
        self._task = progress.add_task("", total=self._settings.steps, completed=first - 1)
        return progress

    def _writer(self):
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ImportError(
                "run: --tensorboard needs tensorboardX: pip install 'shardwise[tensorboard]'"
            ) from None
        return SummaryWriter(str(self._folder.path / "events"))

    def line(
        self, step: int, record: dict[str, float], bad: bool, amount: tuple[str, int], held: int
    ) -> dict[str, Any]:
        """The line of a step in the metrics; its seconds are those since the line before."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        (what, count), self._what = amount, amount[0]
        line: dict[str, Any] = {"step": step, "loss": record["loss"], what: count}
        line |= {f"{what}_per_second": round(count / seconds, 1), "seconds": round(seconds, 6)}
        if self._at_peak:
            line["mfu"] = round(self._at_peak / seconds, 4)
        line["gradient_norm"] = record["norm"]
        if self._rate is not None:
            line["learning_rate"] = float(self._rate(step - 1 - self._skipped))
        line |= {"bytes": held, "time": round(time.time(), 3)}
        line |= {name: x for name, x in record.items() if name not in ("loss", "norm")}
        if bad:
            self._skipped += 1
            line["bad"] = True
        return line

    def say(self, line: dict[str, Any]) -> str:
        """Write a step and show it, outside of a terminal only now and then; return its text."""
        step, steps = line["step"], self._settings.steps
        if self._main:
            self._files[0].add(line)
        text = (
            f"step {step:,} of {steps:,}  loss {line['loss']:.4f}  "
            f"{line[f'{self._what}_per_second']:,.0f} {self._what}/s"
        )
        text += f"  MFU {line['mfu']:.1%}" if "mfu" in line else ""
        if self._events is not None:
            for name, value in line.items():
                if name != "step" and isinstance(value, int | float):
                    self._events.add_scalar(name, value, step)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=text)
        elif time.perf_counter() - self._said > _EVERY or step == steps:
            self._said = time.perf_counter()
            self.print(text)
        return text

    def restart(self) -> None:
        """Count a step's seconds from now on: what was done since the last step was no step."""
        self._since = time.perf_counter()

    def print(self, text: str) -> None:
        """Print a line that stays."""
        if self._main:
            if self._progress is not None:
                self._progress.console.print(text, markup=False)
            else:
                print(text, file=OUT, flush=True)

    def evaluated(self, step: int, loss: float, mean: float | None = None, text: str = "") -> None:
        """Show an evaluation."""
        told = f"step {step:,}  held-out loss {loss:.4f}"
        told += "" if mean is None else f", of the mean of the parameters {mean:.4f}"
        self.print(told)
        if self._main:
            means = {} if mean is None else {"loss_of_mean": mean}
            self._files[1].add({"step": step, "loss": loss, **means, "sample": text})
        if text:
            self.print("  wrote: " + repr(text))
        if self._events is not None:
            self._events.add_scalar("held_out_loss", loss, step)

    def finish(self, step: int, stopped: bool) -> None:
        """Say how the run ended, and draw it."""
        if self._main:
            plot(self._folder)
            told = f"Stopped, and saved, at step {step:,}" if stopped else f"Done at step {step:,}"
            self.print(f"{told}; all is in {self._settings.run}")

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        for each in [*self._files, *([] if self._events is None else [self._events])]:
            each.close()
