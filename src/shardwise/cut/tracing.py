"""The loss as a traced program, with its marks found."""

import itertools

import jax
from jax.ad_checkpoint import checkpoint_name

from shardwise import marks
from shardwise.cut.equations import CALLS, inlined

MARK = "shardwise stage boundary "


def trace(function, args):
    """(program, shapes of the output, number of marks): the marks stand at its top level.

    Functions under `jax.jit` are inlined, and marks in them seen.

    Raises:
      ValueError: a mark within a scan, a remat or another inner function, where the program
        cannot be cut.
    """
    count = itertools.count()

    def mark(x):
        name = f"{MARK}{next(count)}"
        return jax.tree.map(lambda leaf: checkpoint_name(leaf, name), x)

    with marks.bind(stage_boundary=mark):
        # A function of its own: the trace of one seen before might be cached, without the marks.
        traced, shapes = jax.make_jaxpr(lambda *args: function(*args), return_shape=True)(*args)
    closed = inlined(traced, CALLS)
    seen = [n for eqn in closed.jaxpr.eqns if (n := mark_of(eqn)) is not None]
    total = next(count)
    if set(seen) != set(range(total)) or (seen and max(seen) >= total):
        raise ValueError(_hidden(closed.jaxpr, total, set(seen)))
    return closed, shapes, total


def mark_of(eqn):
    """Which mark this equation is, counted from 0; None if it is none."""
    name = str(eqn.params.get("name", "")) if eqn.primitive.name == "name" else ""
    return int(name.removeprefix(MARK)) if name.startswith(MARK) else None


def _hidden(jaxpr, total, seen):
    for eqn in jaxpr.eqns:
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_jaxpr):
            if _jaxpr(inner) is not None and MARK in str(_jaxpr(inner)):
                return (
                    f"cut: marks.stage_boundary stands within a {eqn.primitive.name}, whose inside "
                    f"cannot be cut; call it between such parts, at the loss's own level."
                )
    return (
        f"cut: {total} marks were called and {len(seen)} are in the traced loss; a function that "
        f"jax.jit has traced before keeps that trace: mark outside of it, or trace it anew."
    )


def _jaxpr(x):
    inner = getattr(x, "jaxpr", x)
    return inner if hasattr(inner, "eqns") else None
