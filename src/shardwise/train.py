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
    """(graphdef, params, opt_state) of a `model.Decoder`, each array made as its devices' shards.

    `nnx.merge(graphdef, params)` is the decoder. `optimizer` is an optax transformation, as
    `train.optimizer()` or `Optimizer().transformation()` is. `rule` lays out the parameters, and
    the optimizer's state follows them (`rules.follow`). The same seed gives the same parameters on
    every mesh, bit for bit: one jit makes all of them, by draws from uniform distributions, which
    do not depend on shardings.

    Raises:
      TypeError: `optimizer` is something else, such as settings.
      ValueError: what the rule raises for the parameters, or `rules.follow` for the state.
    """
    graphdef, create = initializer(config, mesh, rule, optimizer)
    return graphdef, *create(jax.random.key(seed))


def initializer(config: Config, mesh: Mesh, rule: Any, optimizer: Any) -> tuple[Any, Callable]:
    """(graphdef, create): `create(key)`, jitted, makes (params, opt_state) of `init`."""
    _check("init", optimizer)
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))

    def create(key):
        params = nnx.state(Decoder(config, nnx.Rngs(params=key)))
        return params, optimizer.init(params)

    return graphdef, rules.jit(create, mesh, out_rules=(rule, rules.follow(rule, abstract)))


def _check(who, optimizer):
    if not hasattr(optimizer, "update"):
        raise TypeError(
            f"train.{who}: optimizer is {optimizer!r}; expected an optax transformation, as "
            f"train.optimizer() or train.Optimizer(...).transformation() returns."
        )


