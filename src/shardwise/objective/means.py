"""The contract of a loss's outputs, and the one division."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike


class Mean(NamedTuple):
    """The mean total/count: two scalars, each a sum over the rows of the batch.

    `count` is None for a loss that is a mean over rows already: every part of the batch then counts
    as one. Where the count is 0, the mean and its gradient are 0.
    """

    total: ArrayLike
    count: ArrayLike | None


def normal(loss: Callable, has_aux: bool) -> Callable:
    """`loss` with outputs of one form, `(Mean, tree)`: the tree is () without `has_aux`.

    It is handed `key=` only where there is one.

    Raises, when called:
      TypeError: the outputs are neither a `Mean` nor a scalar, or `has_aux` does not fit them.
    """

    def normalised(*args, key=None):
        out = loss(*args, **({} if key is None else {"key": key}))
        out, extra = _with_aux(out) if has_aux else (out, ())
        return _mean(out, has_aux), extra

    return normalised


def wide(dtype: DTypeLike) -> Any:
    """The dtype in which parts are summed: float32 at least for floating-point numbers."""
    dtype = jnp.result_type(dtype)
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.inexact) else dtype


def widened(tree: Any) -> Any:
    """A tree whose arrays of floating-point numbers are in the dtypes in which parts are summed."""

    def one(x):
        is_array = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)
        return x.astype(wide(x.dtype)) if is_array else x

    return jax.tree.map(one, tree)


def quotient(mean: Mean) -> jax.Array:
    """total/count, and 0 where the count is exactly 0: a batch of nothing but padding."""
    total, count = mean
    if count is None:
        return jnp.asarray(total)
    empty = count == 0
    return jnp.where(empty, 0, total / jnp.where(empty, 1, count))


def cotangents(whole: Mean) -> Mean:
    """The cotangents of the two in total/count: 1/count and -total/count², 0 for count 0.

    `whole` has the sums over all parts.
    """
    inverse = quotient(Mean(1, whole.count))
    return Mean(inverse, -whole.total * inverse * inverse)


def _with_aux(out):
    if type(out) is Mean or not isinstance(out, tuple | list) or len(out) != 2:
        told = "a Mean" if type(out) is Mean else _shapes(out)
        raise TypeError(
            f"The loss returned {told}, and has_aux=True expects (Mean or scalar, tree): return "
            f"that pair, or leave has_aux out."
        )
    return out


def _mean(out, has_aux):
    if type(out) is not Mean and isinstance(out, tuple | list) and len(out) == 2:
        first = "as the first of its two outputs " if has_aux else ""
        raise TypeError(
            f"The loss returned {first}a bare pair, {_shapes(out)}, which may be a total and a "
            f"count, or a loss and auxiliary outputs. Return objective.Mean(total, count) for the "
            f"one, and pass has_aux=True for the other."
        )
    mean = out if type(out) is Mean else Mean(out, None)
    leaves = jax.tree.leaves(mean)
    if len(leaves) != 2 - (mean.count is None) or any(jnp.ndim(x) != 0 for x in leaves):
        raise TypeError(
            f"The loss returned {_shapes(out)}; expected objective.Mean(total, count), two "
            f"scalars, or one scalar, a mean over rows. For more outputs, return (that, tree) with "
            f"has_aux=True."
        )
    if not jnp.issubdtype(jnp.result_type(mean.total), jnp.floating):
        raise TypeError(
            f"The loss is {jnp.result_type(mean.total)}, which has no gradient; expected a "
            f"floating-point number."
        )
    if mean.count is not None and jnp.issubdtype(jnp.result_type(mean.count), jnp.bool_):
        raise TypeError(
            "The loss's count is bool, which does not add up; expected a sum over rows, such as "
            "mask.sum()."
        )
    return mean


def _shapes(out):
    return jax.tree.map(jnp.shape, out)
