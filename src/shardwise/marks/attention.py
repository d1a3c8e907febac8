"""Attention as a mark: where tokens stand, what each sees, and what one device computes."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardwise.marks.binding import index, meaning_of


class Places(NamedTuple):
    """The places of tokens, each int32 [b, s]; whatever cuts or reorders tokens does so to these.

    positions: in the token's own document, what rotary angles grow with;
    documents: the number of the document, of those packed into one row; none sees another;
    index: in the whole sequence, by which causal order goes, whatever the order in memory.
    """

    positions: jax.Array
    documents: jax.Array
    index: jax.Array


def causal(query: Places, key: Places) -> jax.Array:
    """The default mask of attention: a token sees its own document, up to itself."""
    return (key.index <= query.index) & (key.documents == query.documents)


def places(batch: Mapping[str, Any] | None, rows: int, size: int) -> Places:
    """The `Places` of a batch's tokens [rows, size], as its "positions", "documents" and "index".

    What it does not have is that of rows which are one document each; "index" is what
    `marks.index` says.

    Raises:
      ValueError: one of the three is of another shape.
    """
    given = {name: jnp.asarray(batch[name]) for name in Places._fields if batch and name in batch}
    if "index" not in given:
        given["index"] = jnp.broadcast_to(index("sequence", size)[None], (rows, size))
    whole = given["index"]
    found = {"positions": whole, "documents": jnp.zeros_like(whole)} | given
    for name, x in found.items():
        if x.shape != (rows, size):
            raise ValueError(
                f"marks.places: {name!r} of the batch is {list(x.shape)}; expected one number for "
                f"each token, {[rows, size]}."
            )
    return Places(**found)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, places: Places, mask: Callable = causal
) -> jax.Array:
    """Attention [b, s, h, d] of q [b, s, h, d] to k and v [b, t, kv_heads, d], softmax in float32.

    A kv head serves h / kv_heads query heads. `mask(query, key)`, a function of two `Places` whose
    fields are [b, s, 1] and [b, 1, t], tells what is seen, as booleans that broadcast to
    [b, s, t]. Every query must see a key: one that sees none yields NaN.

    A meaning receives the same; where it cuts the sequence, `places` are of its own tokens.
    """
    meaning = meaning_of("attend")
    return (_attend if meaning is None else meaning)(q, k, v, places, mask)


def seen(query: Places, key: Places, mask: Callable) -> jax.Array:
    """`mask`, bool [b, s, t], of the places of queries [b, s] and of keys [b, t]."""
    query, key = (Places(*(jnp.expand_dims(x, a) for x in p)) for p, a in ((query, 2), (key, 1)))
    return mask(query, key)


def _attend(q, k, v, places, mask):
    b, s, h, d = q.shape
    q = q.reshape(b, s, k.shape[2], h // k.shape[2], d)
    scores = jnp.einsum("bskgd,btkd->bkgst", q, k).astype(jnp.float32) * d**-0.5
    visible = seen(places, places, mask)[:, None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("bkgst,btkd->bskgd", weights, v).reshape(b, s, h, d)
