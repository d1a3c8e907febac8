"""The function `train`: what a run begins with, and from where it goes on."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import grain
import jax

from shardwise.checkpoint.lock import Lock
from shardwise.rules.agreement import together
from shardwise.run import metrics, signals, state
from shardwise.run.feed import feed
from shardwise.run.folder import Folder
from shardwise.run.loop import Result, Run
from shardwise.run.program import at_peak
from shardwise.run.settings import Settings
from shardwise.run.stored import check_resumable, flat
from shardwise.run.transformations import averaged, guarded

OWN = "processes.index"  # what each process has for itself
DECODER = ("devices", "sequence", "model", "data")  # settings of the command's own program


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
    facts = dict(facts or {})
    if isinstance(batches, grain.MapDataset):
        facts["first rows"] = feed(batches, settings.batch, layout).fingerprint()
    with signals.heard() as stop, contextlib.closing(_lock(folder)) as lock:
        saved = _begin(settings, folder, facts, unused, lock)
        source = feed(batches, settings.batch, layout, saved and saved["position"])
        run = Run(settings, layout, folder, loss, tx, source, has_aux, sample, facts, aux)
        run.validation = validation and feed(validation, settings.batch, layout)
        run.rate, run.at_peak = rate, at_peak(layout, flops)
        run.make(create, saved)
        return run.go(stop)


def _lock(folder):
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
        metrics.read(folder.metrics), metrics.read(folder.evaluations)  # an error before any step
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
