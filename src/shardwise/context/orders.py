"""Orders of the whole sequence: which tokens each of n devices has, and who works when.

`shardwise.context` says what an order is. Who cuts a batch takes its columns by one, `x[:, order]`,
and tells the model their places by the batch's "index" (or by `marks.index`).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from shardwise import marks


def contiguous(size: int, n: int) -> np.ndarray:
    """The order int32 [size] of a run of tokens a device: by a causal mask the last works most."""
    return _chunks("contiguous", size, n).reshape(-1)


def striped(size: int, n: int) -> np.ndarray:
    """The order int32 [size] that gives device r tokens r, r + n, … (Brandon et al., 2023)."""
    return _chunks("striped", size, n).reshape(-1, n).T.reshape(-1)


def zigzag(size: int, n: int) -> np.ndarray:
    """The order int32 [size] that gives device r, of 2n equal chunks, those r and 2n - 1 - r."""
    first, last = np.split(_chunks("zigzag", size, 2 * n), 2)
    return np.stack([first, last[::-1]], axis=1).reshape(-1)


def work(
    order: Callable, n: int, size: int, mask: Callable = marks.causal, documents: Any = None
) -> np.ndarray:
    """The scores that the mask lets through, int [n, n]: [r, t] is device r's in step t of a ring.

    In step t device r has the keys that began on device r - t. The devices wait for each other at
    every hop, so the ring takes as long as `work(...).max(axis=0).sum()`, and at best
    `work(...).sum() / n`. `order` is a function of (size, n) such as `zigzag`. `documents`
    int [size] are the numbers of the tokens' documents, in the sequence's own order, as
    `Places.documents`; None is one document.
    """
    index, places = order(size, n), np.arange(size)
    documents = np.zeros(size, int) if documents is None else np.asarray(documents)
    starts = np.concatenate([[True], documents[1:] != documents[:-1]])
    position = places - np.maximum.accumulate(np.where(starts, places, 0))
    own = [x[index] for x in (position, documents, places)]
    # By NumPy, so that it can be asked before devices are simulated, and in a trace.
    query, key = (marks.Places(*(np.expand_dims(x, (0, axis)) for x in own)) for axis in (2, 1))
    seen = np.broadcast_to(np.asarray(mask(query, key)), (1, size, size))[0]
    between = seen.reshape(n, size // n, n, size // n).sum(axis=(1, 3))
    return np.stack([[between[r, (r - t) % n] for t in range(n)] for r in range(n)])


def _chunks(name, size, n):
    """The places of a sequence, int32 [n, size / n]."""
    if n < 1 or size < 1 or size % n:
        below = size // max(n, 1) * n
        raise ValueError(
            f"context.{name}: {size} tokens of a sequence do not divide among {n} equal chunks; "
            f"expected a multiple of {n}, such as {f'{below} or {below + n}' if below else n}."
        )
    return np.arange(size, dtype=np.int32).reshape(n, -1)
