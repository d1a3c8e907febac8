"""The optimizer of a run, by the names that optax has."""

import dataclasses
import inspect
from typing import Any

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
