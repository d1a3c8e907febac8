"""Constraints on layouts within a traced program, handed to the stage that they end up in."""

from collections.abc import Callable
from typing import Any


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
