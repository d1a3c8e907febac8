"""Whether total and count are sums over rows, and a scalar a mean: by how a trace grows."""

from collections.abc import Callable
from typing import Any

from shardwise.objective import growing
from shardwise.objective.following import label_of

NEGLIGIBLE = 1e-5  # such an epsilon in a count, once for each part, is below its rounding
DATA = frozenset({"batch", "rows", "args", "key"})


def check_sums(program: Any, has_count: bool, doubled: Callable[[], Any]) -> None:
    """Raise where a number grows otherwise than it has to; `doubled` traces for twice the rows.

    Raises:
      ValueError: a sum where a mean is due or a mean where a sum is, a number that is no linear
        function of sums over rows, or arrays divided by one that the batch's values decide.
    """
    count = _numbers(program, 1) if has_count else []
    added = _added(program) if has_count else []
    choosing = [s for s in count if s.name in growing.CHOOSING | growing.BENDING]
    bending = [s for s in _numbers(program, 0) if s.name in growing.BENDING]
    divided = _divided(program)
    if not (choosing or added or bending or divided or _in_doubt(program, has_count)):
        return
    try:
        growth = growing.Growth(program, doubled())
    except Exception:  # the loss takes batches of this size alone
        return
    if not growth.corresponds:
        return
    if any(map(growth.is_sum, divided)):
        raise ValueError(
            "the loss divides an array by a sum over the batch's values, such as a mask by the "
            "number of tokens that it leaves. Each part of the batch would divide by its own: "
            "return objective.Mean(total, count), of which no part is divided."
        )
    if any(_bends(growth, step) for step in bending):
        raise ValueError(
            "the loss is a root, a power, a logarithm or an exponential of a sum over the batch, "
            "which is not the mean of those of its parts. Return what is within (it has its least "
            "value at the same place), and take the function of the mean that comes back."
        )
    if any(_bends(growth, step) for step in choosing) or _grows_otherwise(added, growth):
        raise ValueError(
            "the loss's count is not a bare sum over rows, such as jnp.maximum(mask.sum(), 1) or "
            "mask.sum() + 1, which would be added up once for each part. Return mask.sum() itself: "
            "where the whole batch counts 0, the mean and its gradient are 0."
        )
    _check_ratios(growth, has_count)


def check_aux(
    program: Any, doubled: Callable[[], Any], outputs: dict[int, tuple[str, str]]
) -> None:
    """Raise where auxiliary outputs of parts do not become one; `outputs` {number: (path, way)}.

    Raises:
      ValueError: a mean over rows that would be added up, or rows, of which those of other parts
        would be added to each.
    """
    try:
        growth = growing.Growth(program, doubled())
    except Exception:  # the loss takes batches of this size alone
        return
    for i, (path, way) in outputs.items() if growth.corresponds else ():
        told = f"the loss's auxiliary output {path}"
        if way != "concatenate" and growth.grows(program.outputs[i]):
            raise ValueError(
                f"{told} has the rows of its part of the batch, and aux={way!r} would make one of "
                f"the rows of all parts: say aux='concatenate', or sum over them in the loss."
            )
        if way == "sum" and _is_mean(growth, i):
            raise ValueError(
                f"{told} is a mean over rows, and aux='sum' would add it up once for each part of "
                f"the batch. Return objective.Mean(total, count) for it, exact for every padding; "
                f"or say aux='mean', exact where parts count alike."
            )


def _is_mean(growth, i):
    """Whether output `i` is divided by the number of rows, or by a sum over rows."""
    numbers = growing.numbers_behind(growth.program, growth.program.outputs[i])
    divided = any(s.name == "div" and growth.is_sum(s.inputs[1]) for s in numbers)
    return divided or any(abs(ratio - 1) < 1e-3 for ratio in growth.ratios(i))


def _check_ratios(growth, has_count):
    ratios = [list(growth.ratios(i)) for i in range(1 + has_count)]
    if not has_count and any(abs(ratio - 2) < 1e-3 for ratio in ratios[0]):
        raise ValueError(
            "the loss is one scalar and has a sum over rows in it; a scalar has to be a mean over "
            "rows, of which the parts' are averaged. Take jnp.mean over the rows, or return "
            "objective.Mean(total, count)."
        )
    for name, found in zip(("total", "count"), ratios, strict=False):
        if has_count and any(abs(ratio - 1) < 1e-3 for ratio in found):
            raise ValueError(
                f"the {name} of the loss's Mean has a mean over rows in it, and would be added up "
                f"once for each part: return sums over rows, such as each.sum() and mask.sum(), or "
                f"a scalar, a mean over rows."
            )


def _in_doubt(program, has_count):
    """Whether an array that is summed up tells by its divisors what it is, or has to grow first."""
    outputs = program.outputs[: 1 + has_count]
    found = [t for v in outputs for t in growing.terms(program, v) if t.of.aval.shape]
    if has_count:
        return any(t.divisors or abs(t.factor) < 1 for t in found)
    return not all(map(growing.looks_like_mean, found))


def _numbers(program, i):
    """The steps between numbers that are behind output `i`, and follow from the batch."""
    return [
        s for s in growing.numbers_behind(program, program.outputs[i])
        if program.of_batch(s.outputs[0])
    ]  # fmt: skip


def _divided(program):
    """By which arrays or numbers, that follow from data alone, the total's steps divide."""
    found = []
    for step in growing.behind(program, program.outputs[0]):
        if step.name == "div":
            below = program.stripped(step.inputs[1])
            data = label_of(program.labels, below) <= DATA
            found += [below] if data and program.of_batch(below) else []
    return found


def _bends(growth, step):
    """Whether it is a sum over rows to which this step does something; not to choose a tiny one."""
    numbers = [growth.program.static(v) for v in step.inputs]
    tiny = step.name == "max" and any(x is not None and abs(x) <= NEGLIGIBLE for x in numbers)
    return not tiny and any(growth.is_sum(v) for v in step.inputs)


def _added(program):
    """The terms of a count that follow from no value of the batch, and are more than an epsilon."""
    count = program.outputs[1]
    factors = growing.standing(program, count) if program.of_batch(count) else []
    return [x for x in factors if abs(x) > NEGLIGIBLE]


def _grows_otherwise(added, growth):
    return [2 * x for x in added] != (_added(growth.more) if added else [])
