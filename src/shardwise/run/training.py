"""The function `train`: from where a run goes on, its steps, and every way to end."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from shardwise import checkpoint, layouts, measure, topology
from shardwise import tree as trees
from shardwise.checkpoint.directory import Lock
from shardwise.run import hashes, signals, state
from shardwise.run.feed import feed
from shardwise.run.folder import Folder
from shardwise.run.notes import Notes
from shardwise.run.optimizers import averaged, guarded, released
from shardwise.run.reports import Report
from shardwise.run.settings import Settings
from shardwise.run.state import Result


class BadStep(RuntimeError):
    """The error of a bad step: its loss or its gradients' norm is not finite, or the norm is above
    `settings.limit`. Its update is left out. With `bad="skip"` none is raised.
    """


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
    """Train until `settings.steps`, from the start or from the newest whole checkpoint.

    Args:
      settings: the run's; `model`, `data`, `sequence`, `devices` and `evaluation.sample` are not
        used here, nor is `optimizer` beside a `tx`. The run folder keeps those that are.
      create: a function of a key to the parameters as one device makes them.
      loss: a function of (params, batch), or of these and `key`, by that name, to an
        `objective.Mean`, or to a scalar that is a mean over rows; with `has_aux` to (that, aux). A
        new run judges it before its first step, as `objective.check` does. Evaluations call it
        without a `key`, which needs a default for that.
      batches: an endless `grain.MapDataset` of single rows, of which step k takes the k-th
        `settings.batch`; or an iterator, with get_state and set_state as Grain's, of batches of
        `settings.batch` rows. Each of several processes gets the same whole batches from its own.
      tx: an optax transformation; None is `settings.optimizer`'s.
      validation: a `grain.MapDataset` of rows, of which evaluations read the first batches; without
        one there are no evaluations, and no samples. Each is a line of evaluations.jsonl: "step",
        "loss", with an `ema` "loss_of_mean", that of the mean of the parameters, and "sample".
      has_aux: whether the loss returns aux, a pytree. If that is a dict, its scalars and vectors
        stand in the metrics, and of an `objective.Mean` the quotient, exact for every padding.
      sample: a function of the parameters to a text, for the log at each evaluation. It gets them
        whole on each device: leave it out where they do not fit.
      facts: a dict of plain data, such as checksums by name, which must be equal when the run goes
        on. So must settings that decide numbers: `seed`, `batch`, `ema`, `optimizer`,
        `layout.exact`; in an exact run also layout.dtype, .kernel and .remat. Others may differ.
      flops: the model FLOPs of a step (`plan.model_flops` of a decoder). With them metrics have the
        `mfu`, their share of the bfloat16 peak, if `topology.of_device` knows the devices.
      aux: how the aux of devices and microbatches become one, as in `layouts.step`: for a mean over
        rows say "mean", or return a `Mean`, since "sum" adds it up once for each part.

    Returns:
      A `Result`, with the arrays laid out as in the run. Metrics are in its folder, a line of JSON
      in metrics.jsonl for each step: "step", "loss", "gradient_norm", "seconds", "bytes" (of the
      state on a device), "time", "rows" and "rows_per_second" ("tokens" and "tokens_per_second" of
      a dict with "tokens"); with `flops` "mfu", without `tx` "learning_rate", and "bad" of a bad
      one. A dict of aux uses none of these names, nor "stop".

    Raises:
      FileExistsError: the folder has a run, and `settings.resume` is false.
      RuntimeError: another program's run is under way there.
      ValueError: facts, or settings that must not, differ from the saved ones; metrics are damaged;
        aux has a taken name; `settings.batch` does not split over devices and microbatches.
      TypeError: `batches` or `loss` are not of the kinds above.
      BadStep: a bad step, where `settings.bad` says stop; the state before it is saved.
      Exception: what `shardwise.layouts` and `shardwise.checkpoint` raise.
    """
    given = create, (loss, has_aux, aux), batches, tx, validation, sample, dict(facts or {}), flops
    with contextlib.ExitStack() as stack:
        return _Run(stack, settings, *given).go()


def lock_of(folder: Folder) -> Lock:
    """The lock of who trains in a run folder."""
    advice = "Wait until it has ended, or name another folder"
    return Lock(str(folder.path), "run", "has a run under way in", advice)


class _Run:
    """One process's part in a run; what it has opened, `stack` closes."""

    def __init__(
        self, stack, settings, create, judged, batches, tx, validation, sample, facts, flops
    ):
        loss, has_aux, _ = judged
        unused = () if "program" in facts else ("devices", "sequence", "model", "data")
        unused = unused if tx is None else (*unused, "optimizer")
        layout, seed = settings.layout.layout(), settings.seed
        self.settings, self.layout, self.folder = settings, layout, Folder(settings.run)
        rate = settings.optimizer.rate() if tx is None else None
        tx = settings.optimizer.transformation() if tx is None else tx
        tx = tx if settings.ema is None else averaged(tx, settings.ema)
        tx = guarded(tx, settings.limit, settings.bad == "stop")
        state.key_argument(loss, seed, 0)  # an error before anything is compiled
        self.source, self.sample = feed(batches, settings.batch, layout), sample
        self.held_out = validation and feed(validation, settings.batch, layout)
        self.facts = facts | {"first rows": self.source.fingerprint()}

        self.stop = signals.standing() or stack.enter_context(signals.Stop())
        lock = stack.enter_context(contextlib.closing(lock_of(self.folder)))
        saved = state.claim(settings, self.folder, self.facts, unused, lock)
        if saved and saved["position"] is not None:
            self.source.restore(saved["position"])
        self.notes = Notes(self.folder.path, jax.process_index(), settings.processes.hang)
        self.notes.say("compiling")
        self.saved_at = saved and saved["step"]
        self.first, self.pending = (self.saved_at or 0) + 1, None
        begun = state.begun(layout, create, tx, seed, self.folder, self.saved_at)
        self.params, self.opt_state = begun  # held nowhere else: a step donates them
        self.program = state.step_program(layout, *judged, tx, seed, begun)
        self.evaluation = state.evaluation(layout, loss, settings.ema, has_aux)
        self.judge = functools.partial(state.judge, layout, *judged, seed)
        held = max(measure.bytes_on_devices(begun).values())
        chip = topology.of_device(layout.auto.devices.flat[0].device_kind)
        at_peak = flops and chip and flops / (layout.auto.size * chip.peak())
        known = self.source.some, held, rate, at_peak
        self.report = Report(settings, self.folder, self.first, *known)
        self.trace = stack.enter_context(contextlib.ExitStack())  # a run may end within it
        stack.enter_context(self.notes)

    def go(self) -> Result:
        """Run steps until the last one, or until a process was asked to stop."""
        settings, step = self.settings, self.first - 1
        evaluates = settings.evaluation.every if self.held_out is not None else 0
        periods = {self._hash: settings.hash_every, self._evaluate: evaluates}
        periods[self._save] = settings.save_every
        batches = self.source.go(self.first, settings.steps)
        for step in range(self.first, settings.steps + 1):
            ends = self._advance(step, batches)
            due = [do for do, every in periods.items() if every > 0 and step % every == 0]
            if due:  # where each step is looked at, none tells later
                ends = self._flush() or ends
            for do in due:
                if do == self._hash or not ends:
                    do(step)
            if ends:
                break
            if due:
                self.report.restart()
        stopped = step < settings.steps and self.first <= settings.steps
        self._flush()
        self._save(step)
        self.notes.say("leaving", step=step)
        checkpoint.wait(self.folder.checkpoints)
        self.report.finish(step, stopped)
        self.notes.say("done")
        values = self.params, self.opt_state, settings.ema
        return Result(self.folder.path, step, self.report.loss, stopped, *values)

    def _advance(self, step, batches):
        """Run one step; return whether the processes agreed, a step ago, to stop after it."""
        profiled, first = self.settings.profiled(), step == self.first
        if step in profiled and (first or step == profiled.start):
            self._flush()
            self.notes.say("tracing")
            # A trace of whole steps, on every device: a record is there when the first has it.
            jax.block_until_ready(self._arrays())
            self.trace.enter_context(jax.profiler.trace(self.folder.path / "profile"))
        self.notes.say("reading", step=step)
        batch = next(batches)
        self.notes.say("compiling" if first else "stepping")

        def given():
            asked = state.flags(self.layout, self.stop.signal is not None)
            return self.params, self.opt_state, batch, np.int32(step), asked

        if step == 1:  # what goes on was judged when it began
            self.judge(self.program, given())
        with jax.profiler.StepTraceAnnotation("step", step_num=step):
            self.params, self.opt_state, record = self.program(*given())
        # A step is looked at when the next one is under way, so that devices never wait for this
        # process; but for the first.
        agreed = self._flush()
        self.pending = step, record
        ends_trace = step + 1 == profiled.stop
        if first or ends_trace:
            agreed = self._flush()
        if ends_trace:
            self.notes.say("tracing")
            jax.block_until_ready(self._arrays())
            self.trace.close()
        return agreed

    def _flush(self):
        """Wait for the pending step, write its line, return whether a process was asked to stop."""
        if self.pending is None:
            return False
        (step, record), self.pending = self.pending, None
        record = {name: np.asarray(x).tolist() for name, x in jax.device_get(record).items()}
        stop, bad = record.pop("stop"), record.pop("bad")
        self.notes.say(self.notes.last.doing, line=self.report.step(step, record, bad))
        if bad:
            self._bad(step, record)
        return bool(stop)

    def _bad(self, step, record):
        """Keep the batch of a bad step, and end the run where that is asked."""
        name = f"batches/{step}.npz"
        if jax.process_index() == 0:
            file = self.folder.path / name
            file.parent.mkdir(exist_ok=True)
            np.savez(file, **dict(trees.leaves(self.source.whole(step))))
        told = (
            f"step {step}, with loss {record['loss']:g} and a norm of the gradients of "
            f"{record['gradient_norm']:g} (limit {self.settings.limit:g}); its batch is in "
            f"{self.settings.run / name}"
        )
        if self.settings.bad == "skip":
            self.report.print(f"Skipped: {told}.")
            return
        self.opt_state = released(self.opt_state)  # the guard has held it since
        self._save(step - 1)
        checkpoint.wait(self.folder.checkpoints)
        raise BadStep(
            f"run: bad {told}. The state of step {self.saved_at} is saved. Look at the batch, or "
            f"go on without it, with resume=True and bad='skip' (--resume --bad skip)."
        )

    def _evaluate(self, step):
        self.notes.say("evaluating", step=step)
        batches = self.held_out.go(1, self.settings.evaluation.batches)
        values = self.evaluation(self.params, self.opt_state, batches)
        text = self.sample(layouts.whole(self.layout, self.params)) if self.sample else ""
        self.report.evaluated(step, *values, text=text)

    def _hash(self, step):
        self.notes.say("hashing", step=step)
        line = hashes.line(step, self.report.loss, self._arrays())
        self.report.add(self.folder.hashes, line)

    def _save(self, step):
        if self.saved_at == step:
            return
        self.notes.say("saving", step=step)
        facts = {"step": step, "position": self.source.state(step), "facts": self.facts}
        items = self._arrays() | {"run": facts}
        checkpoint.save(self.folder.checkpoints, step, items, keep=self.settings.keep)
        self.saved_at = step

    def _arrays(self):
        return {"params": self.params, "opt_state": self.opt_state}
