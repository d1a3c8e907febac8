"""The loop: steps, metrics, evaluations, checkpoints, and every way to end."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np

from shardwise import checkpoint, layouts, measure
from shardwise import tree as trees
from shardwise.rules.agreement import together
from shardwise.run import metrics, program, state
from shardwise.run.feed import feed
from shardwise.run.folder import Folder, Note
from shardwise.run.reports import Report
from shardwise.run.settings import Settings, check_resumable, flat
from shardwise.run.signals import Stop
from shardwise.run.transformations import averaged, guarded
from shardwise.run.watchdog import Watchdog

OWN = "processes.index"  # what each process has for itself


class BadStep(RuntimeError):
    """A step whose gradients or loss are not finite, or above the limit."""


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended: `stopped` by a signal or done; `params` as the layout keeps them."""

    folder: Path
    step: int
    loss: float
    stopped: bool
    params: Any
    opt_state: Any


def train(
    settings: Settings,
    create: Callable,
    loss: Callable,
    batches: Any,
    tx: Any = None,
    validation: Any = None,
    has_aux: bool = False,
    sample: Callable | None = None,
    facts: dict[str, Any] | None = None,
) -> Result:
    """Train, from the start or from the newest whole checkpoint, until `settings.steps`.

    Args:
      settings: of which `model` and `data` count for nothing here.
      create: of a key, one device's parameters.
      loss: of (params, batch) or (params, batch, key), as in `shardwise.layouts`.
      batches: a `grain.MapDataset` of single rows, endless, of which step k has the k-th
        `settings.batch`; or an iterator of whole batches with get_state and set_state, as Grain's.
      tx: an optax transformation; by default `settings.optimizer`'s.
      validation: as `batches`, a MapDataset, of which evaluations read the first batches.
      has_aux: whether the loss returns aux too: scalars in a dict stand in the metrics, summed.
      sample: of whole parameters, a text for the log at each evaluation.
      facts: what must be equal when the run goes on, beside the settings, such as checksums.

    Raises:
      FileExistsError: the folder has a run, and `settings.resume` is false.
      ValueError: other settings than the saved ones, or other facts.
      BadStep: a bad step, where `settings.bad` says stop; the state before it is saved.
      Exception: what `shardwise.layouts` and `shardwise.checkpoint` raise.
    """
    layout, folder = settings.layout.layout(), Folder(settings.run)
    rate = settings.optimizer.rate() if tx is None else None
    tx = settings.optimizer.transformation() if tx is None else tx
    tx = tx if settings.ema is None else averaged(tx, settings.ema)
    tx = guarded(tx, settings.limit, settings.bad == "stop")
    facts = dict(facts or {})
    if isinstance(batches, grain.MapDataset):
        facts["first rows"] = feed(batches, settings.batch, layout).fingerprint()
    saved = _begin(settings, folder, facts)
    source = feed(batches, settings.batch, layout, saved and saved["position"])
    run = _Run(settings, layout, folder, loss, tx, source, has_aux, sample, facts)
    run.validation = validation and feed(validation, settings.batch, layout)
    run.rate = rate
    run.make(create, saved)
    return run.go()


def _begin(settings, folder, facts):
    """What the newest checkpoint says; settings are compared, and written."""
    now = flat(settings)
    with together("run") as told:  # all have looked before one writes
        told |= {name: str(value) for name, value in (now | facts).items() if name != OWN}
        before = folder.settings()
        if before is not None and not settings.resume:
            raise FileExistsError(
                f"run: {folder.path} has a run already. Go on with it by --resume, or name another "
                f"folder by --run."
            )
        if before is not None:
            check_resumable(before, settings)
    saved = state.saved(folder) if settings.resume else None
    for name, value in (facts if saved else {}).items():
        if saved["facts"].get(name) != value:
            raise ValueError(
                f"run: {folder.path} was trained on other {name}: {saved['facts'].get(name)!r} "
                f"then, {value!r} now."
            )
    folder.write_settings(now)
    return saved


