"""An update that multiplies matrices, each of them gathered once.

Left to the compiler, every product of sharded matrices is resharded: the five Newton–Schulz steps
of Muon (Jordan et al., 2024) send an array many times over. Gathered before the first product, they
are whole in all that follows, on each device, and the result is cut again where it is stored.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import jaxprs

_DECOMPOSITIONS = {"cholesky", "eig", "eigh", "lu", "qr", "svd", "triangular_solve"}


def whole_in_products(function: Callable, mesh: Mesh, *args: Any) -> Any:
    """`function(*args)`, its matrices whole on each device of `mesh` where they are multiplied.

    For use inside jit. A function without products of matrices is left to the compiler altogether.
    """
    closed, out = jax.make_jaxpr(function, return_shape=True)(*args)
    if not any(map(_multiplies, closed.jaxpr.eqns)):
        return function(*args)
    closed = jaxprs.inlined(closed)
    eqns = [_gathered(eqn, mesh) for eqn in jaxprs.equations(closed.jaxpr)]
    env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    env |= dict(zip(closed.jaxpr.invars, jax.tree.leaves(args), strict=True))
    leaves = jaxprs.read(jaxprs.run(eqns, env), closed.jaxpr.outvars)
    return jax.tree.unflatten(jax.tree.structure(out), leaves)


def multiplies(function: Callable, *args: Any) -> bool:
    """Whether a function of arrays, or of their shapes, multiplies matrices."""
    return any(map(_multiplies, jax.make_jaxpr(function)(*args).jaxpr.eqns))


def _gathered(eqn, mesh):
    """The equation, on whole matrices if it multiplies; what is whole already costs nothing."""
    if not _multiplies(eqn.origin):
        return eqn

    def whole(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P())) if jnp.ndim(x) else x

    return eqn._replace(run=lambda *values: [whole(x) for x in eqn.run(*map(whole, values))])


def _multiplies(eqn):
    """Whether an equation multiplies matrices, or holds one that does; inner products do not."""
    if eqn.primitive.name == "dot_general":
        return eqn.outvars[0].aval.ndim > 0
    return eqn.primitive.name in _DECOMPOSITIONS or any(map(_multiplies, jaxprs.within(eqn)))
