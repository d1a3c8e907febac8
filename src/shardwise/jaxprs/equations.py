"""Equations of a traced program: which are needed for what, how to run them, and calls opened."""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.extend import source_info_util
from jax.extend.core import Literal

from shardwise.jaxprs.walking import inner

CALLS = {"jit", "pjit", "closed_call", "core_call"}
REMAT = {"checkpoint", "remat", "remat2"}


class Equation(NamedTuple):
    """An equation: `outvars` from `invars`, by `run(*values) -> list`; `origin` is the jaxpr's own.

    One with `effects`, such as a `jax.debug.print`, is to run once, whoever reads what it yields.
    That a collective has the name of an axis is no such effect, though JAX counts it as one.
    """

    name: str
    invars: tuple
    outvars: tuple
    run: Callable
    origin: Any
    effects: bool = False


def equations(jaxpr: Any) -> list[Equation]:
    """A jaxpr's equations, in order."""
    return [
        Equation(
            name=e.primitive.name,
            invars=tuple(e.invars),
            outvars=tuple(e.outvars),
            run=functools.partial(bind, e),
            origin=e,
            effects=any(type(effect).__name__ != "NamedAxisEffect" for effect in e.effects),
        )
        for e in jaxpr.eqns
    ]


def bind(eqn: Any, *values: Any) -> list:
    """Run one equation of a jaxpr on values, in whatever trace these belong to.

    What it leaves there has the names and source lines that it had, so that a profile of the new
    program speaks of the user's code.
    """
    found = eqn.primitive.get_bind_params(eqn.params)  # a dict alone, since JAX 0.12
    functions, params = found if isinstance(found, tuple) else ((), found)
    with named_as(eqn), eqn.ctx.manager:
        out = eqn.primitive.bind(*functions, *values, **params)
    return out if eqn.primitive.multiple_results else [out]


def named_as(eqn: Any, *more: str) -> AbstractContextManager:
    """A context in which equations get the source line of `eqn`, and its names, and `more`."""
    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    for name in more:
        names = names.extend(name)
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=names)


def variables(atoms: Iterable) -> list:
    """The atoms of an equation that are no literals."""
    return [v for v in atoms if not isinstance(v, Literal)]


def read(env: dict, atoms: Iterable) -> list:
    """The values of `atoms`, which `env` has; a literal is its own."""
    return [v.val if isinstance(v, Literal) else env[v] for v in atoms]


def run(eqns: Iterable[Equation], env: dict) -> dict:
    """Run equations in order, adding what they yield to `env`."""
    for eqn in eqns:
        env.update(zip(eqn.outvars, eqn.run(*read(env, eqn.invars)), strict=True))
    return env


def needed(
    eqns: Sequence[Equation],
    outputs: Iterable,
    given: Collection,
    keep: Callable[[Equation], bool] = lambda eqn: False,
) -> tuple[list[Equation], set]:
    """The equations from which `outputs` follow, in order, and which of the `given` they use.

    Those for which `keep` is true are among them, and what they follow from.
    """
    wanted, used, chosen = set(), set(), []

    def ask(atoms):
        for v in variables(atoms):
            (used if v in given else wanted).add(v)

    ask(outputs)
    for eqn in reversed(eqns):
        if keep(eqn) or not wanted.isdisjoint(eqn.outvars):
            chosen.append(eqn)
            ask(eqn.invars)
    return chosen[::-1], used


def inlined(closed: Any, names: Collection[str] = frozenset(CALLS)) -> Any:
    """The same traced program, with calls of the primitives in `names` replaced by their bodies."""

    def evaluate(jaxpr, consts, values):
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))
        for eqn in jaxpr.eqns:
            arguments = read(env, eqn.invars)
            if eqn.primitive.name in names:
                called = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
                with named_as(eqn, _called(eqn)):
                    out = evaluate(getattr(called, "jaxpr", called), _consts(called), arguments)
            else:
                out = bind(eqn, *arguments)
            env.update(zip(eqn.outvars, out, strict=True))
        return read(env, jaxpr.outvars)

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *values: evaluate(closed.jaxpr, closed.consts, values))(*avals)


def _called(eqn):
    name = eqn.params.get("name", "")
    return f"jit({name})" if eqn.primitive.name in CALLS else eqn.primitive.name


def _consts(jaxpr):
    return getattr(jaxpr, "consts", ())  # of a closed one; a remat's is open, and has none


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
