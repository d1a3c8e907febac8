"""A program with its calls opened: its equations as one list, under names that do not repeat."""

from typing import Any, NamedTuple

from jax.extend.core import Literal

from shardwise.jaxprs.equations import CALLS, REMAT
from shardwise.jaxprs.walking import inner


class Step(NamedTuple):
    """An equation of a program in which calls are opened."""

    name: str
    inputs: tuple
    outputs: tuple
    params: dict


class _Variable:
    """A variable of one opened call: another call of the same program has others."""

    def __init__(self, aval):
        self.aval = aval


def steps(jaxpr: Any) -> tuple[list[Step], list]:
    """(the program's equations with calls opened, its outputs as these name them)."""
    names: dict = {}
    return list(_opened(jaxpr, names, top=True)), [_named(v, names) for v in jaxpr.outvars]


def _opened(jaxpr, names, top=False):
    for eqn in jaxpr.eqns:
        inputs = tuple(_named(v, names) for v in eqn.invars)
        if eqn.primitive.name in CALLS | REMAT:
            (body,) = inner(eqn)
            inside = dict(zip(body.invars, inputs, strict=True))
            yield from _opened(body, inside)
            names.update(zip(eqn.outvars, (_named(v, inside) for v in body.outvars), strict=True))
        elif eqn.primitive.name == "cond":
            yield from _branches(eqn, inputs, names, top)
        else:
            outputs = tuple(v if top else _Variable(v.aval) for v in eqn.outvars)
            names.update(zip(eqn.outvars, outputs, strict=True))
            yield Step(eqn.primitive.name, inputs, outputs, eqn.params)


def _branches(eqn, inputs, names, top):
    """The steps of all branches of a conditional, and for each output the choice."""
    cases = []
    for branch in eqn.params["branches"]:
        inside = dict(zip(branch.jaxpr.invars, inputs[1:], strict=True))
        yield from _opened(branch.jaxpr, inside)
        cases.append([_named(v, inside) for v in branch.jaxpr.outvars])
    for v, *chosen in zip(eqn.outvars, *cases, strict=True):
        names[v] = v if top else _Variable(v.aval)
        yield Step("select_n", (inputs[0], *chosen), (names[v],), {})


def _named(v, names):
    return v if isinstance(v, Literal) else names.get(v, v)
