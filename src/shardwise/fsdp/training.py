"""The whole step: gradient, update, new parameters, in one program."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

from shardwise.fsdp.gradients import value_and_grad
from shardwise.fsdp.optimizing import update


def step(loss: Callable, tx: Any, mesh: jax.sharding.Mesh, **options: Any) -> Callable:
    """A jitted `(params, opt_state, batch, *args, key=None) -> (params, opt_state, mean)`.

    `options` are those of `value_and_grad`; with `has_aux` the auxiliary outputs come last, as a
    fourth. `params` is what `place` returns, `opt_state` what `init` returns. Both are donated:
    their buffers become the results', so use only what is returned.
    """
    loss_and_grad = value_and_grad(loss, mesh, **options)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def run(params, opt_state, batch, *args, key=None):
        mean, grads = loss_and_grad(params, batch, *args, key=key)
        updates, opt_state = update(tx, grads, opt_state, params)
        outputs = mean if options.get("has_aux") else (mean,)
        return optax.apply_updates(params, updates), opt_state, *outputs

    return run
