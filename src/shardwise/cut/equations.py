"""Equations of a traced program: which are needed for what, and how to run them."""

import functools
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

CALLS = {"jit", "pjit", "closed_call", "core_call"}
REMAT = {"checkpoint", "remat", "remat2"}


class Equation(NamedTuple):
    """`outvars` from `invars`, by `run(*values) -> list`; `origin` is the jaxpr's own equation."""

    name: str
    invars: tuple
    outvars: tuple
    run: Any
    origin: Any


def equations(jaxpr):
    """A jaxpr's equations, in order."""
    return [
        Equation(e.primitive.name, tuple(e.invars), tuple(e.outvars), functools.partial(bind, e), e)
        for e in jaxpr.eqns
    ]


def bind(eqn, *values):
    """Run one equation of a jaxpr on values, in whatever trace these belong to."""
    found = eqn.primitive.get_bind_params(eqn.params)  # a dict alone, since JAX 0.12
    functions, params = found if isinstance(found, tuple) else ((), found)
    out = eqn.primitive.bind(*functions, *values, **params)
    return out if eqn.primitive.multiple_results else [out]


def read(env, variables):
    """Their values; a literal is its own."""
    return [v.val if isinstance(v, Literal) else env[v] for v in variables]


def run(eqns, env):
    """Run equations in order, adding what they yield to `env`."""
    for eqn in eqns:
        env.update(zip(eqn.outvars, eqn.run(*read(env, eqn.invars)), strict=True))
    return env


def needed(eqns, outputs, given):
    """The equations from which `outputs` follow, in order, and which of the `given` they use."""
    wanted, used, chosen = set(), set(), []

    def ask(variables):
        for v in variables:
            if not isinstance(v, Literal):
                (used if v in given else wanted).add(v)

    ask(outputs)
    for eqn in reversed(eqns):
        if not wanted.isdisjoint(eqn.outvars):
            chosen.append(eqn)
            ask(eqn.invars)
    return chosen[::-1], used


def inlined(closed, names=frozenset(CALLS)):
    """The same traced program, with calls of the primitives in `names` replaced by their bodies."""

    def evaluate(jaxpr, consts, values):
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))
        for eqn in jaxpr.eqns:
            arguments = read(env, eqn.invars)
            if eqn.primitive.name in names:
                inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
                out = evaluate(getattr(inner, "jaxpr", inner), _consts(inner), arguments)
            else:
                out = bind(eqn, *arguments)
            env.update(zip(eqn.outvars, out, strict=True))
        return read(env, jaxpr.outvars)

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *values: evaluate(closed.jaxpr, closed.consts, values))(*avals)


def _consts(jaxpr):
    return getattr(jaxpr, "consts", ())  # of a closed one; a remat's is open, and has none
