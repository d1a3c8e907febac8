"""A decoder in Flax NNX and its loss, written for one device.

Every parameter carries the names of its logical axes (metadata `logical_axes`): vocab, embed,
heads, kv_heads, head_dim and mlp, with experts also experts and router, with latent attention also
latent, query_latent, both_dim, rope_dim and value_dim. The code carries marks:
`marks.attend`, and `marks.constrain` with the names embedding_output, attention_input, attended,
attention_output, mlp_input, mlp_hidden, mlp_output and logits. Of meshes it knows nothing. Letters
in einsums: b batch, s sequence, e embed, h heads, k kv_heads, d head_dim, m mlp, v vocab.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from shardwise import experts, marks, objective
from shardwise.experts.mixture import Experts, Routing
from shardwise.layers import Config, Latent, Linear, RMSNorm, drop, normed, rotary, unrolled
from shardwise.objective.means import widened

__all__ = ["Config", "Decoder", "cross_entropy", "loss", "program", "routed_loss"]

_OF_TOKENS = "each token's normalizer"
_KEPT = jax.checkpoint_policies.save_only_these_names(_OF_TOKENS)


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
        n, size, routings = c.dense_layers, (c.layers - c.dense_layers) // c.stages, []
        if n:
            x, _ = self._run(self.dense, slice(None), x, keys if keys is None else keys[:n], places)
        for first in range(0, c.layers - n, size):
            x = marks.stage_boundary(x) if first else x
            own = keys if keys is None else keys[n + first : n + first + size]
            x, routing = self._run(self.blocks, slice(first, first + size), x, own, places)
            routings.append(routing)
        return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *routings)

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


@functools.partial(jax.checkpoint, prevent_cse=False, policy=_KEPT)
def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """-log p of each target, float32 [...], of logits [..., vocab] and integer targets [...].

    A target below 0, or of vocab or more, yields NaN. For the backward pass the logits and one
    number of each token are kept, and nothing else as wide as the vocabulary. A target's logit is
    picked by comparing its number with 0, 1, ... vocab-1: for a gather, the TPUs' compiler writes
    all logits to memory once or twice more.
    """
    wide, vocab = logits.astype(jnp.float32), logits.shape[-1]
    places = jax.lax.broadcasted_iota(targets.dtype, wide.shape, wide.ndim - 1)
    chosen = jnp.sum(jnp.where(places == targets[..., None], wide, 0), axis=-1)
    known = (targets >= 0) & (targets < vocab)
    return _normalizer(wide) - jnp.where(known, chosen, jnp.nan)


@jax.custom_jvp
def _normalizer(wide):
    top = jnp.max(wide, axis=-1)
    return top + jnp.log(jnp.sum(jnp.exp(wide - top[..., None]), axis=-1))


@_normalizer.defjvp
def _slope(primals, tangents):
    """By probabilities anew: the sum's own would be kept in memory between (by XLA, for B200)."""
    (wide,), (tangent,) = primals, tangents
    found = checkpoint_name(_normalizer(wide), _OF_TOKENS)
    return found, jnp.sum(jnp.exp(wide - found[..., None]) * tangent, axis=-1)


@jax.custom_jvp
def _summed_in(wide, x):
    """`x`, whose gradient goes to `wide`: what a loop adds to it is summed in its dtype."""
    return x


@_summed_in.defjvp
def _narrowed(primals, tangents):
    return _summed_in(*primals), tangents[0].astype(primals[1].dtype)


def _read(params, batch, graphdef):
    """(the decoder, its tokens and their places)."""
    decoder = params if graphdef is None else nnx.merge(graphdef, params)
    return decoder, batch["tokens"], marks.places(batch, *batch["tokens"].shape)


def _nats(logits, batch):
    """The sum of -log p over real tokens."""
    mask = batch["mask"]
    return jnp.sum(jnp.where(mask == 0, 0, cross_entropy(logits, batch["targets"]) * mask))


