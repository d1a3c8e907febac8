"""What cannot be right when rows are divided, found in the trace of a loss."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from shardwise.objective import growing
from shardwise.objective.following import LOCAL, Labels, Step, every, label_of, programs
from shardwise.objective.sums import check_sums

BATCH = frozenset({"batch", "rows"})
CONVERTING = {"convert_element_type", "reshape", "squeeze", "copy", "broadcast_in_dim"}
INVERTING = {"div", "rsqrt", "integer_pow", "pow"}


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced loss, opened: its outputs, what made each variable, and what that follows from."""

    steps: list[Step]
    outputs: list
    made_by: dict[Any, Step]
    labels: dict[Any, Labels]
    constants: dict
    draws: list[tuple[Labels, Any]]  # of each draw of random bits: what it follows from, its shape
    has_rules: bool  # whether a backward rule of the user's own is in it

    @classmethod
    def read(cls, closed: ClosedJaxpr, labels: Sequence[Labels]) -> "Program":
        """The program whose inputs have these labels."""
        draws, rules = [], []

        def visit(step, given):
            if step.name == "random_bits":
                draws.append((frozenset().union(*given), step.params.get("shape")))
            if step.name.startswith("custom_vjp") and "all_gather" not in str(step.params):
                rules.append(step)  # a gather's own, by which a strategy reduces, is none

        steps, outputs, found = every(closed.jaxpr, labels, visit)
        made_by = {v: step for step in steps for v in step.outputs}
        constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        return cls(steps, outputs, made_by, found, constants, draws, bool(rules))

    def of_batch(self, v: Any) -> bool:
        """Whether it follows from values of the batch."""
        return bool(label_of(self.labels, v) & BATCH)

    def of_part(self, v: Any) -> bool:
        """Whether it follows from them, or from what `marks.local` made of them."""
        return bool(label_of(self.labels, v) & (BATCH | {LOCAL}))

    def labelled(self, v: Any) -> bool:
        """Whether it follows from any input."""
        return bool(label_of(self.labels, v))

    def stripped(self, v: Any) -> Any:
        """What an array was before it was converted or broadcast."""
        while not isinstance(v, Literal) and v in self.made_by:
            if self.made_by[v].name not in CONVERTING:
                break
            v = self.made_by[v].inputs[0]
        return v

    def static(self, v: Any) -> float | None:
        """The number that stands in the program, perhaps converted; None for anything else."""
        while not isinstance(v, Literal):
            if v in self.constants:
                x = self.constants[v]
                return float(x) if jnp.ndim(x) == 0 else None
            if v not in self.made_by or self.made_by[v].name not in CONVERTING:
                return None
            v = self.made_by[v].inputs[0]
        return float(v.val) if jnp.ndim(v.val) == 0 else None

    def factor(self, v: Any) -> float:
        """By which number that stands in the program a scalar is multiplied."""
        if (number := self.static(v)) is not None:
            return number
        step = self.made_by.get(v)
        if step is None:
            return 1.0
        if step.name == "mul":
            return self.factor(step.inputs[0]) * self.factor(step.inputs[1])
        return self.factor(step.inputs[0]) if step.name in growing.LINEAR else 1.0


def examine(
    program: Program, has_count: bool, doubled: Callable[[], Program], cut: int | None = None
) -> dict[str, bool]:
    """The facts of a `Traced`; `doubled` traces the loss again, for twice as many rows.

    `cut` is the length of a part of the sequence, where that is cut too.

    Raises:
      TypeError, ValueError: as `trace`.
    """
    _check_quotients(program)
    facts = dict(by_place=check_draws(program.draws, cut), linear=not program.has_rules)
    doubled = functools.cache(doubled)
    if not has_count:
        check_sums(program, has_count, doubled)
        return facts
    count, factors = program.outputs[1], growing.standing(program, program.outputs[0])
    # What is drawn for each part is a number of its own.
    count_stands = not program.of_part(count) and "key" not in label_of(program.labels, count)
    if count_stands or factors:
        more = doubled()
        if count_stands:
            _check_static_count(program.static(count), more.static(more.outputs[1]))
        _check_terms(factors, growing.standing(more, more.outputs[0]))
    check_sums(program, has_count, doubled)
    return facts | {"count_follows": "params" in label_of(program.labels, count)}


