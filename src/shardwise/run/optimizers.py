"""The optimizer of a run by its name in optax, the mean of its parameters, a guard of its steps.

Mean and guard are optax transformations, so that every layout cuts, updates, saves and restores
what they hold as it does the optimizer's own state, and their results are one device's.
"""

import dataclasses
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer and its schedule, each a function of optax (or optax.contrib) by name.

    A setting that the function does not take is not given to it.
    """

    name: str = "adamw"
    schedule: str = "warmup_constant_schedule"
    peak: float = 3e-3  # learning rate after the warm-up
    warmup: int = 20  # steps
    decay: int = 1000  # the step at which a schedule that decays has arrived, warm-up included
    end: float = 0.0  # the learning rate there
    weight_decay: float = 0.1
    clip: float | None = 1.0  # of the gradients' global norm

    def rate(self) -> Any:
        """The learning rate by step, counted from 0.

        Raises:
          ValueError: optax has no such schedule, or it needs more than what stands here.
        """
        given = dict(
            init_value=0.0,
            value=self.peak,
            peak_value=self.peak,
            warmup_steps=self.warmup,
            transition_steps=self.decay,
            decay_steps=self.decay,
            end_value=self.end,
        )
        if self.schedule in ("linear_schedule", "cosine_decay_schedule"):
            given["init_value"] = self.peak
        return _called("schedule", self.schedule, **given)

    def transformation(self) -> optax.GradientTransformation:
        """The optax transformation: clipping, then the optimizer.

        Raises:
          ValueError: as `rate`, for either name.
        """
        given = dict(learning_rate=self.rate(), weight_decay=self.weight_decay)
        tx = _called("name", self.name, **given)
        return tx if self.clip is None else optax.chain(optax.clip_by_global_norm(self.clip), tx)


def _called(setting, name, **given):
    function = getattr(optax, name, None) or getattr(optax.contrib, name, None)
    if not callable(function):
        raise ValueError(
            f"run: optimizer.{setting}={name!r}; optax has no such function, nor optax.contrib."
        )
    takes = inspect.signature(function).parameters
    lacks = [n for n, p in takes.items() if p.default is p.empty and n not in given]
    if lacks:
        raise ValueError(
            f"run: optax.{name} needs {', '.join(lacks)}, which the settings do not have; make it "
            f"in a file of yours, and hand it to run.train(..., tx=...)."
        )
    return function(**{n: value for n, value in given.items() if n in takes})


class Averaged(NamedTuple):
    """The optimizer's state, and the sum from which the mean of the parameters follows."""

    count: jax.Array
    sum: Any  # of (1 - decay) decay^age times the parameters after each step
    inner: Any


class Guarded(NamedTuple):
    """The state before a bad step or after a good one, and what the guard saw."""

    norm: jax.Array  # of the step's gradients, before clipping
    bad: jax.Array  # whether this step was bad
    halted: jax.Array  # whether one was, after which nothing changes any more
    inner: Any


def averaged(tx: Any, decay: float) -> optax.GradientTransformation:
    """`tx`, keeping an exponential moving average of the parameters beside its own state.

    The sum starts from zero; `correction` divides by what its weights add up to (Kingma and Ba,
    2015, section 3), so that after k steps the mean is over those k and nothing else. It is held in
    float32 at least: in bfloat16, a hundredth of what is new would be rounded away.
    """

    def init(params):
        sums = jax.tree.map(lambda p: jnp.zeros(p.shape, wide(p.dtype)), params)
        return Averaged(jnp.zeros((), jnp.int32), sums, tx.init(params))

    def update(grads, state, params=None, **extra):
        updates, inner = tx.update(grads, state.inner, params, **extra)
        new = optax.apply_updates(params, updates)
        sums = jax.tree.map(
            lambda s, p: decay * s + (1 - decay) * p.astype(s.dtype), state.sum, new
        )
        return updates, Averaged(state.count + 1, sums, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def wide(dtype: Any) -> Any:
    """The dtype in which the sum of parameters of a dtype is held."""
    return jnp.promote_types(dtype, jnp.float32)


def correction(decay: float, count: Any) -> Any:
    """The number by which the sum after `count` steps is divided: 1 - decay^count."""
    return 1 - decay**count


def guarded(tx: Any, limit: float = float("inf"), halt: bool = False) -> Any:
    """`tx`, but for steps whose gradients' norm is not finite or above `limit`.

    Such a step changes neither parameters nor state. With `halt`, nor does any step after it, so
    that whoever hears of it later still has what was good.
    """

    def init(params):
        no = jnp.zeros((), bool)
        return Guarded(jnp.zeros((), jnp.float32), no, no, tx.init(params))

    def update(grads, state, params=None, **extra):
        norm = optax.tree.norm(grads).astype(jnp.float32)
        bad = ~(jnp.isfinite(norm) & (norm <= limit))
        still = state.halted if halt else jnp.zeros((), bool)
        skip = bad | still
        updates, inner = tx.update(grads, state.inner, params, **extra)
        updates = jax.tree.map(lambda u: jnp.where(skip, jnp.zeros_like(u), u), updates)
        inner = jax.tree.map(lambda old, new: jnp.where(skip, old, new), state.inner, inner)
        return updates, Guarded(norm, bad, (still | bad) if halt else still, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def released(state: Guarded) -> Guarded:
    """The state of a guard that lets steps pass again."""
    return state._replace(halted=jax.device_put(np.False_, state.halted.sharding))
