"""Meanings of marks in an oracle: constants, and attention in which no token sees another."""

from typing import Any

import jax
import jax.numpy as jnp


def filled(x: Any, axes: Any = ()) -> Any:
    """Ones in place of each array of `x`, a total over all parts or what is one part's own."""

    def one(leaf):
        leaf = jnp.asarray(leaf)
        return leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) else jnp.ones_like(leaf)

    return jax.tree.map(one, x)


def own(seen: list, x: Any) -> Any:
    """`filled` for `marks.local`; the shapes of its arrays are added to `seen`."""
    seen += [jnp.shape(leaf) for leaf in jax.tree.leaves(x)]
    return filled(x)


def of_pairs(one: Any, other: Any) -> bool:
    """Whether two shapes differ along two axes or more, as those of pairs of rows do."""
    return sum(a != b for a, b in zip(one, other, strict=False)) > 1


def attend(q: jax.Array, k: jax.Array, v: jax.Array, places: Any, mask: Any = None) -> jax.Array:
    """Attention in which no token sees another."""
    return q + jnp.repeat(k + v, q.shape[2] // k.shape[2], axis=2)


def to_no_expert(x: jax.Array, chosen: jax.Array, *rest: Any, **more: Any) -> tuple:
    """(the tokens as they are, True for each choice: none is dropped)."""
    return x, chosen >= 0
