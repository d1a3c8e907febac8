"""Named streams of random keys, which the seed and the step decide alone.

Nothing of them has to be saved, and no mesh, process or resume changes them.
"""

import zlib
from typing import Any

import jax


def stream(key: jax.Array, name: str) -> jax.Array:
    """The key of a stream: `stream(key, "dropout")` and `stream(key, "noise")` are independent."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def of_seed(seed: Any) -> jax.Array:
    """The key with which parameters are made."""
    return stream(jax.random.key(seed), "parameters")


def of_step(seed: Any, step: Any) -> jax.Array:
    """The key that the loss gets at a step."""
    return jax.random.fold_in(stream(jax.random.key(seed), "steps"), step)
