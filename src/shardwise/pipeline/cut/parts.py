"""Parts of a traced program as functions of groups of values, and what follows from which group."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardwise.jaxprs import Equation, equations, inlined, needed, read, run, variables

Shape = jax.ShapeDtypeStruct
REPEATED = (set(), {0}, {1})  # the sources of what any part computes for itself: see `follows`


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Equations as a function: of groups of values, `inputs`, to groups, `outputs`, or to one."""

    eqns: list[Equation]
    constants: dict
    inputs: Sequence[list]
    outputs: Sequence[list]

    def __call__(self, *values: Sequence) -> Any:
        env = dict(self.constants)
        for group, arrays in zip(self.inputs, values, strict=True):
            env.update(zip(group, arrays, strict=True))
        env = run(self.eqns, env)
        # Also of numbers that the trace has as literals.
        found = tuple([jnp.asarray(x) for x in read(env, group)] for group in self.outputs)
        return found if len(found) > 1 else found[0]

    @functools.cached_property
    def used(self) -> set:
        """The variables that are read."""
        atoms = itertools.chain(*(eqn.invars for eqn in self.eqns), *self.outputs)
        return set(variables(atoms))

    @property
    def reads(self) -> tuple[int, ...]:
        """The numbers of the first group's inputs that are read."""
        return tuple(i for i, v in enumerate(self.inputs[0]) if v in self.used)

    def part(
        self,
        outputs: Sequence[list],
        inputs: Sequence[list],
        keep: Callable[[Equation], Any] = lambda eqn: False,
        trim: int | None = None,
    ) -> "Part":
        """The function from `inputs` to `outputs`, of the equations that it needs, and those with
        effects that it is to `keep`. Of the group of number `trim` it takes what it reads, alone.
        """
        given, asked = {*itertools.chain(*inputs), *self.constants}, itertools.chain(*outputs)
        eqns, used = needed(self.eqns, asked, given, lambda eqn: eqn.effects and keep(eqn))
        groups = list(inputs)
        if trim is not None:
            groups[trim] = [v for v in groups[trim] if v in used]
        return Part(eqns, self.constants, groups, outputs)


def traced(function: Callable, names: Collection[str], *groups: Any) -> tuple[Part, Any]:
    """(`function` from groups to groups of abstract arrays, with calls of `names` inlined; what it
    returns). Groups are trees.
    """
    # A function of its own: the trace of one seen before may be cached, under other marks.
    closed, out = jax.make_jaxpr(lambda *given: function(*given), return_shape=True)(*groups)
    sizes = ([len(jax.tree.leaves(group)) for group in each] for each in (groups, out))
    return part_of(inlined(closed, names), *sizes), out


def part_of(closed: Any, inputs: Sequence[int], outputs: Sequence[int]) -> Part:
    """A traced program, whose inputs and outputs come in groups of these sizes."""
    jaxpr = closed.jaxpr
    constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    groups = split(jaxpr.invars, inputs), split(jaxpr.outvars, outputs)
    return Part(equations(jaxpr), constants, *groups)


def follows(
    part: Part, once: Callable[[Equation], Any] = lambda eqn: eqn.effects
) -> dict[Any, set]:
    """{variable: the numbers of the groups that it follows from}, and None behind one of `once`."""
    found = {v: {i} for i, group in enumerate(part.inputs) for v in group}
    found |= {v: set() for v in part.constants}
    for eqn in part.eqns:
        sources = set().union(*(found[v] for v in variables(eqn.invars)))
        found.update(dict.fromkeys(eqn.outvars, sources | {None} if once(eqn) else sources))
    return found


def split(values: Sequence, sizes: Iterable[int]) -> list[list]:
    """The values in groups of these sizes."""
    ends = [0, *itertools.accumulate(sizes)]
    return [list(values[a:b]) for a, b in itertools.pairwise(ends)]


def shapes_of(atoms: Sequence) -> list[Shape]:
    """The shapes and dtypes of variables and literals."""
    return [Shape(v.aval.shape, v.aval.dtype) for v in atoms]


def inexact(x: Any) -> bool:
    """Whether an array is of a floating-point dtype, and so has a cotangent."""
    return jnp.issubdtype(x.dtype, jnp.inexact)
