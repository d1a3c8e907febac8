"""The decoder, whose layers are stacked, and one of its layers.

Letters in einsums: b batch, s sequence, e embed, h heads, k kv_heads, d head_dim, m mlp, v vocab.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardwise import marks
from shardwise.experts.mixture import Experts, Routing
from shardwise.layers import Config, Latent, Linear, RMSNorm, drop, normed, rotary, unrolled


class Block(nnx.Module):
    """One layer: grouped-query attention, then a gated MLP or experts, RMSNorms around them."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = c = config
        self.attention_norm = RMSNorm(c) if c.norms != "after" else None
        depth = "value_dim" if c.value_dim else "head_dim"
        if c.latent:
            self.latent = Latent(c, rngs)
        else:
            query, key = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")
            self.q = Linear(c, query, ("embed",), rngs, c.qkv_bias)
            self.k = Linear(c, key, ("embed",), rngs, c.qkv_bias)
            self.v = Linear(c, ("embed", "kv_heads", depth), ("embed",), rngs, c.qkv_bias)
            first = 1 if c.qk_norm == "heads" else 2  # of the axes that a norm goes over
            self.q_norm = RMSNorm(c, query[first:]) if c.qk_norm else None
            self.k_norm = RMSNorm(c, key[first:]) if c.qk_norm else None
        self.o = Linear(c, ("heads", depth, "embed"), ("heads", depth), rngs)
        self.attention_end = RMSNorm(c) if c.norms != "before" else None
        self.mlp_norm = RMSNorm(c) if c.norms != "after" else None
        if c.experts:
            self.experts = Experts(c, rngs)
        else:
            self.gate = Linear(c, ("embed", "mlp"), ("embed",), rngs)
            self.up = Linear(c, ("embed", "mlp"), ("embed",), rngs)
            self.down = Linear(c, ("mlp", "embed"), ("mlp",), rngs)
        self.mlp_end = RMSNorm(c) if c.norms != "before" else None

    def __call__(self, x, key=None, places=None):
        return self.route(x, key, places)[0]

    def route(
        self, x: jax.Array, key: jax.Array | None = None, places: marks.Places | None = None
    ) -> tuple[jax.Array, Routing | None]:
        """(the activations [b, s, e] after this layer, its `Routing` if it has experts or None)."""
        c, places = self.config, places or marks.places(None, *x.shape[:2])
        keys = (None, None) if key is None else jax.random.split(key)
        y = marks.constrain(normed(self.attention_norm, x), "attention_input")
        y = marks.attend(*self._heads(y, places.positions), places)
        y = self.o("bshd,hde->bse", marks.constrain(y, "attended"))
        y = drop(normed(self.attention_end, y), c.dropout, keys[0])
        x = marks.constrain(x + y, "attention_output")
        y, routing = self._mlp(marks.constrain(normed(self.mlp_norm, x), "mlp_input"), places)
        y = drop(normed(self.mlp_end, y), c.dropout, keys[1])
        return marks.constrain(x + y, "mlp_output"), routing

    def _heads(self, x, positions):
        """(q, k, v)."""
        c = self.config
        if c.latent:
            return self.latent(x, positions)
        q = normed(self.q_norm, self.q("bse,ehd->bshd", x))
        k = normed(self.k_norm, self.k("bse,ekd->bskd", x))
        q, k = (rotary(each, positions, c.rope_theta, c.rope_dim) for each in (q, k))
        return q, k, self.v("bse,ekd->bskd", x)

    def _mlp(self, x, places):
        if self.config.experts:
            return self.experts(x, places.index)
        activation = getattr(jax.nn, self.config.activation)
        y = activation(self.gate("bse,em->bsm", x)) * self.up("bse,em->bsm", x)
        return self.down("bsm,me->bse", marks.constrain(y, "mlp_hidden")), None


