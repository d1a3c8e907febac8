"""The training step for one device; an optimizer by its name; sharded initialisation by a rule."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import nnx
from jax.sharding import Mesh

from shardwise import objective, rules
from shardwise.model import Config, Decoder


def init(
    config: Config, mesh: Mesh, rule: Any, optimizer: Any, seed: int = 0
) -> tuple[Any, Any, Any]:
    """(graphdef, params, opt_state) of a `model.Decoder`, each array born in its shards.

    `rule` lays out the parameters, and the optimizer's state follows them. The same seed gives the
    same parameters on every mesh, bit for bit: all is drawn inside one jit, uniformly.

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
    cosine = "warmup_cosine_decay_schedule"
    return Optimizer(schedule=cosine, peak=peak, warmup=warmup, decay=steps).transformation()


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer and its schedule, each a function of optax (or optax.contrib) by name, which is
    given the settings that it takes.
    """

    name: str = "adamw"
    schedule: str = "warmup_constant_schedule"
    peak: float = 3e-3  # learning rate after the warm-up
    warmup: int = 20  # steps
    decay: int = 1000  # the step at which a schedule that decays has arrived, warm-up included
    end: float = 0.0  # the learning rate there
    weight_decay: float = 0.1
    clip: float | None = 1.0  # of the gradients' global norm
    moments: str | None = None  # dtype of the first moment; None: that of the parameters

    def rate(self) -> Any:
        """The learning rate by step, counted from 0; a ValueError where optax has no such schedule,
        or it needs more than what stands here.
        """
        begins = self.schedule in ("linear_schedule", "cosine_decay_schedule")  # at the peak
        given = dict(init_value=self.peak if begins else 0.0, end_value=self.end)
        given |= dict.fromkeys(("value", "peak_value"), self.peak)
        given |= dict.fromkeys(("transition_steps", "decay_steps"), self.decay)
        return _called("schedule", self.schedule, warmup_steps=self.warmup, **given)

    def transformation(self) -> optax.GradientTransformation:
        """The optax transformation: clipping, then the optimizer; a ValueError as in `rate`, or
        where `moments` is no dtype, or not to be chosen there.
        """
        given = dict(learning_rate=self.rate(), weight_decay=self.weight_decay)
        if self.moments is not None:
            takes = inspect.signature(_found("name", self.name)).parameters
            names = {"mu_dtype", "accumulator_dtype", "dtype_momentum"} & takes.keys()
            if self.moments not in ("bfloat16", "float32") or not names:
                raise ValueError(
                    f"train: optimizer.moments={self.moments!r} for {self.name}; expected bfloat16 "
                    f"or float32, of an optimizer that lets its first moment's dtype be chosen, as "
                    f"adamw."
                )
            given |= dict.fromkeys(names, jnp.dtype(self.moments))
        tx = _called("name", self.name, **given)
        return tx if self.clip is None else optax.chain(optax.clip_by_global_norm(self.clip), tx)


def _found(setting, name):
    function = getattr(optax, name, None) or getattr(optax.contrib, name, None)
    if not callable(function):
        raise ValueError(
            f"train: optimizer.{setting}={name!r}; optax has no such function, nor optax.contrib."
        )
    return function


def _called(setting, name, **given):
    function = _found(setting, name)
    takes = inspect.signature(function).parameters
    lacks = [n for n, p in takes.items() if p.default is p.empty and n not in given]
    if lacks:
        raise ValueError(
            f"train: optax.{name} needs {', '.join(lacks)}, which the settings do not have; make "
            f"it in a file of yours, and hand it to run.train(..., tx=...)."
        )
    return function(**{n: value for n, value in given.items() if n in takes})


def step(
    loss: Callable, optimizer: Any, microbatches: int = 1, jit: Callable = jax.jit
) -> Callable:
    """A jitted `(params, opt_state, batch, key=None) -> (params, opt_state, mean_loss)`.

    `loss` and `microbatches` are those of `objective.value_and_grad`; `optimizer` is any optax
    transformation. With a `key`, one for each step, dropout is on. `params` and `opt_state` are
    donated: use only what is returned. `jit` compiles it, by
    `functools.partial(rules.jit, mesh=..., in_rules=...)` in a layout.
    """
    mean_and_grad = objective.value_and_grad(loss, microbatches)

    @functools.partial(jit, donate_argnums=(0, 1))
    def run(params, opt_state, batch, key=None):
        mean, grads = mean_and_grad(params, batch, key=key)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, mean

    return run
