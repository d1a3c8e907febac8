"""What stands in, while a loss is tried, for parameters (shaken) and for marks (constants)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.objective.means import widened


def shaken(turn: Any, tree: Any, wide: bool = False) -> Any:
    """Parameters slightly changed, since zeros and symmetries hide what a loss does; they lie as
    they did. With `wide` in the dtypes in which parts are summed.
    """
    leaves, structure = jax.tree.flatten(tree)
    shake = _shaking(tuple(map(sharding_of, leaves)), wide)
    return structure.unflatten(shake(turn, leaves))


def sharding_of(x: Any) -> Any:
    """Where an array was put on purpose; None of any other, or in a trace."""
    is_put = not isinstance(x, jax.core.Tracer) and getattr(x, "committed", False)
    return x.sharding if is_put else None


@functools.cache
def _shaking(where, wide):  # for the same shapes one program, whatever the loss
    def shake(turn, leaves):
        return [_shaken(turn, x) for x in (widened(leaves) if wide else leaves)]

    return jax.jit(shake, out_shardings=[*where])


def _shaken(turn, x):
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        return x
    draw = noise(jnp.shape(x), turn.seed)
    filled = draw / max(jnp.shape(x), default=1) ** 0.5
    # Larger by far: rows that happen to be in order, or alike, are so under few parameters.
    size = jnp.where(turn.factor == 1, 0.1, 1)
    drawn = jnp.where(jnp.all(x == 0), filled, x * (1 + size * draw))
    return (drawn * turn.factor * (1 + turn.noise * draw)).astype(x.dtype)


def noise(shape: tuple[int, ...], seed: Any) -> jax.Array:
    """Numbers of mean 0 and variance 1, the same in every program, that are soon compiled."""
    bits = jnp.asarray(seed).astype(jnp.uint32) * np.uint32(0x9E3779B1)
    for axis in range(len(shape)):
        bits += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(0x85EBCA77 + 2 * axis)
        bits = (bits ^ (bits >> 15)) * np.uint32(0x2C1B3C6D)
    bits = (bits ^ (bits >> 12)) * np.uint32(0x297A2D39)
    return ((bits >> 8).astype(jnp.float32) / 2**24 - 0.5) * 12**0.5


def projected(x: Any) -> tuple[jax.Array, jax.Array]:
    """(a number that is linear in an array's entries, and tells arrays apart; their norm)."""
    x = jnp.asarray(x).astype(jnp.float32)
    return jnp.sum(x * noise(x.shape, 9)), jnp.sqrt(jnp.sum(x * x))


def filled(x: Any, axes: Any = ()) -> Any:
    """Ones in place of each array of `x`, a total over all parts or what is one part's own."""

    def one(leaf):
        leaf = jnp.asarray(leaf)
        return leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) else jnp.ones_like(leaf)

    return jax.tree.map(one, x)


def of_pairs(one: Any, other: Any) -> bool:
    """Whether two shapes differ along two axes or more, as those of pairs of rows do."""
    return sum(a != b for a, b in zip(one, other, strict=False)) > 1


def attend(q: jax.Array, k: jax.Array, v: jax.Array, places: Any, mask: Any = None) -> jax.Array:
    """Attention in which no token sees another."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    size, depth = q.shape[-1], v.shape[-1]  # folded, where values have fewer entries
    folded = jnp.pad(q + k, [(0, 0)] * 3 + [(0, -size % depth)]).reshape(*q.shape[:3], -1, depth)
    return v + folded.sum(axis=3)


def to_no_expert(x: jax.Array, chosen: jax.Array, *rest: Any, **more: Any) -> tuple:
    """(the tokens as they are, True for each choice: none is dropped)."""
    return x, chosen >= 0