class Decoder(nnx.Module):
    """The decoder of a `Config`, with parameters drawn by `rngs`, an `nnx.Rngs`.

    `decoder(tokens, key, places)` is logits float32 [b, s, vocab] of tokens int [b, s]. With a
    `key` there is dropout. `places` are the tokens' `marks.Places`; by default each row is one
    document. Layers are stacked: a parameter under `blocks` has a leading axis of layers, which its
    logical axes do not name; so has one under `dense`, where the first layers have no experts.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        self.embed = Linear(config, ("vocab", "embed"), ("embed",), rngs)
        keys = jax.random.split(rngs.params(), config.layers)
        *dense, last = config.stacks
        for first in dense:
            self.dense = _stack(first, keys[: first.layers])
        self.blocks = _stack(last, keys[-last.layers :])
        self.final_norm = RMSNorm(config)
        if not config.tied:
            self.head = Linear(config, ("embed", "vocab"), ("embed",), rngs)

    def __call__(self, tokens, key=None, places=None):
        """Logits, see the class."""
        return self.route(tokens, key, places)[0]

    def route(
        self, tokens: jax.Array, key: jax.Array | None = None, places: marks.Places | None = None
    ) -> tuple[jax.Array, Any]:
        """(logits, routing) of a call's arguments; routing is a `Routing`, None without experts."""
        x, routing = self.hidden(tokens, key, places)
        return self.logits(x, self.last), routing

    def hidden(
        self, tokens: jax.Array, key: jax.Array | None = None, places: marks.Places | None = None
    ) -> tuple[jax.Array, Any]:
        """(activations [b, s, e] as the head takes them, routing), of a call's arguments."""
        x = self.embed.kernel[...].astype(self.config.dtype)[tokens]
        x = marks.constrain(x, "embedding_output")
        x, routing = self._layers(x, key, places)
        return self.final_norm(x), routing

    def logits(self, x: jax.Array, head: nnx.Module) -> jax.Array:
        """Logits float32 [b, s, vocab] of activations `x` [b, s, e], as `hidden` returns them.

        `head` is the module `last`, or one like it with other weights.
        """
        logits = head("bse,ve->bsv" if self.config.tied else "bse,ev->bsv", x)
        return marks.constrain(logits.astype(jnp.float32), "logits")

    @property
    def last(self) -> nnx.Module:
        """The module whose kernel makes logits: the head, or if `config.tied` the embedding."""
        return self.embed if self.config.tied else self.head

    def _layers(self, x, key, places):
        c = self.config
        keys = None if key is None or c.dropout == 0 else jax.random.split(key, c.layers)
        stacks, routings = [(self.dense, 0, c.dense_layers)] if c.dense_layers else [], []
        stacks.append((self.blocks, c.dense_layers, c.layers))
        for stage, (first, end) in enumerate(c.spans):
            x = marks.stage_boundary(x) if stage else x
            for stack, start, stop in stacks:
                a, b = max(first, start), min(end, stop)
                if a < b:
                    own = keys if keys is None else keys[a:b]
                    x, routing = self._run(stack, slice(a - start, b - start), x, own, places)
                    routings += [] if routing is None else [routing]
        return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *routings or [None])

    def _run(self, stack, rows, x, keys, places):
        """(x after the layers in these rows of a stack, their routing)."""
        c, (graphdef, weights) = self.config, nnx.split(stack)

        def layer(x, weights_and_key):
            weights, key = weights_and_key
            return nnx.merge(graphdef, marks.use(weights)).route(x, key, places)

        body = jax.checkpoint(layer) if c.remat else marks.layer(layer)
        run = jax.lax.scan if c.scan else unrolled
        return run(body, x, (jax.tree.map(lambda a: a[rows], weights), keys))


def _stack(config, keys):
    """The `Block`s of a stack, in one whose parameters have a leading axis of layers."""
    return nnx.vmap(lambda key: Block(config, nnx.Rngs(params=key)))(keys)
