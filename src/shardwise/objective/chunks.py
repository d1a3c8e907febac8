"""A sum over chunks of which only one is there at a time, in the backward pass too."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from shardwise.objective.means import widened


def chunked_sum(function: Callable[[Any], jax.Array], chunks: Any) -> jax.Array:
    """The sum of `function(chunk)`, a scalar, over axis 0 of the arrays of `chunks`, a tree.

    Under `jax.grad` each chunk's gradient is computed right after its value, for a cotangent of 1,
    and the backward pass multiplies it by the sum's cotangent. So what a chunk needs, such as the
    logits of its tokens, is gone before the next one begins, and no product is computed twice.
    Gradients go to `chunks`, and to arrays that the function closes over: these are added up in
    float32 at least. Both are kept until the backward pass. Of the gradient any derivative can be
    taken (`jax.jvp(jax.grad(f), ...)`, `jax.hessian(f)`).

    The function is traced once: a key that it closes over draws the same in each chunk, so put
    `jax.random.split(key, n)` among `chunks`. One that clips its cotangent, or whose gradients in
    float16 are too large for a cotangent of 1, has another gradient here.

    Raises:
      TypeError: the function returns anything but one scalar; by JAX, where `jax.jvp` is taken of
        the sum itself.
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

    @jax.custom_vjp
    def total(read, chunks):
        return jnp.sum(jax.lax.map(lambda chunk: one(read, chunk), chunks))

    def forward(*primals):  # of a custom_jvp JAX would take what reads no chunk out of the loop
        read, chunks = ([p.value for p in each] for each in primals)
        moving = [[p.perturbed for p in each] for each in primals]

        def step(sums, chunk):
            gradients = jax.value_and_grad(
                lambda a, b: one(_with(a, read), _with(b, chunk)), argnums=(0, 1)
            )
            value, (shared, own) = gradients(_where(moving[0], read), _where(moving[1], chunk))
            return jax.tree.map(jnp.add, sums, widened(shared)), (value, own)

        zeros = widened(jax.tree.map(jnp.zeros_like, _where(moving[0], read)))
        sums, (values, own) = jax.lax.scan(step, zeros, chunks)
        return jnp.sum(values), (sums, own)

    def backward(found, cotangent):
        return tuple(
            [g if g is None else (widened(g) * cotangent).astype(a.dtype) for g, a in pairs]
            for pairs in map(zip, found, (closed.consts, leaves))
        )

    total.defvjp(forward, backward, symbolic_zeros=True)
    return total(closed.consts, leaves)


def _where(moving, arrays):
    """The arrays that are differentiated, and None for each of the others."""
    return [a if moves else None for moves, a in zip(moving, arrays, strict=True)]


def _with(moving, arrays):
    """All arrays, with those that are differentiated in their places."""
    return [a if m is None else m for m, a in zip(moving, arrays, strict=True)]


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
