"""The decoder's loss, from its logits whole or in chunks of tokens, and its training program."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from shardwise import experts, marks, objective
from shardwise.layers import Config
from shardwise.model.decoder import Decoder

_OF_TOKENS = "each token's normalizer"
_KEPT = jax.checkpoint_policies.save_only_these_names(_OF_TOKENS)


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
    # About a token's share, as of a mean: what a chunk sums up may be too much for float16.
    share = 0.5 ** (x.shape[0] * x.shape[1] // n).bit_length()
    given = dict(x=x, targets=batch["targets"], mask=batch["mask"])
    cut = {name: a.reshape(len(a), a.shape[1] // n, n, *a.shape[2:]) for name, a in given.items()}
    total = objective.chunked_sum(
        lambda chunk: share * _nats(decoder.logits(chunk["x"], decoder.last), chunk),
        {name: jnp.moveaxis(a, 2, 0) for name, a in cut.items()},
    )
    return total / share


def loss(
    params: Any, batch: dict[str, Any], key: jax.Array | None = None, graphdef: Any = None
) -> objective.Mean:
    """An `objective.Mean`: `.total`, the sum of -log p (nats) over real tokens, and their `.count`.

    Dividing once, at the very end, makes any padding, masking, sharding or accumulation exact.
    `params` is a `Decoder`, or its state with the `graphdef` that `nnx.split` gave, which
    `functools.partial(loss, graphdef=graphdef)` binds. `batch` is a dict as `data.batches` makes
    them. With a `key`, dropout is on. With `Config.loss_chunks` the logits of one chunk of tokens
    are there at a time: its gradient is computed at once, and no logits are computed twice.

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
