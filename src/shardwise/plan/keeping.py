"""The bytes that JAX keeps of a loss's forward pass for the backward one, from its trace."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from shardwise import jaxprs, marks
from shardwise.fsdp import ArrayLayout
from shardwise.plan import recomputing
from shardwise.topology.lowering import to_host


class Kept(NamedTuple):
    """The bytes of one device: `stored` from the forward pass to the backward one, and beside these
    either `gradient`, of the largest array at the backward pass's beginning; or `layer`, what the
    largest rematerialised body needs, less what is gone by then.
    """

    stored: int
    gradient: int
    layer: int


def residuals(
    mean: Callable[..., Any],
    params: Any,
    stored: Sequence[ArrayLayout],
    batch: Any,
    dtype: Any,
    meanings: Mapping[str, Callable[..., Any]],
) -> Kept:
    """The bytes that a loss keeps, but for what a compiler computes again (`recomputing.stored`).

    `mean(params, batch)` is the loss of a device's rows; `params` and `batch` are shapes, `stored`
    says which parameters are gathered, `dtype` in which they are used; `meanings` are of other
    marks. The program's inputs are not counted, and nothing twice; gathered or cast weights are.

    Raises:
      ValueError: it moves arrays to the host.
    """
    treedef, is_cut = jax.tree.structure(params), any(s.cut is not None for s in stored)

    def at_use(tree):
        return jax.tree.map(lambda x: _taken(x, dtype, is_cut), tree)

    def here(params, batch):
        pairs = zip(jax.tree.leaves(params), stored, strict=True)
        now = [x if s.stacked else _taken(x, dtype, s.cut is not None) for x, s in pairs]
        with marks.bind(use=at_use, **meanings):
            return mean(jax.tree.unflatten(treedef, now), batch)

    def forward(params, batch):
        return jax.tree.leaves(jax.vjp(lambda params: here(params, batch), params)[1])

    jaxpr = jax.make_jaxpr(forward)(params, batch).jaxpr
    if to_host(jaxpr):
        raise ValueError(
            "plan.own: the loss, or remat=, moves arrays to the host; what waits there is not "
            "planned for programs of your own. topology.compile tells what a layout of one needs."
        )
    program, outputs = jaxprs.steps(jaxpr)
    found = recomputing.stored(program, outputs)
    working = max(map(_working, _again(jax.make_jaxpr(here)(params, batch).jaxpr)), default=0)
    after = _after_the_last(jaxpr)
    gone = sum(s.bytes for s in found if s.step >= after) if working else 0
    return Kept(sum(s.bytes for s in found), _gradient(program, found), max(working - gone, 0))


def _gradient(program, found, at_the_end=True):
    """The bytes of the gradient of the largest array stored, in the dtype that its product had.

    At the end of the forward pass, one of the same size takes the place of its array, when no later
    product needs that: as the gradient of float32 logits does.
    """
    floats = [s for s in found if jnp.issubdtype(s.variable.aval.dtype, jnp.inexact)]
    if not floats:
        return 0
    largest = max(floats, key=lambda s: recomputing.size(s.variable))
    size = recomputing.size(recomputing.origin(program, largest.variable))
    needed = any(step.name in recomputing.AT_WORK for step in program[largest.step + 1 :])
    return 0 if at_the_end and size == largest.bytes and not needed else size


def _again(jaxpr: Any) -> Iterator[Any]:
    """The bodies that run again in the backward pass."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in jaxprs.REMAT:
            yield from jaxprs.inner(eqn)
        else:
            for body in jaxprs.inner(eqn):
                yield from _again(body)


def _after_the_last(jaxpr):
    """The number of the first step after all that runs again: what is stored there is gone then."""
    found = [i for i, eqn in enumerate(jaxpr.eqns, 1) if any(_again(jaxpr.replace(eqns=[eqn])))]
    return len(jaxprs.steps(jaxpr.replace(eqns=jaxpr.eqns[: max(found, default=0)]))[0])


def _working(body):
    """The bytes that a body's own backward pass needs."""
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in body.invars]
    moving = [i for i, x in enumerate(avals) if jnp.issubdtype(x.dtype, jnp.inexact)]
    run = jaxpr_as_fun(ClosedJaxpr(body, ()))

    def forward(*given):
        def here(*floats):
            every = list(given)
            for i, x in zip(moving, floats, strict=True):
                every[i] = x
            return [x for x in run(*every) if jnp.issubdtype(x.dtype, jnp.inexact)]

        return jax.tree.leaves(jax.vjp(here, *(given[i] for i in moving))[1])

    program, outputs = jaxprs.steps(jax.make_jaxpr(forward)(*avals).jaxpr)
    found = recomputing.stored(program, outputs)
    # Gathered weights have gradients that are whole until they are scattered.
    gathered = sum(s.bytes for s in found if program[s.step].name == "optimization_barrier")
    largest = _gradient(program, found, at_the_end=False)
    return sum(s.bytes for s in found) + max(gathered, largest)


def gathers_again(mean: Callable[..., Any], params: Any, batch: Any) -> bool:
    """Whether the loss calls `marks.use` within what it rematerialises."""

    def here(params, batch):
        with marks.bind(use=_marked):
            return mean(params, batch)

    return _finds(jax.make_jaxpr(here)(params, batch).jaxpr, False)


def _taken(x, dtype, is_cut):
    """A parameter as used: a gather or a cast makes a new array, as a barrier in a trace does."""
    is_cast = dtype is not None and jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype != dtype
    x = x.astype(dtype) if is_cast else x
    return jax.lax.optimization_barrier(x) if is_cut or is_cast else x


def _marked(tree):
    return jax.tree.map(jax.lax.optimization_barrier, tree)


def _finds(jaxpr, again):
    for eqn in jaxpr.eqns:
        if again and eqn.primitive.name == "optimization_barrier":
            return True
        inner = again or eqn.primitive.name in jaxprs.REMAT
        if any(_finds(each, inner) for each in jaxprs.inner(eqn)):
            return True
    return False
