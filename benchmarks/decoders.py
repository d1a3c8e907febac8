"""The decoders that all layouts run, the batch, and the training step of one device."""

import dataclasses
import functools

import jax
import numpy as np
import optax
from flax import nnx

from shardwise import marks, model, objective
from shardwise.layouts import Layout
from shardwise.model import Config, Decoder

ROWS, LENGTH = 16, 64
DENSE = Config(embed=64, layers=8, heads=8, kv_heads=8, head_dim=8, mlp=128, remat=True)
MIXED = dataclasses.replace(
    DENSE, mlp=32, experts=8, experts_per_token=2, capacity_factor=1.25, shared_experts=1
)
OPTIMIZER = optax.adamw(3e-4)
SEED = 0


@dataclasses.dataclass(frozen=True)
class Bench:
    """A decoder of one config: `mixed`, with experts, its loss returns sums beside the mean."""

    config: Config

    @property
    def mixed(self):
        return bool(self.config.experts)

    @functools.cached_property
    def loss(self):
        graphdef = nnx.split(nnx.eval_shape(lambda: Decoder(self.config, nnx.Rngs(0))))[0]
        if self.mixed:  # balanced over rows, which stages can do too: their microbatches are apart
            return functools.partial(model.routed_loss, graphdef=graphdef, over="rows")
        return functools.partial(model.loss, graphdef=graphdef)

    def create(self, key):
        return nnx.state(Decoder(self.config, nnx.Rngs(params=key)))

    @functools.cached_property
    def abstract(self):
        return jax.eval_shape(self.create, jax.random.key(SEED))

    def step(self, params, opt_state, batch, microbatches=1, pin=None, **meanings):
        """One device's; `pin` is what gradients go through, `meanings` are of marks."""
        mean_and_grad = objective.value_and_grad(self.loss, microbatches, has_aux=self.mixed)
        with marks.bind(**meanings):
            found, grads = mean_and_grad(params, batch)
        grads = grads if pin is None else pin(grads)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        mean = found[0] if self.mixed else found
        return optax.apply_updates(params, updates), opt_state, mean


@functools.cache
def bench(mixed: bool, stages: int = 1) -> Bench:
    """That of a layout with experts, or without; with marks between so many stages."""
    return Bench(dataclasses.replace(MIXED if mixed else DENSE, stages=stages))


def of(layout: Layout) -> Bench:
    """The one that a layout runs."""
    return bench(bool(layout.expert), layout.size("stage"))


@functools.cache
def batch():
    """Random bytes, and what follows each."""
    text = np.random.default_rng(0).integers(256, size=(ROWS, LENGTH + 1), dtype=np.int32)
    mask = np.ones((ROWS, LENGTH), np.float32)
    return {"tokens": text[:, :-1], "targets": text[:, 1:], "mask": mask}
