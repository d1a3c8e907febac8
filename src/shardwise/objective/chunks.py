"""A sum over chunks of which only one is there at a time, in the backward pass too."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from shardwise.objective.means import widened


def chunked_sum(function: Callable[[Any], jax.Array], chunks: Any) -> jax.Array:
    """The sum of `function(chunk)`, a scalar, over axis 0 of the arrays of `chunks`, a tree.

    Under differentiation each chunk's gradient is computed right after its value, for a cotangent
    of 1, and the backward pass multiplies it by the sum's cotangent. So what a chunk needs, such as
    the logits of its tokens, is gone before the next one begins, and no product is computed twice.
    Gradients go to `chunks`, and to arrays that the function closes over: these are added up in
    float32 at least. Both are kept until the backward pass.

    The function is traced once: a key that it closes over draws the same in each chunk, so put
    `jax.random.split(key, n)` among `chunks`. One that clips its cotangent, or whose gradients in
    float16 are too large for a cotangent of 1, has another gradient here.

    Raises:
      TypeError: the function returns anything but one scalar.
      ValueError: no arrays, or no chunks; within a `jax.shard_map` with `check_vma`, arrays of
        numbers to differentiate that do not vary over the same mesh axes.
    """
    leaves = jax.tree.leaves(chunks)
    if not leaves or not all(jnp.shape(a)[:1] > (0,) for a in leaves):
        raise ValueError("objective.chunked_sum: expected arrays with a chunk or more on axis 0.")
    first = jax.tree.map(lambda a: a[0], chunks)
    closed = jax.make_jaxpr(lambda chunk: function(chunk))(first)  # of its own: JAX keeps traces
    if [v.shape for v in closed.out_avals] != [()]:
        told = ", ".join(map(str, closed.out_avals)) or "nothing"
        raise TypeError(
            f"objective.chunked_sum: the function returned {told}; expected one scalar."
        )
    _check_axes([a for a in (*closed.consts, *leaves) if jnp.issubdtype(a.dtype, jnp.inexact)])

    def one(read, chunk):
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, read))(*chunk)[0]

    @jax.custom_jvp
    def total(read, chunks):
        return jnp.sum(jax.lax.map(lambda chunk: one(read, chunk), chunks))

    def with_gradient(primals, tangents):
        (read, chunks), (of_read, of_chunks) = primals, tangents

        def step(sums, chunk):
            floats = jax.value_and_grad(
                lambda a, b: one(_with(a, read, of_read), _with(b, chunk, of_chunks)), (0, 1)
            )
            value, (shared, own) = floats(_moving(read, of_read), _moving(chunk, of_chunks))
            return jax.tree.map(jnp.add, sums, widened(shared)), (value, own)

        zeros = widened([jnp.zeros_like(a) for a in _moving(read, of_read)])
        sums, (values, own) = jax.lax.scan(step, zeros, chunks)
        found, ways = jnp.sum(values), [t for each in tangents for t in _moving(each, each)]
        moved = [widened(g) * widened(t) for g, t in zip([*sums, *own], ways, strict=True)]
        return found, sum(map(jnp.sum, moved), jnp.zeros_like(values).sum()).astype(found.dtype)

    total.defjvp(with_gradient, symbolic_zeros=True)
    return total(closed.consts, leaves)


def _moving(arrays, tangents):
    """Those of the arrays whose tangent is not zero for certain."""
    pairs = zip(arrays, tangents, strict=True)
    return [a for a, t in pairs if not isinstance(t, SymbolicZero)]


def _with(moving, arrays, tangents):
    """All arrays, with these in the place of those that move."""
    moving, pairs = iter(moving), zip(arrays, tangents, strict=True)
    return [a if isinstance(t, SymbolicZero) else next(moving) for a, t in pairs]


def _check_axes(arrays):
    """Raise where some vary over mesh axes and others do not: each chunk would sum over these."""
    each = [_varying(jax.typeof(a)) for a in arrays]
    every = frozenset().union(*each)
    for a, axes in zip(arrays, each, strict=True):
        if axes != every:
            lacks = ", ".join(map(repr, sorted(every - axes)))
            raise ValueError(
                f"objective.chunked_sum: an array {jnp.shape(a)} does not vary over the mesh axes "
                f"{lacks}, and others do. Make it vary, so that devices sum its gradient once: "
                f"jax.lax.pcast(array, ({lacks},), to='varying'), or check_vma=False."
            )


def _varying(aval):
    """The mesh axes over which an array varies, by the name that this JAX has for them."""
    return getattr(
        getattr(aval, "manual_axis_type", aval), "varying", getattr(aval, "vma", frozenset())
    )
