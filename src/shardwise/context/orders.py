"""Orders of the whole sequence: which tokens each device has, when n devices cut it.

An order is the permutation int32 [size] of a sequence of `size` tokens: entry i is the place in the
sequence of the token that lies at place i of memory, and device r of n has the r-th n-th of memory.
Who cuts a batch takes its columns so, `x[:, order]`, and tells the model their places by the
batch's "index" (or by `marks.index`).
"""

from typing import Any

import numpy as np


def contiguous(size: int, n: int) -> np.ndarray:
    """The order in which each device has one run of tokens: a causal mask gives the last most work.

    Raises:
      ValueError: `size` is no multiple of n.
    """
    _check("contiguous", size, n)
    return np.arange(size, dtype=np.int32)


def striped(size: int, n: int) -> np.ndarray:
    """The order in which device r has the tokens r, r + n, r + 2n and so on (Brandon et al., 2023).

    Raises:
      ValueError: `size` is no multiple of n.
    """
    _check("striped", size, n)
    return np.arange(size, dtype=np.int32).reshape(-1, n).T.reshape(-1)


def zigzag(size: int, n: int) -> np.ndarray:
    """The order in which device r has, of 2n chunks, the r-th and the r-th from the end.

    Raises:
      ValueError: `size` is no multiple of 2n.
    """
    _check("zigzag", size, 2 * n)
    chunks = np.arange(size, dtype=np.int32).reshape(2, n, -1)
    return np.stack([chunks[0], chunks[1, ::-1]], axis=1).reshape(-1)


def inverse(order: Any) -> np.ndarray:
    """The permutation that undoes `order`: `x[:, order][:, inverse(order)]` is x."""
    return np.argsort(order).astype(np.int32)


def _check(name, size, chunks):
    if chunks < 1 or size < 1 or size % chunks:
        below = size // chunks * chunks if chunks > 0 else 0
        near = f"such as {below} or {below + chunks}" if below else f"such as {chunks}"
        raise ValueError(
            f"context.{name}: a sequence of {size} tokens does not cut into {chunks} equal "
            f"chunks; expected a multiple of {chunks}, {near}."
        )
