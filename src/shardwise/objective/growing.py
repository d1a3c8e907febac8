"""How a loss's numbers grow with the rows: its trace beside that for twice as many.

Sums over rows double, and means stay. What these two traces cannot tell is left alone: a number
from a loop, from a rule of the loss's own, or traces of which the steps do not correspond.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal

from shardwise.objective.following import Step

# A number times these stays a sum over rows, or a mean; so does an array, entry by entry.
LINEAR = {"neg", "convert_element_type", "reshape", "squeeze", "reduce_sum", "copy", "name"}
ADDING = {"add", "sub", "add_any"}
SUMMING = {"reduce_sum", "dot_general"}
BENDING = {"sqrt", "rsqrt", "cbrt", "log", "log1p", "exp", "exp2", "expm1", "tanh", "logistic"}
BENDING |= {"integer_pow", "pow", "square"}
CHOOSING = {"max", "min", "clamp", "select_n"}


class Term(NamedTuple):
    """One of the terms that add up to a number: factor times the sum of the entries of `of`."""

    of: Any
    factor: float
    divisors: tuple[float, ...]


def terms(program: Any, output: Any) -> list[Term]:
    """Those in which values of the batch are, as far as they are linear in an array."""
    found, pending = [], [Term(output, 1.0, ())]
    while pending:
        term = pending.pop()
        if not program.of_batch(term.of):
            continue
        step = program.made_by.get(term.of)
        name = step.name if step else ""
        numbers = [program.static(v) for v in step.inputs] if name in ("mul", "div") else []
        if name in LINEAR or name in ADDING:
            pending += [term._replace(of=v) for v in step.inputs]
        elif name == "mul" and any(x is not None for x in numbers):
            at = 1 if numbers[0] is not None else 0
            pending.append(term._replace(of=step.inputs[at], factor=term.factor * numbers[1 - at]))
        elif name == "div" and numbers[1]:
            divided = term.factor / numbers[1], (*term.divisors, numbers[1])
            pending.append(Term(step.inputs[0], *divided))
        else:
            found.append(term)
    return found


def looks_like_mean(term: Term) -> bool:
    """Whether its divisors leave no doubt, as those of `jnp.mean` over all entries, or over rows.

    A number that the other axes could account for leaves one: a sum over rows of means over
    features divides by their number, which may be a multiple of the rows'. So does one that it is
    multiplied with, which may be the number of rows.
    """
    rows, *others = (*term.of.aval.shape, 1)[: max(1, len(term.of.aval.shape))]
    size = rows * math.prod(others)
    of_features = {1}
    for axis in others:
        of_features |= {axis * product for product in of_features}
    whole = size in term.divisors or math.prod(term.divisors) == size
    weighed = not math.isclose(abs(term.factor) * math.prod(term.divisors), 1, rel_tol=1e-3)
    return (
        rows > 1
        and not weighed
        and (whole or any(d == rows and d not in of_features for d in term.divisors))
    )


def behind(program: Any, v: Any) -> list[Step]:
    """The steps from which a variable follows, last first."""
    found, pending, seen = [], [v], set()
    while pending:
        v = pending.pop()
        step = None if isinstance(v, Literal) else program.made_by.get(v)
        if step is not None and id(step) not in seen:
            seen.add(id(step))
            found.append(step)
            pending += step.inputs
    return found


def standing(program: Any, output: Any) -> list[float]:
    """Of each term of a number that no value of the batch is in: its static factor, if not 0."""
    found, pending = [], [output]
    while pending:
        v = pending.pop()
        if not program.of_part(v):
            found += [factor] if (factor := program.factor(v)) != 0 else []
            continue
        step = program.made_by.get(v)
        if step is not None and step.name == "reduce_sum":
            pending += _stacked(program, program.stripped(step.inputs[0]))
        if step is None or any(_rank(x) for x in step.inputs):
            continue
        if step.name in LINEAR or step.name in ADDING:
            pending += step.inputs
        elif step.name == "mul":
            dependent = [x for x in step.inputs if program.of_part(x)]
            pending += dependent if len(dependent) == 1 else []
        elif step.name == "div" and not program.of_batch(step.inputs[1]):
            pending.append(step.inputs[0])
    return found


def _stacked(program, v):
    """The numbers that were stacked to an array, to be added up."""
    step = program.made_by.get(v)
    parts = step.inputs if step is not None and step.name in ("concatenate", "stack") else ()
    return [program.stripped(x) for x in parts if math.prod(x.aval.shape) == 1]


def numbers_behind(program: Any, v: Any) -> list[Step]:
    """The steps that made a scalar out of scalars, from it backwards."""
    found, pending, seen = [], [v], set()
    while pending:
        v = pending.pop()
        step = None if isinstance(v, Literal) else program.made_by.get(v)
        if step is None or id(step) in seen:
            continue
        seen.add(id(step))
        found.append(step)
        pending += [x for x in step.inputs if not isinstance(x, Literal) and _rank(x) == 0]
    return found


class Growth:
    """A program beside the same of twice as many rows."""

    def __init__(self, program: Any, more: Any):
        self.program, self.more = program, more
        self.corresponds = [s.name for s in program.steps] == [s.name for s in more.steps]
        self.twin, self.over_rows = {}, set()
        for step, other in zip(program.steps, more.steps, strict=False):
            for vs, ws in ((step.inputs, other.inputs), (step.outputs, other.outputs)):
                pairs = zip(vs, ws, strict=False)
                self.twin |= {v: w for v, w in pairs if not isinstance(v, Literal)}
            sums = step.name in SUMMING and any(map(self._grows_of_batch, step.inputs))
            if sums or any(v in self.over_rows for v in step.inputs if not isinstance(v, Literal)):
                self.over_rows |= {v for v in step.outputs if not self.grows(v)}

    def grows(self, v: Any) -> bool:
        """Whether it has more entries where there are more rows."""
        known = not isinstance(v, Literal) and v in self.twin
        return known and v.aval.shape != self.twin[v].aval.shape

    def is_sum(self, v: Any) -> bool:
        """Whether a sum over rows of the batch's values is in it, and it has no rows itself."""
        return not isinstance(v, Literal) and v in self.over_rows

    def ratios(self, i: int) -> Iterator[float]:
        """By what each term of output `i` is multiplied: 2 for sums, 1 for means."""
        pairs = [terms(p, p.outputs[i]) for p in (self.program, self.more)]
        for a, b in zip(*pairs, strict=False):
            sizes = [math.prod(t.of.aval.shape) for t in (a, b)]
            if sizes[1] == 2 * sizes[0] and a.factor and not self._hides_number(a.of, b.of):
                yield 2 * b.factor / a.factor

    def _grows_of_batch(self, v):
        return self.program.of_batch(v) and self.grows(v)

    def _hides_number(self, a, b):
        """Whether the number of rows may be in what these arrays hold."""
        steps = [behind(p, v) for p, v in ((self.program, a), (self.more, b))]
        counts = any(
            step.name in SUMMING and not self.program.labelled(step.outputs[0]) for step in steps[0]
        )
        if counts or any(self._is_constant(v) for step in steps[0] for v in step.inputs):
            return True
        return [_numbers(s) for s in steps[0]] != [_numbers(s) for s in steps[1]]

    def _is_constant(self, v):
        known = not isinstance(v, Literal) and v in self.program.constants
        return known and (self.grows(v) or not v.aval.shape)


def _rank(v):
    return len(v.aval.shape)


def _numbers(step):
    """The floating-point numbers that stand in a step, and in programs within it."""
    found = [_number(v) for v in step.inputs if isinstance(v, Literal)]
    if step.name != "convert_element_type":
        kinds = [v.aval.dtype for v in step.inputs if isinstance(v, Literal)]
        pairs = zip(found, kinds, strict=True)
        found = [x for x, kind in pairs if jnp.issubdtype(kind, jnp.inexact)]
    for value in step.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            body = getattr(one, "jaxpr", one)
            for eqn in getattr(body, "eqns", ()):
                found += _numbers(Step(eqn.primitive.name, tuple(eqn.invars), (), eqn.params))
    return found


def _number(literal):
    return float(literal.val) if jnp.ndim(literal.val) == 0 else 0.0