def _in_chunks(decoder, x, batch):
    """`_nats` of hidden activations, in chunks of every n-th token: cut as devices cut the row."""
    n = decoder.config.loss_chunks
    if (type(decoder).__call__, type(decoder).route) != (Decoder.__call__, Decoder.route):
        raise ValueError(
            f"model.loss: with loss_chunks={n} logits are those of Decoder.logits, and "
            f"{type(decoder).__name__} has a __call__ or route of its own; override logits."
        )
    if x.shape[1] % n:
        raise ValueError(
            f"model.loss: loss_chunks={n} does not divide the {x.shape[1]} tokens of a row, or of "
            f"a device's part of it; expected a divisor."
        )
    given = dict(x=x, targets=batch["targets"], mask=batch["mask"])
    cut = {name: a.reshape(len(a), a.shape[1] // n, n, *a.shape[2:]) for name, a in given.items()}
    graphdef, state = nnx.split(decoder.last)
    used = jax.lax.stop_gradient(state)
    wide = widened(state)

    @functools.partial(jax.checkpoint, prevent_cse=False, policy=_KEPT)
    def nats(chunk):
        head = nnx.merge(graphdef, jax.tree.map(_summed_in, wide, used))
        return _nats(decoder.logits(chunk["x"], head), chunk)

    return jnp.sum(jax.lax.map(nats, {name: jnp.moveaxis(a, 2, 0) for name, a in cut.items()}))


def loss(
    params: Any, batch: dict[str, Any], key: jax.Array | None = None, graphdef: Any = None
) -> objective.Mean:
    """An `objective.Mean`: `.total`, the sum of -log p (nats) over real tokens, and their `.count`.

    Dividing once, at the very end, makes any padding, masking, sharding or accumulation exact.
    `params` is a `Decoder`, or its state with the `graphdef` that `nnx.split` gave, which
    `functools.partial(loss, graphdef=graphdef)` binds. `batch` is a dict as `data.batches` makes
    them. With a `key`, dropout is on. With `Config.loss_chunks` the logits of a chunk of tokens are
    there at a time, and are computed twice.

    Raises:
      ValueError: `loss_chunks` does not divide the tokens that a device has of a row, or a subclass
        has a `__call__` or `route` of its own, which chunks would pass over (not so `logits`).
    """
    decoder, tokens, places = _read(params, batch, graphdef)
    if decoder.config.loss_chunks > 1:
        total = _in_chunks(decoder, decoder.hidden(tokens, key, places)[0], batch)
    else:
        total = _nats(decoder(tokens, key, places), batch)
    return objective.Mean(total, jnp.sum(batch["mask"]))


def routed_loss(
    params: Any,
    batch: dict[str, Any],
    key: jax.Array | None = None,
    graphdef: Any = None,
    balance: float = 0.01,
    over: str = "batch",
) -> tuple[objective.Mean, dict[str, jax.Array]]:
    """(mean, aux) of a decoder with experts: `loss`, with a penalty in its total, and counts.

    The mean, total / count, is the cross-entropy plus `balance` times the sum, over the L layers
    with experts (all but `dense_layers`), of n·Σ f·P, 1 for even routing (`experts.penalty`);
    `over`, "batch" or "rows", is what that averages over. With a bias take balance=0.
    `aux` has sums over real tokens, which add up over parts of a batch: "loads" [L, experts], the
    choices of each expert; "dropped" [L], choices without a slot; "nats", the total before balance.

    Raises:
      ValueError: the decoder has no experts; `over` is neither; what `loss` raises.
    """
    mask, (decoder, tokens, places) = batch["mask"], _read(params, batch, graphdef)
    if not decoder.config.experts:
        raise ValueError("model.routed_loss: the decoder has no experts; take model.loss.")
    if decoder.config.loss_chunks > 1:
        x, routing = decoder.hidden(tokens, key, places)
        total = _in_chunks(decoder, x, batch)
    else:
        logits, routing = decoder.route(tokens, key, places)
        total = _nats(logits, batch)
    aux = {
        "loads": experts.loads(routing.chosen, mask, decoder.config.experts),
        "dropped": jnp.sum(jnp.where(routing.kept, 0, mask[None, :, :, None]), axis=(1, 2, 3)),
        "nats": total,
    }
    if balance:
        total += balance * experts.penalty(routing.chosen, routing.probabilities, mask, over)
    return objective.Mean(total, jnp.sum(mask)), aux


def program(config: Config) -> tuple[Callable, Callable, bool]:
    """(create, loss, has_aux), to train a decoder of this config, as `layouts` and `run` take them.

    `create(key)` is its state. `loss(params, batch, key)` is `model.loss`, or with experts
    `routed_loss` with the penalty over each row, alike in microbatches; `has_aux` is then True.
    """

    def create(key):
        return nnx.state(Decoder(config, nnx.Rngs(params=key)))

    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    chosen = functools.partial(routed_loss, over="rows") if config.experts else loss
    return create, functools.partial(chosen, graphdef=graphdef), bool(config.experts)
