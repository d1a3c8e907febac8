"""The loop: steps, metrics, evaluations, checkpoints, and every way to end."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shardwise import checkpoint, layouts, measure
from shardwise import tree as trees
from shardwise.layouts import first_call
from shardwise.run import metrics, program, state
from shardwise.run.folder import Note
from shardwise.run.reports import Report
from shardwise.run.signals import Stop
from shardwise.run.watchdog import Watchdog


class BadStep(RuntimeError):
    """The error of a step whose gradients or loss are not finite, or above the limit."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a run: `stopped` by a signal or done; `params` as the layout keeps them.

    `ema` is the decay of the parameters' `mean`, where one is kept.
    """

    folder: Path
    step: int
    loss: float
    stopped: bool
    params: Any
    opt_state: Any
    ema: float | None

    @property
    def mean(self) -> Any:
        """The bias-corrected mean of the parameters, laid out as they; None where none is kept."""
        return self.ema and state.mean(self.params, self.opt_state, self.ema)


class Run:
    """One process's part in a run, from its first step here to its last."""

    def __init__(self, settings, layout, folder, loss, tx, source, has_aux, sample, facts, aux):
        self.settings, self.layout, self.folder = settings, layout, folder
        self.loss, self.tx, self.source, self.sample, self.facts = loss, tx, source, sample, facts
        self.has_aux, self.aux = has_aux, aux
        self.program = program.step_program(layout, loss, tx, settings.seed, has_aux, aux)
        self.evaluate = program.evaluation(layout, loss, settings.ema, has_aux)
        self.note = Note(folder, jax.process_index())
        done = metrics.read(folder.metrics)  # of a run that is done, and asked for no more
        self.loss_value = float(done[-1]["loss"]) if done else float("nan")
        self.validation, self.pending = None, None
        self.saved_at = None
        self.profiled, self.tracing = settings.profiled(), False

    def make(self, create, saved):
        shapes = self.source.shapes()
        self.note.say("compiling")
        wanted = self.layout, create, self.tx, self.settings.seed, self.loss, shapes
        self.judges = saved is None  # what goes on was judged when it began
        if saved is None:
            self.first = 1
            self.params, self.opt_state = state.create(*wanted)
            return
        self.first, self.saved_at = saved["step"] + 1, saved["step"]
        found = state.restore(self.folder, self.saved_at, *state.abstract(*wanted))
        self.params, opt_state = found
        self.opt_state = state.replaced(opt_state, "halted", False)

    def go(self, stop: Stop) -> Result:
        """Run steps until the last one, or until a process was asked to stop."""
        settings, step = self.settings, self.first - 1
        self.amount = _amount(self.source.shapes())
        self.held = max(measure.bytes_on_devices((self.params, self.opt_state)).values())
        with contextlib.ExitStack() as stack:
            self.report = Report(settings, self.folder, self.first, self.rate, self.at_peak)
            stack.callback(self.report.close)
            stack.callback(self._end_trace)  # a run may end within it
            self.watchdog = stack.enter_context(Watchdog(self.note, settings.processes.hang))
            batches = self.source.go(self.first, settings.steps)
            for step in range(self.first, settings.steps + 1):
                if self._advance(step, batches, stop):
                    break
                if step % settings.save_every == 0 or self._evaluates(step):
                    self._flush()
                    self._evaluate(step)
                    if step % settings.save_every == 0:
                        self._save(step)
                    self.report.restart()
            stopped = step < settings.steps and self.first <= settings.steps
            self._flush()
            self._save(step)
            self._finish(step, stopped)
        values = self.params, self.opt_state, settings.ema
        return Result(self.folder.path, step, self.loss_value, stopped, *values)

    def _advance(self, step, batches: Iterator, stop: Stop) -> bool:
        """Run one step; return whether the processes agreed, a step ago, to stop after it."""
        if step in self.profiled and not self.tracing:
            self._flush()
            self._settle()  # a trace of whole steps
            jax.profiler.start_trace(self.folder.path / "profile")
            self.tracing = True
        self.note.say("reading", step)
        batch = next(batches)
        self.note.say("compiling" if step == self.first else "stepping", step)
        if step == self.first and self.judges:
            self._judge(batch, step)
        flags = program.flags(self.layout, stop.signal is not None)
        given = self.params, self.opt_state, batch, np.int32(step), flags
        with jax.profiler.StepTraceAnnotation("step", step_num=step):
            self.params, self.opt_state, record = self.program(*given)
        # A step is looked at when the next one is under way, so that devices never wait for this
        # process; but for the first, and for stages, whose tasks this process runs itself.
        before, self.pending = self.pending, (step, record)
        agreed = self._flush_one(before)
        ends = self.tracing and step == self.profiled[-1]
        if step == self.first or self.layout.staged or ends:
            agreed = self._flush()
        if ends:
            self._settle()
            self._end_trace()
        if step == self.first:
            self.watchdog.pause()  # what took so long was compiling
            self.watchdog.done()
        return agreed

    def _judge(self, batch, step):
        """Raise where the loss is another function of parts of the batch, as the layout cuts it."""
        own = program.key_of(self.loss, self.settings.seed, step)
        given = self.layout, self.loss, self.params, batch, (), own.get("key")
        if reason := first_call.judge(*given, self.has_aux, self.aux):
            first_call.warn(reason, "run.train")

    def _settle(self):
        """Wait for every device: a step's record is there when the first of them has it."""
        jax.block_until_ready((self.params, self.opt_state))

    def _end_trace(self):
        if self.tracing:
            jax.profiler.stop_trace()
            self.tracing = False

    def _flush(self):
        before, self.pending = self.pending, None
        return self._flush_one(before)

    def _flush_one(self, pending):
        """Wait for a step, write its line, and return whether a process was asked to stop."""
        if pending is None:
            return False
        step, record = pending
        record = {name: np.asarray(x).tolist() for name, x in jax.device_get(record).items()}
        stop, bad = record.pop("stop"), record.pop("bad")
        self.loss_value = record["loss"]
        line = self.report.line(step, record, bad, self.amount, self.held)
        self.watchdog.done()
        self.note.say(self.note.doing, line=self.report.say(line))
        if bad or not np.isfinite(record["loss"]):
            self._bad(step, record, applied=not bad)
        return bool(stop)

    def _bad(self, step, record, applied):
        """Keep the batch of a bad step, and end the run where that is asked."""
        name = f"batches/{step}.npz"
        file = self.folder.path / name
        if jax.process_index() == 0:
            file.parent.mkdir(exist_ok=True)
            rows = jax.tree_util.tree_leaves_with_path(self.source.whole(step))
            np.savez(file, **{trees.path(keys): x for keys, x in rows})
        told = (
            f"step {step}, with loss {record['loss']:g} and a norm of the gradients of "
            f"{record['norm']:g} (limit {self.settings.limit:g}); its batch is in "
            f"{self.settings.run / name}"
        )
        if self.settings.bad == "skip":
            self.report.print(f"{'Bad' if applied else 'Skipped'}: {told}.")
            return
        self.pending = None
        if not applied:  # the guard has held the state since
            self.opt_state = state.replaced(self.opt_state, "halted", False)
            self._save(step - 1)
        checkpoint.wait(self.folder.checkpoints)
        raise BadStep(
            f"run: bad {told}. The state of step {self.saved_at} is saved. Look at the batch, or "
            f"go on without it, with resume=True and bad='skip' (--resume --bad skip)."
        )

    def _evaluates(self, step):
        every = self.settings.evaluation.every
        return self.validation is not None and every > 0 and step % every == 0

    def _evaluate(self, step):
        if not self._evaluates(step):
            return
        self.note.say("evaluating", step)
        self.watchdog.pause()
        batches = self.validation.go(1, self.settings.evaluation.batches)
        found = [self.evaluate(self.params, self.opt_state, batch) for batch in batches]
        values = program.together(found)
        whole = self.sample and layouts.whole(self.layout, self.params)
        text = "" if self.sample is None else self.sample(whole)
        self.report.evaluated(step, *values, text=text)
        self.watchdog.done()

    def _save(self, step):
        if self.saved_at == step:
            return
        self.note.say("saving", step)
        self.watchdog.pause()
        position = {"position": self.source.state(step), "facts": self.facts}
        state.save(self.folder, step, self.params, self.opt_state, position, self.settings.keep)
        self.saved_at = step
        self.watchdog.done()

    def _finish(self, step, stopped):
        self.note.say("leaving", step)
        self.watchdog.pause()
        checkpoint.wait(self.folder.checkpoints)
        self.report.finish(step, stopped)
        self.note.say("done", step)


def _amount(batch):
    """(unit, number) in a step: tokens, where the batch has an array of that name; else rows."""
    if isinstance(batch, dict) and "tokens" in batch:
        return "tokens", int(np.prod(batch["tokens"].shape))
    return "rows", jax.tree.leaves(batch)[0].shape[0]
