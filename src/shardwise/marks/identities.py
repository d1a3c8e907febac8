"""The marks that change nothing unless they are bound."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardwise.marks.binding import _apply, meaning_of


def constrain(x: Any, name: str) -> Any:
    """`x`, an activation known as `name`: a place where a layout may be pinned."""
    return _apply("constrain", x, name)


def use(weights: Any) -> Any:
    """`weights`, a pytree, at the place where one layer's weights are used.

    A scanned stack calls it on the slice that its body receives, inside the rematerialised part:
    the place where FSDP gathers a layer.
    """
    return _apply("use", weights)


def layer(body: Callable) -> Callable:
    """`body`, the function of one layer: where a layout decides what is kept for its backward pass.

    A stack calls it on what its scan runs, and `use` is called inside. The body's first argument is
    what enters the layer, the carry of a scan.
    """
    return _apply("layer", body)


def stage_boundary(x: Any) -> Any:
    """`x`, where one pipeline stage ends and the next begins: k marks make k+1 stages."""
    return _apply("stage_boundary", x)


def index(axis: str, size: int) -> jax.Array:
    """The numbers int32 [size], in the whole batch, of a part's entries along `axis`.

    `axis` is "rows", or "sequence". Unbound, the part is the whole: 0 to size - 1. A draw that
    depends on its key and on these numbers alone is the same however the batch is divided.
    """
    meaning = meaning_of("index")
    return jnp.arange(size, dtype=jnp.int32) if meaning is None else meaning(axis, size)


def total(x: Any, axes: tuple[str, ...] = ("rows", "sequence")) -> Any:
    """The sum of `x`, statistics of a part, over all parts into which these axes are divided.

    Unbound, the part is the whole. No gradient flows through it: each part would add its own of a
    sum that all of them see.
    """
    return _apply("total", jax.lax.stop_gradient(x), axes)


def local(x: Any) -> Any:
    """`x`, a pytree, made of rows of one part of the batch alone, where that is meant.

    So are a part's own statistics, or comparisons of its own rows. Without this mark, a loss whose
    rows look at each other is an error where they are divided; what `x` makes of the batch is then
    taken for the part's own.
    """
    return _apply("local", x)
