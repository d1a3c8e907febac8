"""The mean of a run's parameters and a guard of its steps, as optax transformations: every layout
cuts, updates, saves and restores what they hold as it does the optimizer's own state.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax


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

    The state has `count`, the number of steps, `sum`, and `inner`, the state of `tx`. The sum
    starts from zero: divided by 1 - decay^count, what its weights add up to, it is a mean of the
    parameters after each step (Kingma and Ba, 2015, section 3). It is float32 at least: in bfloat16
    small updates would round away.
    """
    tx = optax.with_extra_args_support(tx)

    def init(params):
        sums = jax.tree.map(
            lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params
        )
        return Averaged(jnp.zeros((), jnp.int32), sums, tx.init(params))

    def update(grads, state, params=None, **extra):
        updates, inner = tx.update(grads, state.inner, params, **extra)
        new = optax.apply_updates(params, updates)
        sums = jax.tree.map(
            lambda s, p: decay * s + (1 - decay) * p.astype(s.dtype), state.sum, new
        )
        return updates, Averaged(state.count + 1, sums, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def guarded(tx: Any, limit: float = float("inf"), halt: bool = False) -> Any:
    """An optax transformation, `tx` with a guard: a step whose gradients' norm is not finite, or
    above `limit`, or whose loss is not finite, changes neither parameters nor `inner`, the state of
    `tx` in the guard's. The loss is what the update gets as `value=`, as from `layouts.step`;
    without one the norm alone is judged. With `halt` no step after a bad one changes them either.
    The guard's state has further `norm`, that of the last step's gradients, `bad`, whether that
    step was bad, and `halted`, whether one was, with `halt`.
    """
    tx = optax.with_extra_args_support(tx)

    def init(params):
        no = jnp.zeros((), bool)
        return Guarded(jnp.zeros((), jnp.float32), no, no, tx.init(params))

    def update(grads, state, params=None, **extra):
        norm = optax.tree.norm(grads).astype(jnp.float32)
        bad = ~(jnp.isfinite(norm) & (norm <= limit) & jnp.isfinite(extra.get("value", 0.0)))
        skip = bad | state.halted
        updates, inner = tx.update(grads, state.inner, params, **extra)
        updates = jax.tree.map(lambda u: jnp.where(skip, jnp.zeros_like(u), u), updates)
        inner = jax.tree.map(lambda old, new: jnp.where(skip, old, new), state.inner, inner)
        return updates, Guarded(norm, bad, state.halted | (bad & halt), inner)

    return optax.GradientTransformationExtraArgs(init, update)


def released(state: Guarded) -> Guarded:
    """The state of a guard that lets steps pass again."""
    return state._replace(halted=jax.device_put(np.False_, state.halted.sharding))
