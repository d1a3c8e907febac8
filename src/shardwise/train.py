"""The training step for one device; sharded initialisation by a rule."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from shardwise import objective, rules
from shardwise.model import Config, Decoder


def init(
    config: Config, mesh: Mesh, rule: Any, optimizer: Any, seed: int = 0
) -> tuple[Any, Any, Any]:
    """(graphdef, params, opt_state) of a `model.Decoder`, each array born in its shards.

    `rule` lays out the parameters, and the optimizer's state follows them. The same seed gives
    the same parameters on every mesh: bit for bit, because all is drawn inside one jit and the
    initialisers are uniform, whose draws no sharding rounds differently.

    Raises:
      ValueError: what the rule raises for the parameters.
    """
    graphdef, create = initializer(config, mesh, rule, optimizer)
    return graphdef, *create(jax.random.key(seed))


def initializer(config: Config, mesh: Mesh, rule: Any, optimizer: Any) -> tuple[Any, Callable]:
    """(graphdef, create): `create(key)` is the jitted program of `init`, to be lowered and read."""
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))

    def create(key):
        params = nnx.state(Decoder(config, nnx.Rngs(params=key)))
        return params, optimizer.init(params)

    return graphdef, rules.jit(create, mesh, out_rules=(rule, rules.follow(rule, abstract)))


def optimizer(
    peak: float = 3e-3, steps: int = 300, warmup: int = 20
) -> optax.GradientTransformation:
    """AdamW after clipping the global norm to 1, with linear warm-up and cosine decay to 0."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))


def step(
    loss: Callable, optimizer: Any, microbatches: int = 1, jit: Callable = jax.jit
) -> Callable:
    """A jitted `(params, opt_state, batch, key=None) -> (params, opt_state, mean_loss)`.

    `loss` and `microbatches` are those of `objective.value_and_grad`; `optimizer` is any optax
    transformation. With a `key`, one for each step, dropout is on. `params` and
    `opt_state` are donated: their buffers become the results', so use only what is returned.
    `jit` compiles it: `functools.partial(rules.jit, mesh=..., in_rules=...)` gives it a layout.
    """
    mean_and_grad = objective.value_and_grad(loss, microbatches)

    @functools.partial(jit, donate_argnums=(0, 1))
    def run(params, opt_state, batch, key=None):
        mean, grads = mean_and_grad(params, batch, key=key)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, mean

    return run
