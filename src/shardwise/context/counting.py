"""Formulas for what a form sends, and who works when; tests compare them with compiled programs."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shardwise import marks

Axis = str | tuple[str, ...]  # one mesh axis, or several as one


class Sent(NamedTuple):
    """Bytes that one device sends in one layer's attention, forward and backward."""

    forward: int
    backward: int


class Sizes(NamedTuple):
    """Bytes of one device's arrays: queries, keys (as many as values), dK in float32, places."""

    queries: int
    keys: int
    gradients: int
    places: int


def sizes(n: int, q: Any, k: Any) -> Sizes:
    """The `Sizes` of q [b, S, h, d] and k [b, S, kv_heads, d], of which a device has an n-th."""
    queries, keys = math.prod(q.shape) // n, math.prod(k.shape) // n
    b, length = q.shape[:2]
    places = 3 * 4 * b * (length // n)
    return Sizes(queries * q.dtype.itemsize, keys * k.dtype.itemsize, keys * 4, places)


def bytes_sent(form: Any, n: int, q: Any, k: Any) -> Sent:
    """The `Sent` of `form` over n devices, for q and k of the whole sequence (shapes and dtypes).

    Each sends K and V, or what it turns them and q into, and with them 12 bytes for each token's
    places. Sums of dK and dV travel in float32. A layer that is rematerialised sends the forward
    bytes twice.
    """
    return form.bytes_sent(n, q, k)


def work(
    order: Callable,
    n: int,
    size: int,
    mask: Callable = marks.causal,
    documents: Any = None,
    tile: int = 1,
) -> np.ndarray:
    """Scores that the mask lets through, int [n, n]: of device r in step t of the ring.

    In step t device r has the keys that began on device r - t. The devices wait for each other at
    every hop, so the ring takes as long as `work(...).max(axis=0).sum()`, and at best
    `work(...).sum() / n`.

    Args:
      order: a function of (size, n) such as `zigzag`.
      documents: int [size], for packed sequences; by default the sequence is one document.
      tile: with scores computed in tiles of so many queries and keys, all of a tile is counted
        where the mask lets anything of it through.
    """
    index = order(size, n)
    documents = np.zeros(size, int) if documents is None else np.asarray(documents)
    starts = np.concatenate([[True], documents[1:] != documents[:-1]])
    position = np.arange(size) - np.maximum.accumulate(np.where(starts, np.arange(size), 0))
    fields = [x[index][None] for x in (position, documents, np.arange(size))]
    query, key = ([np.expand_dims(x, axis) for x in fields] for axis in (2, 1))
    seen = mask(marks.Places(*query), marks.Places(*key))
    seen = np.broadcast_to(np.asarray(seen), (1, size, size))[0]
    in_tiles = seen.reshape(size // tile, tile, size // tile, tile).any(axis=(1, 3)) * tile**2
    count = size // tile // n
    between = in_tiles.reshape(n, count, n, count).sum(axis=(1, 3))
    return np.stack([[between[r, (r - t) % n] for t in range(n)] for r in range(n)])
