"""The loss as a traced program: its marks found, its constraints handed to their stages."""

import collections
import itertools
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from shardwise import jaxprs, marks
from shardwise.jaxprs import CALLS, inlined

MARK = "shardwise stage boundary "
_calls = itertools.count()  # a name for each call, since jax.jit keeps traces, and names with them


def trace(function, args):
    """(program, shapes of the output, {variable: number} of its marks, at its top level).

    Functions under `jax.jit` are inlined, and marks in them seen.

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

    with marks.bind(stage_boundary=mark):
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


def mark_of(eqn):
    """The name of the mark that this equation is; None if it is none."""
    name = str(eqn.params.get("name", "")) if eqn.primitive.name == "name" else ""
    return name if name.startswith(MARK) else None


def constrained(program: Any, relocate: Callable[[Any], Any]) -> Any:
    """The same program (a jaxpr, open or closed), with `relocate(sharding)` in each constraint.

    Inner programs are looked into: scans, branches, rematerialised layers.
    """
    if hasattr(program, "jaxpr") and program.jaxpr is not program:
        return program.replace(jaxpr=constrained(program.jaxpr, relocate))
    return program.replace(eqns=[_equation(eqn, relocate) for eqn in program.eqns])


def _equation(eqn, relocate):
    params = {name: _value(value, relocate) for name, value in eqn.params.items()}
    if eqn.primitive.name == "sharding_constraint":
        params["sharding"] = relocate(params["sharding"])
    return eqn.replace(params=params)


def _value(value, relocate):
    if hasattr(value, "eqns"):
        return constrained(value, relocate)
    if type(value) is tuple:
        return tuple(_value(one, relocate) for one in value)
    return value
