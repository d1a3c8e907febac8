"""The whole training step: gradient, update, new parameters."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from shardwise.pipeline.gradients import value_and_grad
from shardwise.pipeline.optimizing import update


def step(
    loss: Callable,
    tx: Any,
    mesh: jax.sharding.Mesh,
    schedule: Any,
    microbatches: int,
    **options: Any,
) -> Callable:
    """A function `(params, opt_state, batch, *args, key=None) -> (params, opt_state, mean)`.

    `options` are those of `value_and_grad`; with `has_aux` the auxiliary outputs come last, as a
    fourth. `params` is what `place` returns for the attribute `loss_and_grad` of this function,
    `opt_state` what `init` returns, whose memory is taken over: use only what is returned.
    """
    loss_and_grad = value_and_grad(loss, mesh, schedule, microbatches, **options)

    def run(params, opt_state, batch, *args, key=None):
        mean, grads = loss_and_grad(params, batch, *args, key=key)
        updates, opt_state = update(tx, grads, opt_state, params)
        outputs = mean if options.get("has_aux") else (mean,)
        return optax.apply_updates(params, updates), opt_state, *outputs

    run.loss_and_grad = loss_and_grad
    return run