def _check_quotients(program):
    """A number divided by what the batch's values add up to is no sum, and no mean, over rows."""
    for step in growing.numbers_behind(program, program.outputs[0]):
        if step.name.startswith("custom_") and not any(map(_rank, step.inputs)):
            _check_rule(program, step)
        if step.name not in INVERTING or (step.name == "integer_pow" and step.params["y"] > 0):
            continue
        below = step.inputs[1 if step.name == "div" else 0]
        if program.of_batch(below) and _rank(below) == 0:
            _refuse_quotient()


def _check_rule(program, step):
    """The same of a function of numbers with a rule of its own, such as a safe division."""
    if sum(map(program.of_batch, step.inputs)) > 1 and _divides(step.params):
        _refuse_quotient()


def _divides(params):
    return any(
        (eqn.primitive.name == "div" and not isinstance(eqn.invars[1], Literal))
        or _divides(eqn.params)
        for body in programs(params)
        for eqn in body.eqns
    )


def _refuse_quotient():
    raise ValueError(
        "the loss divides by a number that it computes from the batch's values, such as the number "
        "of tokens that a mask leaves. Each part of the batch would divide by its own, and the "
        "mean of these is not the mean of all: return objective.Mean(total, count), undivided."
    )


def _check_static_count(count, doubled):
    """A count that is no value of the batch has to be the number of its rows, or so many each."""
    if count is None or doubled != 2 * count:
        raise ValueError(
            "the loss's count does not depend on the batch, and so would be added up once for each "
            "part. Return the number of what total adds up, counted in the batch that the loss is "
            "given, Mean(total, batch['mask'].sum()) or Mean(total, batch['x'].size); or return a "
            "scalar, a mean over rows."
        )


def _check_terms(factors, doubled):
    """A term that does not depend on the batch would be counted once for each part.

    One that is multiplied by the number of rows grows with them, as all others do.
    """
    if [2 * factor for factor in factors] != doubled:
        raise ValueError(
            "a term of the loss's total does not depend on the batch, such as a penalty on "
            "weights: it would be added once for each part. Multiply it by the count, "
            "Mean(total + count * penalty, count), which adds it to the mean once; return "
            "a scalar, a mean over rows; or leave weight decay to the optimizer."
        )


def check_draws(draws: list, cut: int | None = None) -> bool:
    """Whether all draws from the key go by place."""
    if any("args" in labels and "key" not in labels for labels, _ in draws):
        raise TypeError(
            "the loss draws random numbers from a key among its further arguments, which would be "
            "the same in every part of the batch: hand the key over by key=."
        )
    from_key = [(labels, shape) for labels, shape in draws if "key" in labels]
    by_shape = [shape for labels, shape in from_key if "rows" not in labels]
    if by_shape and len(by_shape) < len(from_key):
        raise ValueError(
            f"the loss draws some random numbers by place (marks.index) and others by the shape of "
            f"its part, {by_shape[0]}: the former want the batch's own key, the latter one for "
            f"each part. Draw all of them by place, as model.drop does, or none."
        )
    for labels, shape in from_key if cut is not None else ():
        if "rows" in labels and "sequence" not in labels and cut in (shape or ()):
            raise ValueError(
                f"the loss draws random numbers of shape {shape}, and the sequence is cut, {cut} "
                f"entries to a part: each part would draw the same for its own. Draw by place, "
                f"from marks.index('sequence', size) too, as model.drop does."
            )
    return not by_shape


def _rank(v: Any) -> int:
    return len(v.aval.shape)