class _Run:
    """One process's part in a run, from its first step here to its last."""

    def __init__(self, settings, layout, folder, loss, tx, source, has_aux, sample, facts):
        self.settings, self.layout, self.folder = settings, layout, folder
        self.loss, self.tx, self.source, self.sample, self.facts = loss, tx, source, sample, facts
        self.program = program.step_program(layout, loss, tx, settings.seed, has_aux)
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
        made = state.create(self.layout, create, self.tx, self.settings.seed, self.loss, shapes)
        self.params, self.opt_state = made
        self.first = 1
        if saved is not None:
            self.first = saved["step"] + 1
            made = state.restore(self.folder, saved["step"], *made)
            self.params, opt_state = made
            self.opt_state = state.replaced(opt_state, "halted", False)
            self.saved_at = saved["step"]

    def go(self):
        """Steps until the last one, or until a signal."""
        settings, step = self.settings, self.first - 1
        self.amount = _amount(self.source.shapes())
        self.held = max(measure.bytes_on_devices((self.params, self.opt_state)).values())
        with contextlib.ExitStack() as stack:
            self.report = Report(settings, self.folder, self.first, self.rate)
            stack.callback(self.report.close)
            stack.callback(self._end_trace)  # a run may end within it
            self.watchdog = stack.enter_context(Watchdog(self.note, settings.processes.hang))
            stop = stack.enter_context(Stop())
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
        values = self.params, self.opt_state
        return Result(self.folder.path, step, self.loss_value, stopped, *values)

    def _advance(self, step, batches: Iterator, stop: Stop) -> bool:
        """One step; whether the processes agreed, a step ago, to stop after it."""
        if step in self.profiled and not self.tracing:
            self._flush()  # a trace of whole steps
            jax.profiler.start_trace(self.folder.path / "profile")
            self.tracing = True
        self.note.say("reading", step)
        batch = next(batches)
        self.note.say("compiling" if step == self.first else "stepping", step)
        flags = program.flags(self.layout, stop.signal is not None)
        given = self.params, self.opt_state, batch, np.int32(step), flags
        with jax.profiler.StepTraceAnnotation("step", step_num=step):
            self.params, self.opt_state, record = self.program(*given)
        # A step is looked at when the next one is under way, so that devices never wait for this
        # process; but for the first, and for stages, whose tasks this process runs itself.
        before, self.pending = self.pending, (step, record)
        agreed = self._flush_one(before)
        ends = self.tracing and step == self.profiled[-1]
        if step == self.first or self.layout.stage or ends:
            agreed = self._flush()
        if ends:
            self._end_trace()
        if step == self.first:
            self.watchdog.pause()  # what took so long was compiling
            self.watchdog.done()
        return agreed

    def _end_trace(self):
        if self.tracing:
            jax.profiler.stop_trace()
            self.tracing = False

    def _flush(self):
        before, self.pending = self.pending, None
        return self._flush_one(before)

    def _flush_one(self, pending):
        """Wait for a step and write its line; whether a process was asked to stop by then."""
        if pending is None:
            return False
        step, record = pending
        record = {name: np.asarray(x).item() for name, x in jax.device_get(record).items()}
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
        file = self.folder.path / "batches" / f"{step}.npz"
        if jax.process_index() == 0:
            file.parent.mkdir(exist_ok=True)
            rows = jax.tree_util.tree_leaves_with_path(self.source.whole(step))
            np.savez(file, **{trees.path(keys): x for keys, x in rows})
        told = (
            f"step {step}, with loss {record['loss']:g} and a norm of the gradients of "
            f"{record['norm']:g} (limit {self.settings.limit:g}); its batch is in {file}"
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
            f"go on without it: --resume --bad skip."
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
        values = np.mean(np.asarray(jax.device_get(found), np.float64), axis=0)
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
    """What a step is counted in: tokens, where the batch has an array of that name; else rows."""
    if isinstance(batch, dict) and "tokens" in batch:
        return "tokens", int(np.prod(batch["tokens"].shape))
    return "rows", jax.tree.leaves(batch)[0].shape[0]
