"""A sum over chunks of which only one is there at a time, in the backward pass too."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from shardwise.objective.means import widened


def chunked_sum(function: Callable[[Any], jax.Array], chunks: Any) -> jax.Array:
    """The sum of `function(chunk)`, a scalar, over axis 0 of the arrays of `chunks`, a tree.

    Under differentiation each chunk's gradient is computed right after its value, and the backward
    pass multiplies it by the sum's cotangent. So what a chunk needs, such as the logits of its
    tokens, is gone before the next one begins, and nothing is computed twice. Gradients go to
    `chunks`, and to arrays that the function closes over: these are added up in float32 at least.
    A function whose own gradient is not linear in its cotangent (one that clips it) is no sum here.
    """
    closed = jax.make_jaxpr(function)(jax.tree.map(lambda a: a[0], chunks))

    def one(read, chunk):
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, read))(*chunk)[0]

    @jax.custom_jvp
    def total(read, chunks):
        return jnp.sum(jax.lax.map(lambda chunk: one(read, chunk), chunks))

    @total.defjvp
    def _with_gradient(primals, tangents):
        read, chunks = primals

        def step(sums, chunk):
            floats = jax.value_and_grad(lambda a, b: one(_with(a, read), _with(b, chunk)), (0, 1))
            value, (shared, own) = floats(_floats(read), _floats(chunk))
            return jax.tree.map(jnp.add, sums, widened(shared)), (value, own)

        zeros = widened([jnp.zeros_like(a) for a in _floats(read)])
        sums, (values, own) = jax.lax.scan(step, zeros, chunks)
        found, ways = jnp.sum(values), [t for each in tangents for t in _floats(each)]
        moved = (widened(g) * widened(t) for g, t in zip([*sums, *own], ways, strict=True))
        return found, jnp.asarray(sum(map(jnp.sum, moved)), found.dtype)

    return total(closed.consts, jax.tree.leaves(chunks))


def _floats(leaves):
    return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]


def _with(floats, leaves):
    """The leaves, with these in the places of those that are floats."""
    floats = iter(floats)
    return [next(floats) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in leaves]
