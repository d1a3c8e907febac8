"""Arrays that change without a gradient: a router's bias, the statistics of a batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardwise import tree as trees

KEY = "frozen"


def apart(
    loss: Callable, frozen: Callable[[str], bool], shapes: dict[str, tuple] | None = None
) -> Callable:
    """`loss`, whose aux is a dict with "frozen" {path: new value}, with aux (these, the rest).

    `shapes` has those of the parameters, {path: shape}, at the latest when the loss is traced: it
    may receive them in shares, and returns new values whole. Without them nothing is compared.

    Raises, when called:
      TypeError, ValueError: another aux; other paths than those of parameters that are `frozen`;
        a new value of another shape.
    """

    def split(params, *args, **options):
        mean, aux = loss(params, *args, **options)
        if not isinstance(aux, dict) or not isinstance(aux.get(KEY), dict):
            raise TypeError(
                f"layouts.step: with frozen=, the loss returns (mean, aux), and aux is a dict with "
                f"{KEY!r}: {{path: new value}}; got {type(aux).__name__}"
                f"{f' with {sorted(aux)}' if isinstance(aux, dict) else ''}."
            )
        named = {path: shape for path, shape in (shapes or {}).items() if frozen(path)}
        given = {path: jnp.shape(x) for path, x in aux[KEY].items()}
        if shapes is not None and named != given:
            raise ValueError(
                f"layouts.step: frozen= names {named}, and the loss returns new values for "
                f"{given}; expected one for each, of its shape."
            )
        new = jax.lax.stop_gradient(aux[KEY])
        return mean, (new, {name: x for name, x in aux.items() if name != KEY})

    return split


def shapes_of(params: Any) -> dict[str, tuple]:
    """{path: shape} of parameters."""
    return {path: jnp.shape(x) for path, x in trees.leaves(params)}


def put_back(params: Any, new: dict[str, jax.Array]) -> Any:
    """`params`, with these arrays in the place of theirs."""
    found = [new[path].astype(x.dtype) if path in new else x for path, x in trees.leaves(params)]
    return jax.tree.unflatten(jax.tree.structure(params), found)
