"""What JAX keeps of a loss's forward pass for the backward one, read from its trace."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from shardwise import marks
from shardwise.fsdp.planning import Stored

REMATERIALISED = ("checkpoint", "remat", "remat2")


def residuals(
    mean: Callable[..., Any],
    params: Any,
    stored: Sequence[Stored],
    batch: Any,
    dtype: Any,
    meanings: Mapping[str, Callable[..., Any]],
) -> tuple[int, int]:
    """(bytes that are kept, bytes of the gradient of the largest array kept) of one device.

    `mean(params, batch)` is the loss of its rows; `params` and `batch` are shapes, `stored` says
    which parameters are gathered, `dtype` in which they are used; `meanings` are of other marks.
    What goes in is not counted, and nothing twice; weights that are gathered or cast are.
    """
    treedef, is_cut = jax.tree.structure(params), any(s.cut is not None for s in stored)

    def at_use(tree):
        return jax.tree.map(lambda x: _taken(x, dtype, is_cut), tree)

    def forward(params, batch):
        def here(params):
            pairs = zip(jax.tree.leaves(params), stored, strict=True)
            now = [x if s.stacked else _taken(x, dtype, s.cut is not None) for x, s in pairs]
            with marks.bind(use=at_use, **meanings):
                return mean(jax.tree.unflatten(treedef, now), batch)

        return jax.tree.leaves(jax.vjp(here, params)[1])

    jaxpr = jax.make_jaxpr(forward)(params, batch).jaxpr
    kept = {v for v in jaxpr.outvars if not isinstance(v, Literal)} - {*jaxpr.invars}
    sizes = [v.aval.size * v.aval.dtype.itemsize for v in kept]
    floats = [v.aval for v in kept if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
    largest = (x.size * jnp.dtype(dtype or x.dtype).itemsize for x in floats)
    return sum(sizes), max(largest, default=0)


def gathers_again(mean: Callable[..., Any], params: Any, batch: Any) -> bool:
    """Whether the loss calls `marks.use` within what it rematerialises."""

    def here(params, batch):
        with marks.bind(use=_marked):
            return mean(params, batch)

    return _finds(jax.make_jaxpr(here)(params, batch).jaxpr, False)


def _taken(x, dtype, is_cut):
    """A gather, or a cast, makes another array, which nobody had: so does a barrier, in a trace."""
    is_cast = dtype is not None and jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype != dtype
    x = x.astype(dtype) if is_cast else x
    return jax.lax.optimization_barrier(x) if is_cut or is_cast else x


def _marked(tree):
    return jax.tree.map(jax.lax.optimization_barrier, tree)


def _finds(jaxpr, again):
    for eqn in jaxpr.eqns:
        if again and eqn.primitive.name == "optimization_barrier":
            return True
        inner = again or eqn.primitive.name in REMATERIALISED
        if any(_finds(each, inner) for each in _inside(eqn)):
            return True
    return False


def _inside(eqn: Any) -> Iterator[Any]:
    """The jaxprs among an equation's parameters."""
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            each = getattr(each, "jaxpr", each)
            if hasattr(each, "eqns"):
                yield each
