"""A layout put to work: parameters, loss and gradient, the whole step."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

from shardwise import fsdp
from shardwise.layouts import by_compiler, by_hand
from shardwise.layouts.layout import Layout


def place(layout: Layout, tree: Any) -> Any:
    """One device's parameters, laid out; inside jit, they are born so.

    Raises:
      ValueError: an array that a role cannot cut, by its path, with the size that would do.
    """
    return by_hand.place(layout, tree) if layout.by_hand else by_compiler.place(layout, tree)


def whole(layout: Layout, tree: Any) -> Any:
    """What `place`, `init` or a step returned, as one device has it."""
    return fsdp.whole(tree) if isinstance(tree, fsdp.Sharded) else by_compiler.whole(tree)


def init(layout: Layout, create: Callable, tx: Any, key: jax.Array) -> tuple[Any, Any]:
    """(params, opt_state): `create(key)`, each array born in its shards, and `tx`'s state for it.

    Raises:
      ValueError: as `place`.
    """
    params = jax.jit(lambda key: place(layout, create(key)))(key)
    if layout.by_hand:
        return params, fsdp.init(tx, params)
    return params, by_compiler.init(layout, tx, params)


def value_and_grad(layout: Layout, loss: Callable, has_aux: bool = False, aux: Any = "sum") -> Callable:
    """A function of `(params, batch, *args, key=None)`: the mean over the batch, and its gradient.

    `loss(params, batch, *args)` is written for one device, with marks where a role needs them:
    `marks.attend` for context by hand. It returns an `objective.Mean`, or a scalar, a mean over
    rows; see `shardwise.objective`, also for `has_aux`, `aux` and keys.

    Raises, when called:
      ValueError: rows, or a sequence, that do not divide; what `fsdp.value_and_grad` raises.
    """
    strategy = by_hand if layout.by_hand else by_compiler
    return strategy.value_and_grad(layout, loss, has_aux, aux)


def step(
    layout: Layout, loss: Callable, tx: Any, has_aux: bool = False, aux: Any = "sum"
) -> Callable:
    """A jitted `(params, opt_state, batch, *args, key=None) -> (params, opt_state, mean[, aux])`.

    `params` and `opt_state` are what `init` returns. Both are donated: use only what is returned.
    """
    mean_and_grad = value_and_grad(layout, loss, has_aux, aux)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def run(params, opt_state, batch, *args, key=None):
        mean, grads = mean_and_grad(params, batch, *args, key=key)
        if layout.by_hand:
            updates, opt_state = fsdp.update(tx, grads, opt_state, params)
        else:
            updates, opt_state = by_compiler.update(layout, tx, grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, *(mean if has_aux else (mean,))

    return run