def optimizer(
    peak: float = 3e-3, steps: int = 300, warmup: int = 20
) -> optax.GradientTransformation:
    """An optax transformation: AdamW with weight decay 0.1, clipping at a global norm of 1.

    The learning rate grows linearly from 0 to `peak` over `warmup` steps, then falls by a cosine to
    0 at step `steps`, counted from the first. All else is as optax has it by default.
    """
    cosine = "warmup_cosine_decay_schedule"
    return Optimizer(schedule=cosine, peak=peak, warmup=warmup, decay=steps).transformation()


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The settings of an optimizer and its schedule, functions of optax or optax.contrib by name.

    Each function gets those of these arguments that it has. A schedule's `peak_value` and `value`
    are `peak`, `warmup_steps` is `warmup`, `decay_steps` and `transition_steps` are `decay`, and
    `end_value` is `end`, as `alpha` relative to `peak`; its `init_value` is 0 where it has a
    `peak_value`, else `peak`. The optimizer's `learning_rate` is the schedule, and `mu_dtype`,
    `accumulator_dtype` or `dtype_momentum` is `moments`. A setting that is neither 0 nor its
    default, and that the function has no argument for, is an error.
    """

    name: str = "adamw"  #: The optimizer's function.
    schedule: str = "warmup_constant_schedule"  #: The schedule's function.
    peak: float = 3e-3  #: The learning rate after the warm-up.
    warmup: int = 20  #: The steps of the warm-up.
    decay: int = 1000  #: The step at which a schedule has decayed, counted from the run's first.
    end: float = 0.0  #: The learning rate from that step on.
    weight_decay: float = 0.1  #: The optimizer's factor of weight decay.
    clip: float | None = 1.0  #: Global norm to which gradients are clipped. None clips nothing.
    #: Dtype of the first moment, "bfloat16" or "float32". None is that of the parameters.
    moments: str | None = None

    def rate(self) -> Any:
        """The schedule, a function of the step, from 0 on, to the learning rate; a ValueError if
        optax has no such schedule, or it needs an argument that is no field here, or lacks one.
        """
        begins = 0.0 if "peak_value" in _takes("schedule", self.schedule) else self.peak
        return self._called(
            "schedule",
            peak=dict(value=self.peak, peak_value=self.peak, init_value=begins),
            warmup=dict(warmup_steps=self.warmup),
            decay=dict(decay_steps=self.decay, transition_steps=self.decay),
            end=dict(end_value=self.end, alpha=self.end / (self.peak or 1)),
        )

    def transformation(self) -> optax.GradientTransformation:
        """The optax transformation that clips gradients, then runs the optimizer; a ValueError as
        in `rate`, for `name` too, or if `moments` is neither "bfloat16" nor "float32".
        """
        if self.moments not in (None, "bfloat16", "float32"):
            raise ValueError(
                f"train: optimizer.moments={self.moments!r}; expected bfloat16 or float32."
            )
        names = ("mu_dtype", "accumulator_dtype", "dtype_momentum") if self.moments else ()
        tx = self._called(
            "name",
            schedule=dict(learning_rate=self.rate()),
            weight_decay=dict(weight_decay=self.weight_decay),
            moments=dict.fromkeys(names, jnp.dtype(self.moments)),
        )
        return tx if self.clip is None else optax.chain(optax.clip_by_global_norm(self.clip), tx)

    def _called(self, kind, **given):
        """What the function returns for the arguments, {setting: {name: value}}, that it has."""
        name, first = getattr(self, kind), next(iter(given))
        takes = _takes(kind, name)
        for setting, arguments in given.items():
            said = getattr(self, setting)
            asked = setting == first or said not in (0, getattr(type(self), setting))
            if asked and takes.keys().isdisjoint(arguments):
                raise ValueError(
                    f"train: optimizer.{setting}={said!r}, and optax.{name} has no argument for "
                    f"it ({', '.join(arguments)}); leave it out, or choose another {kind}."
                )
        values = {n: x for arguments in given.values() for n, x in arguments.items() if n in takes}
        if lacks := [n for n, p in takes.items() if p.default is p.empty and n not in values]:
            raise ValueError(
                f"train: optax.{name} needs {', '.join(lacks)}, which the settings do not have; "
                f"make it in a file of yours, and hand it to run.train(..., tx=...)."
            )
        return _found(kind, name)(**values)


def _found(setting, name):
    function = getattr(optax, name, None) or getattr(optax.contrib, name, None)
    if not callable(function):
        raise ValueError(
            f"train: optimizer.{setting}={name!r}; optax has no such function, nor optax.contrib."
        )
    return function


def _takes(setting, name):
    return inspect.signature(_found(setting, name)).parameters


def step(
    loss: Callable, optimizer: Any, microbatches: int = 1, jit: Callable = jax.jit
) -> Callable:
    """A jitted training step, `(params, opt_state, batch, key=None) -> (params, opt_state, mean)`.

    `loss(params, batch)`, with `key=` if the step gets one (then dropout is on), returns an
    `objective.Mean`, or a scalar that is a mean over rows; the rows are taken in so many
    `microbatches`, one after the other. `mean` is the mean loss, a scalar array. Of a loss with
    aux, as `model.routed_loss`, hand over the first output alone, or take `layouts.step`.
    `optimizer` is any optax transformation.
    `params` and `opt_state` are donated: use only what is returned. `jit` compiles the step, for a
    mesh `functools.partial(rules.jit, mesh=mesh, in_rules=ins, out_rules=outs)`: `ins` is a tuple
    of three entries, of params, opt_state and batch, and a fourth if the step gets a key; `outs`
    has those of params, opt_state and mean. An entry for opt_state is `rules.follow(rule, params)`.

    Raises, when called:
      TypeError: outputs that are no loss, or aux beside it.
      ValueError: rows that `microbatches` do not divide, and what `jit` raises.
    """
    _check("step", optimizer)
    mean_and_grad = objective.value_and_grad(loss, microbatches)

    @functools.partial(jit, donate_argnums=(0, 1))
    def run(params, opt_state, batch, key=None):
        mean, grads = mean_and_grad(params, batch, key=key)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, mean

    return run
