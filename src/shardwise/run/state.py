"""The state of a run, the programs that change it, and keys, which seed and step alone decide."""

import contextlib
import dataclasses
import functools
import inspect
import zlib
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import checkpoint, layouts, objective
from shardwise.checkpoint.directory import Lock
from shardwise.layouts import Layout, first_call
from shardwise.objective.means import normal, quotient
from shardwise.processes import system
from shardwise.run import reports
from shardwise.run.folder import Folder
from shardwise.run.optimizers import released
from shardwise.run.settings import Settings, check_resumable, flat

# What a line of the metrics says itself.
_RESERVED = frozenset(
    """bad bytes gradient_norm learning_rate loss mfu rows rows_per_second seconds step stop time
    tokens tokens_per_second""".split()
)


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a run, which `train` returns.

    Fields:
      folder: the run folder.
      step: the step that was done last.
      loss: its mean loss, NaN if no step was done.
      stopped: whether a signal stopped the run before its last step.
      params: the parameters, laid out as in the run.
      opt_state: the state of `guarded`; the optimizer's own is `opt_state.inner`, or
        `opt_state.inner.inner` if there is a mean (`averaged`).
      ema: the decay of the parameters' `mean`, None if there is none.
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
        """The bias-corrected mean of the parameters, a tree like `params`; None without `ema`."""
        return self.ema and mean(self.params, self.opt_state, self.ema)


