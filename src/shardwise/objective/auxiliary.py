"""Reduction of the auxiliary outputs of all parts to one tree."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardwise.objective.microbatches import joined

WAYS = ("sum", "mean", "max", "concatenate")


def ways(aux: Any, tree: Any) -> list[str]:
    """The way in which the parts of each leaf of `tree` are joined.

    `aux` is one way, or a prefix tree of ways; None, where nobody reads the outputs, is "sum" too.

    Raises:
      ValueError: a way that is none of "sum", "mean", "max" and "concatenate", or `aux` is no
        prefix of `tree`.
    """
    aux = "sum" if aux is None else aux
    try:
        spread = jax.tree.map(lambda way, part: [way] * len(jax.tree.leaves(part)), aux, tree)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"aux={aux!r} does not fit the auxiliary outputs, {jax.tree.structure(tree)}: expected "
            f"one of {', '.join(WAYS)}, or a tree of these that is a prefix of the outputs'."
        ) from error
    found = jax.tree.leaves(spread)
    if unknown := [way for way in found if way not in WAYS]:
        raise ValueError(f"aux={unknown[0]!r}; expected one of {', '.join(WAYS)}.")
    return found


def reduced(stacked: jax.Array, way: str) -> jax.Array:
    """The one array that `way` makes of a leaf of all parts, stacked along a new first axis."""
    if way == "concatenate":
        if stacked.ndim < 2:
            raise ValueError("aux='concatenate' of a scalar; expected an array that has rows.")
        return joined(stacked)
    if way == "sum":
        return jnp.sum(stacked, axis=0)
    return {"mean": jnp.mean, "max": jnp.max}[way](stacked, axis=0)


def reduced_over(x: jax.Array, way: str, axes: Sequence[str]) -> jax.Array:
    """`x` reduced over mesh axes, inside shard_map; rows to concatenate stay on their devices."""
    if way == "concatenate" or not axes:
        return x
    return {"sum": jax.lax.psum, "mean": jax.lax.pmean, "max": jax.lax.pmax}[way](x, tuple(axes))


def over_devices(leaves: Sequence[Any], ways: Sequence[str], axes: Sequence[str]) -> tuple:
    """(the leaves that are whole on every device, those of rows, which stay cut), in shard_map."""
    pairs = list(zip(leaves, ways, strict=True))
    whole = [reduced_over(x, w, axes) for x, w in pairs if w != "concatenate"]
    return whole, [x for x, w in pairs if w == "concatenate"]


def merged(whole: Sequence[Any], rows: Sequence[Any], ways: Sequence[str], structure: Any) -> Any:
    """The tree of auxiliary outputs, of the two groups that `over_devices` made of its leaves."""
    groups = iter(whole), iter(rows)
    return jax.tree.unflatten(structure, [next(groups[way == "concatenate"]) for way in ways])


def outputs(aux: Any, tree: Any) -> list[tuple[str, Any, str]]:
    """(path, leaf, way) of each auxiliary output; none where `aux` is None: nobody reads them."""
    if aux is None:
        return []
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    paths = [jax.tree_util.keystr(keys) or "tree" for keys, _ in leaves]
    return list(zip(paths, (x for _, x in leaves), ways(aux, tree), strict=True))


def check(aux: Any) -> None:
    """Raise TypeError for a leaf that is neither an array nor a number."""
    for keys, x in jax.tree_util.tree_flatten_with_path(aux)[0]:
        if not hasattr(x, "dtype") and not isinstance(x, bool | int | float | complex):
            path = jax.tree_util.keystr(keys)
            raise TypeError(
                f"the loss's auxiliary output {path or 'tree'} is a {type(x).__name__}; expected "
                f"arrays and numbers, of which those of all parts become one."
            )
