"""Losses that are cut into stages, each of (params, batch), and what one device makes of them.

All read the same batch, whose four microbatches count differently: one has padding alone.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from shardwise import marks, model, objective
from shardwise.objective.means import quotient

WIDE, VOCAB, ROWS, TOKENS = 8, 12, 16, 4


@dataclasses.dataclass(frozen=True)
class Case:
    """Parameters, on the host; a loss, cut into stages; the paths of what is stacked by layers."""

    params: Any
    loss: Callable
    stacked: Callable[[str], bool] = lambda path: path.startswith("layers")


def batch(rows=ROWS, tokens=TOKENS, seed=1):
    draw = np.random.default_rng(seed)
    x, y = (draw.integers(0, VOCAB, (rows, tokens)).astype(np.int32) for _ in range(2))
    mask = (draw.random((rows, tokens)) < 0.7) * draw.uniform(0.5, 2, (rows, 1))
    mask[1::4] = 0
    return {"tokens": x, "targets": y, "mask": mask.astype(np.float32)}


def mean_of(logits, batch):
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return objective.Mean(jnp.sum(each * batch["mask"]), jnp.sum(batch["mask"]))


def cuts(stages, layers):
    """Before which layers a stage ends."""
    return [layers * s // stages for s in range(1, stages)]


# Layers in a stack, of which each stage scans its own.


def weights(layers=4, tied=False):
    draw = np.random.default_rng(0)
    of = lambda *shape: (draw.normal(size=shape) / 3).astype(np.float32)  # noqa: E731
    stack = {"w": of(layers, WIDE, WIDE), "b": of(layers, WIDE)}
    found = {"embed": 2 * of(VOCAB, WIDE), "layers": stack}
    return found if tied else found | {"head": 2 * of(WIDE, VOCAB)}


def stack(params, batch, stages, attend=False, used=True):
    """Tied where there is no head; then what enters the first layer skips to the head as well."""

    def layer(x, w):
        w = marks.use(w) if used else w
        if attend:
            heads = x.reshape(*x.shape[:2], 2, -1)
            places = marks.places(batch, *x.shape[:2])
            x = x + marks.attend(heads, heads, heads, places).reshape(x.shape)
        return x + jnp.tanh(x @ w["w"] + w["b"][None, None]), None

    first, layers = params["embed"][batch["tokens"]], len(params["layers"]["b"])
    x, skips = first, "head" not in params
    ends = cuts(stages, layers)
    for a, b in zip([0, *ends], [*ends, layers], strict=True):
        own = jax.tree.map(lambda leaf: leaf[a:b], params["layers"])  # noqa: B023
        x, _ = jax.lax.scan(marks.layer(layer), x, own)
        if b < layers and skips:
            x, first = marks.stage_boundary((x, first))
        elif b < layers:
            x = marks.stage_boundary(x)
    return (x + first) @ params["embed"].T if skips else x @ params["head"]


def stacked(stages, layers=4, tied=False, **options):
    def loss(params, batch):
        return mean_of(stack(params, batch, stages, **options), batch)

    return Case(weights(layers, tied), loss)


def decoder(stages):
    config = model.Config(
        vocab=VOCAB, embed=WIDE, layers=4, heads=2, kv_heads=2, head_dim=4, mlp=8, stages=stages
    )
    graphdef, params = nnx.split(nnx.jit(lambda: model.Decoder(config, nnx.Rngs(0)))())
    loss = functools.partial(model.loss, graphdef=graphdef)
    return Case(jax.tree.map(np.asarray, params), loss, lambda path: "blocks" in path)


# Models in the style of others, whose layers have names of their own, and skip over stages.


class Ladder(nn.Module):
    """Linen's own layers; what enters a half of them is added to what leaves it (U-Net's skips)."""

    stages: int

    @nn.compact
    def __call__(self, tokens):
        x, skips = nn.Embed(VOCAB, WIDE)(tokens), ()
        for i in range(4):
            x = x + skips[3 - i] if i > 1 else x
            skips = (*skips, x) if i < 2 else skips
            x = x + nn.gelu(nn.Dense(WIDE)(nn.LayerNorm()(x)))
            if i + 1 in cuts(self.stages, 4):
                x, skips = marks.stage_boundary((x, skips))
        return nn.Dense(VOCAB)(x)


def linen(stages):
    ladder, tokens = Ladder(stages), batch()["tokens"]
    params = jax.jit(ladder.init)(jax.random.key(0), tokens)["params"]

    def loss(params, batch):
        return mean_of(ladder.apply({"params": params}, batch["tokens"]), batch)

    return Case(jax.tree.map(np.asarray, params), loss, lambda path: False)


class Dense(nnx.Module):
    """NNX's own layers, of which each adds to what all before it have made (DenseNet's skips)."""

    def __init__(self, stages, rngs):
        self.embed = nnx.Embed(VOCAB, WIDE, rngs=rngs)
        self.layers = nnx.data([nnx.Linear(WIDE, WIDE, rngs=rngs) for _ in range(4)])
        self.norm = nnx.RMSNorm(WIDE, rngs=rngs)
        self.out = nnx.Linear(WIDE, VOCAB, rngs=rngs)
        self.ends = tuple(cuts(stages, 4))

    def __call__(self, tokens):
        made = (self.embed(tokens),)
        for i, layer in enumerate(self.layers):
            made = (*made, nnx.silu(layer(self.norm(sum(made)))))
            made = marks.stage_boundary(made) if i + 1 in self.ends else made
        return self.out(sum(made))


def in_nnx(stages):
    graphdef, params = nnx.split(nnx.jit(lambda: Dense(stages, nnx.Rngs(0)))())

    def loss(params, batch):
        return mean_of(nnx.merge(graphdef, params)(batch["tokens"]), batch)

    return Case(jax.tree.map(np.asarray, params), loss, lambda path: False)


MODELS = {
    "decoder": decoder,
    "linen, skips": linen,
    "nnx, skips": in_nnx,
    "tied": functools.partial(stacked, tied=True),
    "uneven": functools.partial(stacked, layers=5),
}


@functools.cache
def case(name: str, stages: int) -> Case:
    """One of `MODELS`, in so many stages."""
    return MODELS[name](stages)


def on_one(loss, params, *given, **options):
    """The mean and its gradient on one device: nothing of ours but the division."""

    def mean(params):
        out = loss(params, *given, **options)
        out = out[0] if isinstance(out, tuple) and not isinstance(out, objective.Mean) else out
        return quotient(out) if isinstance(out, objective.Mean) else out

    return jax.jit(jax.value_and_grad(mean))(params)


def assert_close(ours, theirs, rtol=2e-5):
    """Relative to each leaf's largest entry, or a hundredth of the largest of all."""
    pairs = list(zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True))
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    least = max(np.abs(b).max(initial=0) for _, b in pairs) / 100
    for a, b in pairs:
        atol = rtol * max(np.abs(b).max(initial=0), least, 1e-6)
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)
