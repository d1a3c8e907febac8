"""Equations on arrays of which each stage has rows: a list of those that are known.

An equation that is not on the list is refused. Most work entry by entry. The others work within a
row, such as a sum over other axes; or they yield what the rows' own results combine to.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardwise import jaxprs

ENTRYWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
    clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf
    erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow is_finite le le_to
    lgamma log log1p logistic lt lt_to max min mul name ne neg nextafter not one_minus_square
    or polygamma population_count pow real reduce_precision rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor
    zeta""".split()
)
REDUCTIONS = {
    "reduce_sum": jnp.add,
    "reduce_max": jnp.maximum,
    "reduce_min": jnp.minimum,
    "reduce_prod": jnp.multiply,
    "reduce_and": jnp.bitwise_and,
    "reduce_or": jnp.bitwise_or,
    "reduce_xor": jnp.bitwise_xor,
}
# By the parameter that says along which axis they work.
ALONG_ONE = dict.fromkeys(
    ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "split"], "axis"
) | dict.fromkeys(["concatenate", "sort"], "dimension")


class ByRows(NamedTuple):
    """The way in which an equation works on rows.

    `operands` has the axis along which each operand is cut, None for one that is taken whole, and
    `result` that of the outputs. Where it is None the outputs are parts, which `combine` combines.
    `params(rows)` are those of the equation's parameters that `rows`, a number of them, changes.
    """

    operands: tuple[int | None, ...]
    result: int | None
    combine: Callable | None = None
    params: Callable[[int], dict[str, Any]] = lambda rows: {}


def by_rows(eqn: jaxprs.Equation, axes: tuple[int | None, ...], total: int) -> ByRows | None:
    """The `ByRows` of an equation whose operands lie in rows along `axes`; None if there is none.

    An axis is None for an operand of which every stage has all. `total` is the number of rows: an
    axis may be some times as long, where a row's entries follow each other along it.
    """
    if eqn.name in ENTRYWISE:
        return _entrywise(eqn, axes)
    if eqn.name == "dot_general":
        return _product(eqn, axes)
    if eqn.name in ALONG_ONE:
        return _along_one(eqn, axes)
    if len(eqn.invars) == 1 or eqn.name == "pad":
        return _of_one(eqn, axes[0], total)
    return None


def run_by_rows(
    eqn: jaxprs.Equation, how: ByRows, axes: tuple, total: int, rows: tuple[int, int], *values: Any
) -> list[Any]:
    """Run an equation on the `rows` of a stage, which are sliced from what every stage has."""

    def sliced(x, v, axis, known):
        if axis is None or known is not None:
            return x
        per_row = v.aval.shape[axis] // total
        return jax.lax.slice_in_dim(x, rows[0] * per_row, rows[1] * per_row, axis=axis)

    values = [sliced(*one) for one in zip(values, eqn.invars, how.operands, axes, strict=True)]
    changed = how.params(rows[1] - rows[0])
    if not changed:
        return eqn.run(*values)
    origin = eqn.origin.replace(params={**eqn.origin.params, **changed})
    return jaxprs.bind(origin, *values)


def _entrywise(eqn, axes):
    axis, *others = {axis for axis in axes if axis is not None}
    shape = eqn.outvars[0].aval.shape
    if others or any(len(v.aval.shape) not in (0, len(shape)) for v in eqn.invars):
        return None
    # An operand may have size 1 where the others have rows: it is the same for all of them.
    in_rows = (v.aval.shape and v.aval.shape[axis] == shape[axis] for v in eqn.invars)
    return ByRows(tuple(axis if here else None for here in in_rows), axis)


def _along_one(eqn, axes):
    axis, *others = {axis for axis in axes if axis is not None}
    if others or axis == eqn.origin.params[ALONG_ONE[eqn.name]]:
        return None
    return ByRows((axis,) * len(axes), axis)


def _of_one(eqn, axis, total):
    params, shape = eqn.origin.params, eqn.invars[0].aval.shape
    operands = (axis, *[None] * (len(eqn.invars) - 1))
    if axis is None:
        return None
    if eqn.name in REDUCTIONS or eqn.name in ("argmax", "argmin"):
        return _reduction(eqn, axis)
    if eqn.name == "squeeze":
        return ByRows(operands, axis - sum(i < axis for i in params["dimensions"]))
    if eqn.name == "transpose":
        return ByRows(operands, params["permutation"].index(axis))
    if eqn.name == "rev":
        return None if axis in params["dimensions"] else ByRows(operands, axis)
    if eqn.name == "pad":
        return ByRows(operands, axis) if params["padding_config"][axis] == (0, 0, 0) else None
    if eqn.name == "broadcast_in_dim":
        to = params["broadcast_dimensions"][axis]
        return ByRows(operands, to, params=_resized("shape", params["shape"], to, total))
    if eqn.name == "reshape":
        to = _after_reshape(shape, params["new_sizes"], axis, total)
        if to is None or params["dimensions"] is not None:
            return None
        return ByRows(operands, to, params=_resized("new_sizes", params["new_sizes"], to, total))
    if eqn.name == "slice":
        whole = params["start_indices"][axis] == 0 and params["limit_indices"][axis] == shape[axis]
        if not whole or (params["strides"] or [1] * len(shape))[axis] != 1:
            return None
        resized = _resized("limit_indices", params["limit_indices"], axis, total)
        return ByRows(operands, axis, params=resized)
    return None


def _reduction(eqn, axis):
    gone = eqn.origin.params["axes"]
    if axis not in gone:
        return ByRows((axis,), axis - sum(i < axis for i in gone))
    if eqn.name not in REDUCTIONS or eqn.outvars[0].aval.shape:
        return None
    return ByRows((axis,), None, REDUCTIONS[eqn.name])


def _product(eqn, axes):
    (contracted, batch), (left, right) = eqn.origin.params["dimension_numbers"], axes
    for pairs, in_batch in ((contracted, False), (batch, True)):
        for position, pair in enumerate(zip(*pairs, strict=True)):
            if any(a is not None and a == b for a, b in zip(axes, pair, strict=True)):
                if not all(a in (None, b) for a, b in zip(axes, pair, strict=True)):
                    return None
                if in_batch:
                    return ByRows(pair, position)
                is_number = eqn.outvars[0].aval.shape == ()
                return ByRows(pair, None, jnp.add) if is_number else None
    if left is not None and right is not None:
        return None
    side = 0 if right is None else 1
    used = {*contracted[side], *batch[side]}
    free = [i for i in range(eqn.invars[side].aval.ndim) if i not in used]
    before = len(batch[0])
    if side == 1:
        before += eqn.invars[0].aval.ndim - len(contracted[0]) - len(batch[0])
    return ByRows(axes, before + free.index(axes[side]))


def _resized(name, sizes, axis, total):
    """`params(rows) -> {name: sizes}`, which are those of the output, for fewer rows."""

    def params(rows):
        per_row = sizes[axis] // total
        return {name: tuple(rows * per_row if i == axis else n for i, n in enumerate(sizes))}

    return params


def _after_reshape(shape, sizes, axis, total):
    """The axis along which the rows still follow each other; None if there is none."""
    before = math.prod(shape[:axis])
    at = (j for j, n in enumerate(sizes) if n and n % total == 0 and before == math.prod(sizes[:j]))
    return next(at, None)
