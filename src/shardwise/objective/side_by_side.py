"""Two traces of one loss, for one and for two lengths of an axis, followed side by side.

What grows with the axis has twice the length in the second program, wherever a transpose or a
reshape has put it. `Pair` walks through both, and through the programs within them; what it
carries from step to step, and what that must not do, a subclass says: `tokens` for a sequence that
is cut, `mixing` for rows.
"""

import functools
import operator
from typing import Any

from jax.extend.core import Literal

from shardwise.objective.following import programs, scan_carries


class Pair:
    """Both programs, followed side by side; `nothing` is what is known of a number."""

    nothing: Any = frozenset()

    def through(self, a: Any, b: Any, given: list) -> list:
        """What is known of the outputs of equation `a`, whose twin is `b`."""
        raise NotImplementedError

    def differ(self, what: str) -> None:
        """Raise: the second program does `what`, and there is no following both."""
        raise NotImplementedError

    def run(self, one: Any, two: Any, given: list) -> list:
        """What is known of the outputs, from what is known of the inputs."""
        if len(one.eqns) != len(two.eqns):
            self.differ("is another program for a longer {}, such as a loop over it")
        env = dict(zip(one.invars, given, strict=True))
        for a, b in zip(one.eqns, two.eqns, strict=True):
            sizes = [(len(eqn.invars), len(eqn.outvars)) for eqn in (a, b)]
            if a.primitive is not b.primitive or sizes[0] != sizes[1]:
                self.differ("is another program for a longer {}")
            known = [self._known(env, v) for v in a.invars]
            env.update(zip(a.outvars, self.through(a, b, known), strict=True))
        return [self._known(env, v) for v in one.outvars]

    def _known(self, env, v):
        return self.nothing if isinstance(v, Literal) else env.get(v, self.nothing)

    def union(self, known: list) -> Any:
        """What is known of something that follows from all of these."""
        return functools.reduce(operator.or_, known, self.nothing)

    def within(self, a: Any, b: Any) -> list[tuple]:
        """The programs within two equations, in pairs."""
        inner = [list(programs(eqn.params)) for eqn in (a, b)]
        if len(inner[0]) != len(inner[1]):
            self.differ("is another program for a longer {}")
        return list(zip(*inner, strict=True))

    def called(self, inner: list[tuple], given: list, count: int) -> list:
        """What is known of `count` outputs of the programs that an equation calls."""
        found = [self.nothing] * count
        for one, two in inner:
            own = given[len(given) - len(one.invars) :] if len(one.invars) <= len(given) else None
            out = self.run(one, two, own or [self.union(given)] * len(one.invars))
            if len(out) == count:
                found = [x | y for x, y in zip(found, out, strict=True)]
        return found

    def looped(self, inner: tuple, given: list, carries: slice) -> list:
        """What is known of the outputs of a loop's program, once it goes round."""
        given = list(given)
        while True:
            out = self.run(*inner, given)
            merged = [x | y for x, y in zip(given[carries], out, strict=False)]
            if merged == given[carries]:
                return out
            given[carries] = merged


def carries(a: Any, body: Any) -> slice:
    """Which inputs of a scan are carried round."""
    return scan_carries(a.invars, a.outvars, body)


def grown(v: Any, w: Any) -> list[int] | None:
    """The axes that are twice as long in the second program; None if one is longer otherwise."""
    one, two = (getattr(x.aval, "shape", ()) for x in (v, w))
    if len(one) != len(two):
        return None
    pairs = [(i, a, b) for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]
    return None if any(b != 2 * a for _, a, b in pairs) else [i for i, _, _ in pairs]
