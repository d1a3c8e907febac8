"""Traced programs (jaxprs): what stands in them, what follows from what, and how to run parts."""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.extend import source_info_util
from jax.extend.core import Literal

CALLS = {"jit", "pjit", "closed_call", "core_call"}
REMAT = {"checkpoint", "remat", "remat2"}
NOTHING: frozenset = frozenset()


def inner(eqn: Any) -> list[Any]:
    """The programs that stand within an equation, in the order of its parameters."""
    values = (x if isinstance(x, tuple | list) else (x,) for x in eqn.params.values())
    return [y for xs in values for x in xs if hasattr(y := getattr(x, "jaxpr", x), "eqns")]


def every(jaxpr: Any) -> Iterator[Any]:
    """All equations of a program, and of the programs within them."""
    for eqn in jaxpr.eqns:
        yield eqn
        yield from within(eqn)


def within(eqn: Any) -> Iterator[Any]:
    """All equations of the programs within an equation."""
    for body in inner(eqn):
        yield from every(body)


def carries(scan: Any, body: Any) -> slice:
    """The inputs of a scan that are carried round; before them stand constants, after them xs.

    By ranks, since JAX's versions count differently: what is stacked has an axis more outside.
    """
    ys = sum(a.aval.ndim > b.aval.ndim for a, b in zip(scan.outvars, body.outvars, strict=True))
    xs = sum(a.aval.ndim > b.aval.ndim for a, b in zip(scan.invars, body.invars, strict=True))
    last = len(scan.invars) - xs
    return slice(last - (len(body.outvars) - ys), last)


class Follower:
    """Labels, in frozensets, carried forward through a program: what a value follows from, say.

    Loops are followed until their labels settle; `settled` is false on the way there. A subclass
    says what else becomes of labels.
    """

    settled = True

    def enter(self, v: Any, labels: frozenset) -> frozenset:
        """The labels that an input has within the program that it enters."""
        return labels

    def through(self, eqn: Any, given: list[frozenset]) -> list[frozenset]:
        """The labels of an equation's outputs: here each has those of all inputs.

        Of programs within it, whose inputs are in an order that is not known, likewise.
        """
        everything = NOTHING.union(*given)
        for body in inner(eqn):
            self.run(body, [everything] * len(body.invars))
        return [everything] * len(eqn.outvars)

    def run(self, jaxpr: Any, given: Sequence[frozenset]) -> list[frozenset]:
        """The labels of a program's outputs, from those of its inputs."""
        env = {v: self.enter(v, x) for v, x in zip(jaxpr.invars, given, strict=True)}
        for eqn in jaxpr.eqns:
            labels = [_label(env, v) for v in eqn.invars]
            env.update(zip(eqn.outvars, self._through(eqn, labels), strict=True))
        return [_label(env, v) for v in jaxpr.outvars]

    def _through(self, eqn, given):
        name, bodies = eqn.primitive.name, inner(eqn)
        if name == "scan":
            return self._loop(bodies[0], given, carries(eqn, bodies[0]))
        if name == "while":
            conds, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            test, body = (eqn.params[key].jaxpr for key in ("cond_jaxpr", "body_jaxpr"))
            self.run(test, [*given[:conds], *given[conds + consts :]])
            return self._loop(body, given[conds:], slice(consts, len(given) - conds))
        if name == "cond":
            branches = [self.run(body, given[1:]) for body in bodies]
            return [given[0].union(*labels) for labels in zip(*branches, strict=True)]
        if len(bodies) == 1 and len(bodies[0].invars) == len(given):
            return self.run(bodies[0], given)
        return self.through(eqn, given)

    def _loop(self, body, given, carried):
        given, settled = list(given), self.settled
        self.settled = False
        while True:
            out = self.run(body, given)
            again = [a | b for a, b in zip(given[carried], out, strict=False)]
            if again == given[carried]:
                break
            given[carried] = again
        self.settled = settled
        return self.run(body, given) if settled else out


def _label(env, v):
    return NOTHING if isinstance(v, Literal) else env.get(v, NOTHING)


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
    eqns: Sequence, outputs: Iterable, given: Collection, keep: Callable = lambda eqn: False
) -> tuple[list[Any], set]:
    """The equations, ours or a jaxpr's, from which `outputs` follow, and the `given` they use.

    They are in order. Those for which `keep` is true are among them, and what they follow from.
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
    """The same traced program, with calls of the primitives in `names` replaced by their bodies.

    With "cond" among them, all branches run, and of their outputs one is chosen.
    """

    def evaluate(jaxpr, consts, values):
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))
        for eqn in jaxpr.eqns:
            arguments, name = read(env, eqn.invars), eqn.primitive.name
            if name not in names:
                out = bind(eqn, *arguments)
            elif name == "cond":
                chosen, *arguments = arguments
                cases = (evaluate(b.jaxpr, b.consts, arguments) for b in eqn.params["branches"])
                out = [jax.lax.select_n(chosen, *each) for each in zip(*cases, strict=True)]
            else:
                called = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
                consts = getattr(called, "consts", ())  # of a closed one: a remat's is open
                own = f"jit({eqn.params.get('name', '')})" if name in CALLS else name
                with named_as(eqn, own):
                    out = evaluate(getattr(called, "jaxpr", called), consts, arguments)
            env.update(zip(eqn.outvars, out, strict=True))
        return read(env, jaxpr.outvars)

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *values: evaluate(closed.jaxpr, closed.consts, values))(*avals)
