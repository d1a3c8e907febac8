"""The function `train`: from where a run goes on, its steps, and every way to end."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from shardwise import checkpoint, layouts, measure
from shardwise import tree as trees
from shardwise.checkpoint.directory import Lock
from shardwise.layouts import Layout, first_call
from shardwise.processes.system import together
from shardwise.run import hashes, metrics, signals, state
from shardwise.run.feed import Feed, Stream, feed
from shardwise.run.folder import Folder
from shardwise.run.notes import Notes, Watchdog
from shardwise.run.optimizers import averaged, guarded, released
from shardwise.run.reports import Report
from shardwise.run.settings import Settings, check_resumable, flat
from shardwise.run.state import Result

OWN = "processes.index"  # what each process has for itself
DECODER = ("devices", "sequence", "model", "data")  # settings of the command's own program


class BadStep(RuntimeError):
    """The error of a step whose gradients or loss are not finite, or above the limit."""


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
    flops: float | None = None,
    aux: Any = "sum",
) -> Result:
    """Train, from the start or from the newest whole checkpoint, until `settings.steps`.

    Args:
      settings: of which `model`, `data`, `sequence` and `devices` count for nothing here, nor does
        `optimizer` beside a `tx`; the run folder has the others.
      create: of a key, one device's parameters.
      loss: of (params, batch) or (params, batch, key), as in `shardwise.layouts`. Rows that look at
        each other are an error where the layout divides them: before its first step a new run
        judges the loss, as `objective.check` does.
      batches: a `grain.MapDataset` of single rows, endless, of which step k has the k-th
        `settings.batch`; or an iterator of whole batches with get_state and set_state, as Grain's.
      tx: an optax transformation; by default `settings.optimizer`'s.
      validation: as `batches`, a MapDataset, of which evaluations read the first batches.
      has_aux: whether the loss returns aux too. If that is a dict, its scalars and vectors stand in
        the metrics, and of an `objective.Mean` the quotient, exact for every padding.
      sample: of parameters, which are then whole on each device, a text for the log at each
        evaluation. Where they do not fit, leave it out, and sample from checkpoints.
      facts: what must be equal when the run goes on, beside the settings, such as checksums.
      flops: a step's model FLOPs (`plan.model_flops` of a decoder), from which each line of the
        metrics has its `mfu`: their share of the bfloat16 peak, where `topology.of_device` knows
        the devices.
      aux: how the aux of devices and microbatches become one, as in `layouts.step`: of a mean over
        rows say "mean", or return a `Mean`, since "sum" adds it up once for each part.

    Raises:
      FileExistsError: the folder has a run, and `settings.resume` is false.
      RuntimeError: another program's run is under way there.
      ValueError: other settings than the saved ones, or other facts; metrics that are damaged; aux
        with a name that the metrics use.
      BadStep: a bad step, where `settings.bad` says stop; the state before it is saved.
      Exception: what `shardwise.layouts` and `shardwise.checkpoint` raise.
    """
    unused = () if "program" in (facts or {}) else DECODER
    unused = unused if tx is None else (*unused, "optimizer")
    layout, folder = settings.layout.layout(), Folder(settings.run)
    rate = settings.optimizer.rate() if tx is None else None
    tx = settings.optimizer.transformation() if tx is None else tx
    tx = tx if settings.ema is None else averaged(tx, settings.ema)
    tx = guarded(tx, settings.limit, settings.bad == "stop")
    state.key_argument(loss, settings.seed, 0)  # an error before anything is compiled
    source = feed(batches, settings.batch, layout)
    held_out = validation and feed(validation, settings.batch, layout)
    facts = dict(facts or {}) | {"first rows": source.fingerprint()}
    with signals.heard() as stop, contextlib.closing(lock_of(folder)) as lock:
        saved = _begin(settings, folder, facts, unused, lock)
        if saved is not None:
            source.restore(saved["position"])
        peak = state.at_peak(layout, flops)
        given = settings, layout, folder, loss, tx, has_aux, aux, facts
        return _Run(*given, source, held_out, sample, rate, peak, stop, create, saved).go()


def lock_of(folder: Folder) -> Lock:
    """The lock of who trains in a run folder."""
    advice = "Wait until it has ended, or name another folder"
    return Lock(str(folder.path), "run", "has a run under way in", advice)


def _begin(settings, folder, facts, unused, lock):
    """The facts of the newest checkpoint; the settings that are used are compared and written."""
    now = {n: value for n, value in flat(settings).items() if n.partition(".")[0] not in unused}
    with together("run") as told:  # all have looked before one writes
        told |= {name: str(value) for name, value in (now | facts).items() if name != OWN}
        before = folder.settings()
        if before is not None and not settings.resume:
            raise FileExistsError(
                f"run: {folder.path} has a run already. Go on with it by --resume, or name another "
                f"folder by --run."
            )
        if before is not None:
            check_resumable(before, now, settings.run)
        if jax.process_index() == 0:
            lock.take()
        for file in (folder.metrics, folder.evaluations, folder.hashes):
            metrics.read(file)  # an error before any step
    saved = state.saved(folder) if settings.resume else None
    for name, value in (facts if saved else {}).items():
        if saved["facts"].get(name) != value:
            raise ValueError(
                f"run: {settings.run} was trained with other facts: {name} was "
                f"{saved['facts'].get(name)!r} and is {value!r}."
            )
    if jax.process_index() == 0:
        for first, last in metrics.missing(folder.metrics, saved["step"] if saved else 0):
            print(
                f"run: {folder.metrics} has no lines of steps {first} to {last}, which were done; "
                f"the run goes on from its checkpoint of step {saved['step']}, without them.",
                file=sys.stderr,
            )
    folder.write_settings(now)
    return saved


@dataclasses.dataclass
class _Run:
    """One process's part in a run, from its first step here to its last."""

    settings: Settings
    layout: Layout
    folder: Folder
    loss: Callable
    tx: Any
    has_aux: bool
    aux: Any
    facts: dict[str, Any]
    source: Feed | Stream
    held_out: Feed | Stream | None
    sample: Callable | None
    rate: Callable | None
    at_peak: float | None
    stop: signals.Stop
    create: Callable
    saved: dict[str, Any] | None

    def __post_init__(self):
        settings, layout, loss = self.settings, self.layout, self.loss
        self.notes = Notes(self.folder.path, jax.process_index())
        done = metrics.read(self.folder.metrics)  # of a run that is done, and asked for no more
        self.loss_value = float(done[-1]["loss"]) if done else float("nan")
        self.profiled, self.tracing, self.pending = settings.profiled(), False, None
        self.saved_at = self.saved and self.saved["step"]
        self.first = (self.saved_at or 0) + 1
        self.notes.say("compiling")
        made = layout, self.create, self.tx, settings.seed
        if self.saved is None:
            like = self.params, self.opt_state = state.create(*made)
        else:
            like = state.abstract(*made)
            items = dict(zip(("params", "opt_state"), like, strict=True))
            found = checkpoint.restore(self.folder.checkpoints, items, self.saved_at)
            self.params, self.opt_state = found["params"], released(found["opt_state"])
        given = layout, loss, self.tx, settings.seed, self.has_aux, self.aux, like
        self.program = state.step_program(*given)
        self.evaluation = state.evaluation(layout, loss, settings.ema, self.has_aux)

    def go(self) -> Result:
        """Run steps until the last one, or until a process was asked to stop."""
        settings, step = self.settings, self.first - 1
        held = max(measure.bytes_on_devices((self.params, self.opt_state)).values())
        known = self.source.shapes(), held, self.rate, self.at_peak
        with contextlib.ExitStack() as stack:
            report = Report(settings, self.folder, self.first, *known)
            self.report = stack.enter_context(contextlib.closing(report))
            stack.callback(self._end_trace)  # a run may end within it
            self.watchdog = stack.enter_context(Watchdog(self.notes, settings.processes.hang))
            batches = self.source.go(self.first, settings.steps)
            for step in range(self.first, settings.steps + 1):
                ends = self._advance(step, batches)
                every = settings.evaluation.every
                evaluates = self.held_out is not None and every > 0 and step % every == 0
                saves = step % settings.save_every == 0
                hashed = settings.hash_every > 0 and step % settings.hash_every == 0
                if evaluates or saves or hashed:
                    ends = self._flush() or ends  # where each step is looked at, none tells later
                if hashed:
                    self._hash(step)
                if ends:
                    break
                if evaluates:
                    self._evaluate(step)
                if saves:
                    self._save(step)
                if evaluates or saves or hashed:
                    report.restart()
            stopped = step < settings.steps and self.first <= settings.steps
            self._flush()
            self._save(step)
            with self._apart("leaving", step):
                checkpoint.wait(self.folder.checkpoints)
                report.finish(step, stopped)
            self.notes.say("done")
        values = self.params, self.opt_state, settings.ema
        return Result(self.folder.path, step, self.loss_value, stopped, *values)

    def _advance(self, step, batches):
        """Run one step; return whether the processes agreed, a step ago, to stop after it."""
        if step in self.profiled and not self.tracing:
            self._flush()
            self._settle()  # a trace of whole steps
            jax.profiler.start_trace(self.folder.path / "profile")
            self.tracing = True
        self.notes.say("reading", step=step)
        batch = next(batches)
        self.notes.say("compiling" if step == self.first else "stepping")
        if step == 1:  # what goes on was judged when it began
            self._judge(batch)
        asked = state.flags(self.layout, self.stop.signal is not None)
        given = self.params, self.opt_state, batch, np.int32(step), asked
        with jax.profiler.StepTraceAnnotation("step", step_num=step):
            self.params, self.opt_state, record = self.program(*given)
        # A step is looked at when the next one is under way, so that devices never wait for this
        # process; but for the first.
        agreed = self._flush()
        self.pending = step, record
        ends = self.tracing and step == self.profiled[-1]
        if step == self.first or ends:
            agreed = self._flush()
        if ends:
            self._settle()
            self._end_trace()
        if step == self.first:
            self.watchdog.pause()  # what took so long was compiling
            self.watchdog.done()
        return agreed

    def _judge(self, batch):
        """Raise where the loss is another function of parts of the batch, as the layout cuts it."""
        key = state.key_argument(self.loss, self.settings.seed, 1).get("key")
        given = self.layout, self.loss, self.params, batch, (), key
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
        """Wait for the pending step, write its line, return whether a process was asked to stop."""
        if self.pending is None:
            return False
        (step, record), self.pending = self.pending, None
        record = {name: np.asarray(x).tolist() for name, x in jax.device_get(record).items()}
        stop, bad = record.pop("stop"), record.pop("bad")
        self.loss_value = record["loss"]
        line = self.report.line(step, record, bad)
        self.watchdog.done()
        self.notes.say(self.notes.last.doing, line=self.report.say(line))
        if bad or not np.isfinite(record["loss"]):
            self._bad(step, record, applied=not bad)
        return bool(stop)

    def _bad(self, step, record, applied):
        """Keep the batch of a bad step, and end the run where that is asked."""
        name = f"batches/{step}.npz"
        if jax.process_index() == 0:
            file = self.folder.path / name
            file.parent.mkdir(exist_ok=True)
            np.savez(file, **dict(trees.leaves(self.source.whole(step))))
        told = (
            f"step {step}, with loss {record['loss']:g} and a norm of the gradients of "
            f"{record['norm']:g} (limit {self.settings.limit:g}); its batch is in "
            f"{self.settings.run / name}"
        )
        if self.settings.bad == "skip":
            self.report.print(f"{'Bad' if applied else 'Skipped'}: {told}.")
            return
        if not applied:  # the guard has held the state since
            self.opt_state = released(self.opt_state)
            self._save(step - 1)
        checkpoint.wait(self.folder.checkpoints)
        raise BadStep(
            f"run: bad {told}. The state of step {self.saved_at} is saved. Look at the batch, or "
            f"go on without it, with resume=True and bad='skip' (--resume --bad skip)."
        )

    @contextlib.contextmanager
    def _apart(self, doing, step):
        """A part of the run that is no step, and takes what it takes."""
        self.notes.say(doing, step=step)
        self.watchdog.pause()
        yield
        self.watchdog.done()

    def _evaluate(self, step):
        with self._apart("evaluating", step):
            batches = self.held_out.go(1, self.settings.evaluation.batches)
            found = [self.evaluation(self.params, self.opt_state, batch) for batch in batches]
            values = state.together(found)
            whole = self.sample and layouts.whole(self.layout, self.params)
            text = self.sample(whole) if self.sample else ""
            self.report.evaluated(step, *values, text=text)

    def _hash(self, step):
        with self._apart("hashing", step):
            arrays = {"params": self.params, "opt_state": self.opt_state}
            self.report.hashed(hashes.line(step, self.loss_value, arrays))

    def _save(self, step):
        if self.saved_at == step:
            return
        with self._apart("saving", step):
            items = {"params": self.params, "opt_state": self.opt_state}
            items["run"] = {"step": step, "position": self.source.state(step), "facts": self.facts}
            checkpoint.save(self.folder.checkpoints, step, items, keep=self.settings.keep)
            self.saved_at = step
