"""The loss as a traced program, with its marks found."""

import collections
import itertools

import jax
from jax.ad_checkpoint import checkpoint_name

from shardwise import jaxprs, marks
from shardwise.jaxprs import CALLS, inlined

MARK = "shardwise stage boundary "
_calls = itertools.count()  # a name for each call, since jax.jit keeps traces, and names with them


def trace(function, args, constrain=None):
    """(program, shapes of the output, {variable: number} of its marks, at its top level).

    Functions under `jax.jit` are inlined, and marks in them seen. `constrain(x, name)` is what
    `marks.constrain` does within.

    Raises:
      ValueError: a mark around no array, or within a scan, a remat or another inner function,
        where the program cannot be cut.
    """

    def mark(x):
        call, (leaves, structure) = next(_calls), jax.tree.flatten(x)
        if not leaves:
            raise ValueError(
                "cut: marks.stage_boundary was given no array, so it marks no place; give it the "
                "activation that the next stage reads."
            )
        named = [checkpoint_name(leaf, f"{MARK}{call}.{i}") for i, leaf in enumerate(leaves)]
        return jax.tree.unflatten(structure, named)

    with marks.bind(stage_boundary=mark, **({"constrain": constrain} if constrain else {})):
        # A function of its own: the trace of one seen before may be cached, without the marks.
        traced, shapes = jax.make_jaxpr(lambda *args: function(*args), return_shape=True)(*args)
    closed = inlined(traced, CALLS)
    for eqn in closed.jaxpr.eqns:
        within = (e for body in jaxprs.inner(eqn) for e in jaxprs.every(body))
        if any(map(mark_of, within)):
            raise ValueError(
                f"cut: marks.stage_boundary stands within a {eqn.primitive.name}, whose inside "
                f"cannot be cut; call it between such parts, at the loss's own level."
            )
    return closed, shapes, _numbers(closed.jaxpr)


def _numbers(jaxpr):
    """The number of the mark that yields each variable.

    A jitted block that runs again leaves the same names again: that is a further mark.
    """
    seen, numbers, found = collections.Counter(), {}, {}
    for eqn in jaxpr.eqns:
        if name := mark_of(eqn):
            seen[name] += 1
            mark = name.rpartition(".")[0], seen[name]
            found[eqn.outvars[0]] = numbers.setdefault(mark, len(numbers))
    return found


def row_axes(closed, function, args, constrain=None):
    """{variable of `closed`: the axis along which it grows with the rows}, where there is one.

    `closed` is the trace of `function`, and `args` have more rows: of what is computed from rows,
    the shape is another, wherever a reshape or a transpose has put them. A loss that is another
    program at that size, or none, tells only of its arguments.
    """
    axes = {}
    for v, x in zip(closed.jaxpr.invars, args, strict=True):
        axes |= _grown(v, x)
    try:
        wider = trace(function, args, constrain)[0].jaxpr
    except Exception:  # it is written for its own number of rows
        return axes
    pairs = list(zip(closed.jaxpr.eqns, wider.eqns, strict=False))
    same = all(a.primitive is b.primitive for a, b in pairs)
    if same and len(closed.jaxpr.eqns) == len(wider.eqns):
        for a, b in pairs:
            for v, w in zip(a.outvars, b.outvars, strict=True):
                axes |= _grown(v, w.aval)
    return axes


def _grown(v, wider):
    shape, other = getattr(v.aval, "shape", ()), getattr(wider, "shape", ())
    grown = [i for i, (a, b) in enumerate(zip(shape, other, strict=False)) if a != b]
    return {v: grown[0]} if grown and len(shape) == len(other) else {}


def mark_of(eqn):
    """The name of the mark that this equation is; None if it is none."""
    name = str(eqn.params.get("name", "")) if eqn.primitive.name == "name" else ""
    return name if name.startswith(MARK) else None
