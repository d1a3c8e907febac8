"""The function that runs each step, one program where the layout is one; that of evaluations."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import layouts, objective, topology
from shardwise.layouts import Layout
from shardwise.run import keys
from shardwise.run.state import field, mean

# What a line of the metrics says itself.
RESERVED = frozenset(
    """bad bytes gradient_norm learning_rate loss mfu norm rows rows_per_second seconds step stop
    time tokens tokens_per_second""".split()
)


def step_program(
    layout: Layout, loss: Callable, tx: Any, seed: int, has_aux: bool, aux: Any = "sum"
) -> Callable:
    """(params, opt_state, batch, step, flags) -> (params, opt_state, record); the former donated.

    `flags` is a vector with a number for each device, 1 where its process was asked to stop. The
    record is a dict that every process has: loss, norm, bad, stop, and what `_recorded` takes of
    aux, of which `aux` says how parts become one.
    """
    run = layouts.step(layout, loss, tx, has_aux, aux, check=False)
    takes_key(loss)  # or says what it takes that a run does not give
    own = functools.partial(key_of, loss, seed)

    def train_step(params, opt_state, batch, step, flags):
        params, opt_state, value, *extra = run(params, opt_state, batch, **own(step))
        record = _recorded(extra[0]) if extra and isinstance(extra[0], dict) else {}
        record |= {"loss": value, "stop": flags.max()}
        record |= {name: field(opt_state, name) for name in ("norm", "bad")}
        return params, opt_state, record

    if layout.staged:
        return train_step
    # The same program for every step: what comes out is laid out as what goes in.
    whole = NamedSharding(layout.auto, P())

    def jitted(params, opt_state, *rest):
        shardings = jax.tree.map(lambda x: x.sharding, (params, opt_state))
        leaves, structure = jax.tree.flatten((*shardings, whole))
        return _jitted(train_step, structure, tuple(leaves))(params, opt_state, *rest)

    return jitted


def _recorded(aux):
    """The scalars and vectors of aux, and the quotient of each `Mean`, by their names.

    Raises:
      ValueError: a name by which the metrics have something else.
    """
    if taken := sorted(RESERVED.intersection(aux)):
        raise ValueError(
            f"run.train: the loss's aux has {taken[0]!r}, which the metrics have already: call it "
            f"something else. Theirs are {', '.join(sorted(RESERVED))}."
        )
    means = {name: x for name, x in aux.items() if isinstance(x, objective.Mean)}
    found = {n: x for n, x in aux.items() if hasattr(x, "ndim") and x.ndim <= 1}
    return found | {name: objective.quotient(x) for name, x in means.items()}


@functools.lru_cache(maxsize=4)
def _jitted(step, structure, leaves):
    shardings = jax.tree.unflatten(structure, leaves)
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings)


def flags(layout: Layout, asked: bool) -> Any:
    """The vector that says of each device whether its process was asked to stop."""
    if layout.staged:
        return np.asarray([asked], np.int32)
    cut = NamedSharding(layout.auto, P(layout.auto.axis_names))
    shape = (layout.auto.size,)
    return jax.make_array_from_callback(shape, cut, lambda index: np.asarray([asked], np.int32))


def at_peak(layout: Layout, flops: float | None) -> float | None:
    """The seconds of a step's products at the chips' bfloat16 peak, where both are known."""
    chip = topology.of_device(layout.auto.devices.flat[0].device_kind)
    return flops and chip and flops / (layout.auto.size * chip.peak())


def evaluation(layout: Layout, loss: Callable, decay: float | None, has_aux: bool) -> Callable:
    """(params, opt_state, batch) -> [(loss, count) of params, those of their mean]; no dropout."""
    mean_and_count = layouts.value(layout, _counted(loss, has_aux), has_aux=True)

    def both(params, opt_state, batch):
        averages = [] if decay is None else [mean(params, opt_state, decay)]
        return [mean_and_count(each, batch) for each in (params, *averages)]

    return both if layout.staged else jax.jit(both)


def _counted(loss, has_aux):
    """A function of (loss, the count by which batches are weighed: 1 of a mean over rows)."""
    bare = objective.normal(loss, has_aux)

    def counted(params, batch):
        found, _ = bare(params, batch)
        if found.count is None:
            return found.total, jnp.float32(1)
        return found, jnp.asarray(found.count, jnp.float32)

    return counted


def together(found: Sequence[Sequence[tuple[Any, Any]]]) -> list[float]:
    """The loss of several batches together, for the parameters and, if it is kept, their mean."""
    values = np.asarray(jax.device_get(found), np.float64)  # [batches, evaluated, loss and count]
    total = np.sum(values[..., 0] * values[..., 1], axis=0)
    count = np.sum(values[..., 1], axis=0)
    return (total / np.where(count == 0, 1, count)).tolist()


def key_of(loss: Callable, seed: int, step: Any) -> dict[str, Any]:
    """The arguments with a step's key, as the loss takes it: {"key": key}, or {}."""
    return {"key": keys.of_step(seed, step)} if takes_key(loss) else {}


def takes_key(loss: Callable) -> bool:
    """Whether a loss has a parameter `key`.

    Raises:
      TypeError: it needs more than parameters, batch and key.
    """
    taken = inspect.signature(loss).parameters
    given = getattr(loss, "keywords", {}) or {}
    needed = [n for n, p in taken.items() if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    if further := [name for name in needed[2:] if name not in ("key", *given)]:
        raise TypeError(
            f"run.train: the loss needs {further[0]!r}, and gets (params, batch) and key= by name: "
            f"if that is the random key, call it key; else bind it by functools.partial."
        )
    return "key" in taken and "key" not in given