def stream(key: jax.Array, name: str) -> jax.Array:
    """A key made of `key` and a name: `stream(key, "dropout")` is independent of other names'."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def key_of_seed(seed: Any) -> jax.Array:
    """The key with which parameters are made."""
    return stream(jax.random.key(seed), "parameters")


def key_of_step(seed: Any, step: Any) -> jax.Array:
    """The key that the loss gets at a step."""
    return jax.random.fold_in(stream(jax.random.key(seed), "steps"), step)


def create(layout: Layout, make: Callable, tx: Any, seed: int) -> tuple:
    """(params, opt_state), each array born where it lives, by one program of a key; on CPU, since
    it runs once, without optimizing, which takes two thirds of the compiler's time.
    """
    born = functools.partial(layouts.init, layout, make, tx)
    if not layout.exact:
        options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
        born = jax.jit(born, compiler_options=options)
    return born(key_of_seed(seed))


def abstract(layout: Layout, make: Callable, tx: Any, seed: int) -> tuple:
    """The shapes with shardings of what `create` makes; no arrays are held."""
    params = jax.eval_shape(make, key_of_seed(seed))
    shapes = params, jax.eval_shape(tx.init, params)
    shards = layouts.shardings(layout, params, tx)
    return jax.tree.map(lambda x, to: x.update(sharding=to), shapes, shards)


def begun(
    layout: Layout, make: Callable, tx: Any, seed: int, folder: Folder, step: int | None
) -> tuple:
    """(params, opt_state): made, or restored where a step is saved: no two states are held."""
    if step is None:
        return create(layout, make, tx, seed)
    params, opt_state = abstract(layout, make, tx, seed)
    like = {"params": params, "opt_state": opt_state}
    found = checkpoint.restore(folder.checkpoints, like, step)
    return found["params"], released(found["opt_state"])


def mean(params: Any, opt_state: Any, decay: float) -> Any:
    """The mean that `averaged` keeps in the state, corrected; of `params` only the dtypes count."""
    by = 1 - decay**opt_state.inner.count  # what the weights of the sum add up to
    return jax.tree.map(lambda x, p: (x / by).astype(p.dtype), opt_state.inner.sum, params)


def saved(folder: Folder) -> dict[str, Any] | None:
    """The facts of the newest whole checkpoint, None where there is none."""
    if not folder.checkpoints.exists() or checkpoint.latest(folder.checkpoints) is None:
        return None
    return checkpoint.restore(folder.checkpoints, {"run": None})["run"]


def claim(
    settings: Settings, folder: Folder, facts: dict, unused: Collection[str], lock: Lock
) -> dict[str, Any] | None:
    """What `saved` says of a run that goes on; settings, but for the `unused`, are compared."""
    now = {n: value for n, value in flat(settings).items() if n.partition(".")[0] not in unused}
    with system.together("run") as told:  # all have looked before one writes
        told |= now | facts
        told.pop("processes.index", None)  # what each process has for itself
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
        for file in folder.lines:
            reports.read(file)  # an error before any step
    found = saved(folder) if settings.resume else None
    for name, value in (facts if found else {}).items():
        if found["facts"].get(name) != value:
            raise ValueError(
                f"run: {settings.run} was trained with other facts: {name} was "
                f"{found['facts'].get(name)!r} and is {value!r}."
            )
    folder.write_settings(now)
    return found


def step_program(
    layout: Layout, loss: Callable, has_aux: bool, aux: Any, tx: Any, seed: int, state: tuple
) -> Callable:
    """(params, opt_state, batch, step, flags) -> (params, opt_state, record); the former donated,
    and laid out as in `state`, the first ones.

    Every process has the record: loss, gradient_norm, bad, stop, the largest of `flags`, and what
    `_recorded` takes of aux, of which `aux` says how parts become one.
    """
    run = layouts.step(layout, loss, tx, has_aux, aux, check=False)

    def train_step(params, opt_state, batch, step, flags):
        key = key_argument(loss, seed, step)
        params, opt_state, value, *extra = run(params, opt_state, batch, **key)
        record = _recorded(extra[0]) if extra and isinstance(extra[0], dict) else {}
        record |= dict(loss=value, gradient_norm=opt_state.norm)
        record |= dict(bad=opt_state.bad, stop=flags.max())
        return params, opt_state, layouts.whole(layout, record) if layout.exact else record

    if layout.exact:  # it is several programs
        return train_step
    shardings = jax.tree.map(lambda x: x.sharding, state)
    out = (*shardings, NamedSharding(layout.auto, P()))
    return jax.jit(train_step, donate_argnums=(0, 1), out_shardings=out)


def _recorded(aux):
    """The scalars and vectors of aux, and the quotient of each `Mean`, by their names."""
    if taken := sorted(_RESERVED.intersection(aux)):
        raise ValueError(
            f"run.train: the loss's aux has {taken[0]!r}, which the metrics have already: call it "
            f"something else. Theirs are {', '.join(sorted(_RESERVED))}."
        )
    found = {n: quotient(x) if isinstance(x, objective.Mean) else x for n, x in aux.items()}
    return {name: x for name, x in found.items() if getattr(x, "ndim", 2) <= 1}


def judge(
    layout: Layout, loss: Callable, has_aux: bool, aux: Any, seed: int, program: Any, given: tuple
) -> None:
    """Raise where the loss is another function of parts of the batch, as the layout cuts it; beside
    that a thread compiles the step, the `program` of what is `given`.

    It is traced before: a loss need not bear two threads. What fails, its call says; what is
    several programs has nothing to lower.
    """
    params, _, batch, *_ = given
    key = key_argument(loss, seed, 1).get("key")
    with ThreadPoolExecutor(1) as pool:
        with contextlib.suppress(Exception):
            pool.submit(program.lower(*given).compile)
        if reason := first_call.judge(layout, loss, params, batch, (), key, has_aux, aux):
            first_call.warn(reason, "run.train")


def flags(layout: Layout, asked: bool) -> Any:
    """The vector that says of each device whether its process was asked to stop."""
    cut, shape = NamedSharding(layout.auto, P(layout.auto.axis_names)), (layout.auto.size,)
    return jax.make_array_from_callback(shape, cut, lambda index: np.asarray([asked], np.int32))


def evaluation(layout: Layout, loss: Callable, decay: float | None, has_aux: bool) -> Callable:
    """(params, opt_state, batches) -> [the loss of these together, that of params' mean]."""
    bare = normal(loss, has_aux)  # without a key: no dropout

    def counted(params, batch):  # by what batches are weighed: 1 of a mean over rows
        found, _ = bare(params, batch)
        return found, jnp.asarray(1 if found.count is None else found.count, jnp.float32)

    mean_and_count = layouts.value(layout, counted, has_aux=True)

    def both(params, opt_state, batch):
        averages = [] if decay is None else [mean(params, opt_state, decay)]
        return [mean_and_count(each, batch) for each in (params, *averages)]

    program = both if layout.exact else jax.jit(both)

    def evaluate(params, opt_state, batches):
        found = [program(params, opt_state, batch) for batch in batches]
        # [batches, evaluated, loss and count]
        losses, counts = np.moveaxis(np.asarray(jax.device_get(found), np.float64), -1, 0)
        count = counts.sum(axis=0)
        return (np.sum(losses * counts, axis=0) / np.where(count == 0, 1, count)).tolist()

    return evaluate


def key_argument(loss: Callable, seed: int, step: Any) -> dict[str, Any]:
    """The argument with a step's key, as the loss takes it: {"key": key}, or {}."""
    taken = inspect.signature(loss).parameters
    given = getattr(loss, "keywords", {}) or {}
    needed = [n for n, p in taken.items() if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    if further := [name for name in needed[2:] if name not in ("key", *given)]:
        raise TypeError(
            f"run.train: the loss needs {further[0]!r}, and gets (params, batch) and key= by name: "
            f"if that is the random key, call it key; else bind it by functools.partial."
        )
    return {"key": key_of_step(seed, step)} if "key" in taken and "key" not in given else {}
