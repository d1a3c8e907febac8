"""Traced programs, walked through: what stands in an equation, what a value follows from."""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import Literal

Labels = frozenset
NOTHING: Labels = frozenset()


def inner(eqn: Any) -> list[Any]:
    """The programs that stand within an equation, in the order of its parameters."""
    values = (x if isinstance(x, tuple | list) else (x,) for x in eqn.params.values())
    return [y for xs in values for x in xs if hasattr(y := getattr(x, "jaxpr", x), "eqns")]


def every(jaxpr: Any) -> Iterator[Any]:
    """All equations of a program, and of the programs within them."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in inner(eqn):
            yield from every(body)


def carries(scan: Any, body: Any) -> slice:
    """The inputs of a scan that are carried round; before them stand constants, after them xs.

    By ranks, since JAX's versions count in different ways: what is stacked has one axis more
    outside than inside.
    """
    ys = sum(_rank(a) > _rank(b) for a, b in zip(scan.outvars, body.outvars, strict=True))
    xs = sum(_rank(a) > _rank(b) for a, b in zip(scan.invars, body.invars, strict=True))
    last = len(scan.invars) - xs
    return slice(last - (len(body.outvars) - ys), last)


class Follower:
    """Labels carried forward through a program: which inputs a value follows from, say.

    Loops are followed until their labels settle; `settled` is false on the way there. A subclass
    says what else becomes of labels.
    """

    settled = True

    def enter(self, v: Any, labels: Labels) -> Labels:
        """The labels that an input has within the program that it enters."""
        return labels

    def through(self, eqn: Any, given: list[Labels]) -> list[Labels]:
        """The labels of an equation's outputs: here each has those of all inputs.

        Of programs within it, whose inputs are in an order that is not known, likewise.
        """
        everything = NOTHING.union(*given)
        for body in inner(eqn):
            self.run(body, [everything] * len(body.invars))
        return [everything] * len(eqn.outvars)

    def run(self, jaxpr: Any, given: Sequence[Labels]) -> list[Labels]:
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


def _rank(v):
    return len(getattr(v.aval, "shape", ()))
