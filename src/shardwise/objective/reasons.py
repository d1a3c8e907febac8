"""The errors of the oracle: which number differs, what such mistakes look like, what to do."""

import dataclasses
from typing import NoReturn

import numpy as np


class Indivisible(ValueError):
    """The error of a loss that is another function where its batch is divided."""


@dataclasses.dataclass(frozen=True)
class Unlike:
    """A number that differs: the way of division, its value of the whole, its value from parts.

    `rows`: parts stood beside each other and beside themselves; `masked`: zeros in the place of
    one part leave the mean of the other. `sums` are total and perhaps count of both, and of parts.
    """

    way: str
    name: str
    whole: float
    parts: float
    rows: bool = False
    masked: bool = False
    sums: tuple | None = None


def refuse(unlike: Unlike) -> NoReturn:
    """Raise Indivisible, with the number that differs and the likely reason."""
    cut = {"devices": "over devices", "microbatches": "into microbatches"}.get(
        unlike.way, "along its sequence"
    )
    if unlike.rows:
        told = (
            f"the {unlike.name} of two parts beside each other is {unlike.whole:.8g}, and "
            f"{unlike.parts:.8g} where each stands beside itself"
        )
    else:
        whole, parts = f"{unlike.whole:.8g} of the whole", f"{unlike.parts:.8g} from parts"
        told = f"the {unlike.name} is {whole}, and {parts}"
    raise Indivisible(
        f"objective.check: the loss is another where its batch is divided {cut}: {told}. "
        f"{_reason(unlike)}"
    )


def refuse_scalar(who: str = "") -> NoReturn:
    """Raise Indivisible: where the sequence is cut, one scalar is no loss."""
    raise Indivisible(
        f"{who}the sequence is cut, and the loss is one scalar: a mean over rows, of what each "
        f"makes of its whole sequence. Return objective.Mean(total, count), two sums over tokens."
    )


def refuse_rows(path: str, way: str) -> NoReturn:
    """Raise Indivisible: rows of different parts would be mixed in an auxiliary output."""
    raise Indivisible(
        f"objective.check: the loss's auxiliary output {path} has the rows of its part of the "
        f"batch, and aux={way!r} would make one of the rows of all parts: say aux='concatenate', "
        f"or sum over them in the loss."
    )


def refuse_added(path: str, whole: float, parts: float) -> NoReturn:
    """Raise Indivisible: an auxiliary output's sum over parts is not that of the whole batch."""
    raise Indivisible(
        f"objective.check: aux='sum' adds up the loss's auxiliary output {path} of all parts of "
        f"the batch, which makes {parts:.8g}, and of the whole it is {whole:.8g}. Return "
        f"objective.Mean(total, count) for a mean over rows, exact for every padding, or say "
        f"aux='mean', exact where parts count alike; aux='max' for a largest value; aux=None for "
        f"what nobody reads."
    )


MASKED = (
    "It divides by a number that it computes from the batch's values, such as the number of tokens "
    "that a mask leaves. Each part of the batch would divide by its own, and the mean of these is "
    "not the mean of all: return objective.Mean(total, count), undivided."
)
ROWS = (
    "Rows of the batch look at each other in the loss, as in contrastive losses, batch statistics, "
    "sorted or chosen rows, balance or capacity of experts, or a root or power of a mean over "
    "rows. Take sums by marks.total, which adds up those of all devices, without a gradient; or "
    "lay the batch out by the compiler (by='compiler', rules.jit) and without microbatches, which "
    "is exact for every loss. Where a part's own rows are meant, say so of the result: "
    "marks.local(x). A mean over what the batch's own values decide is objective.Mean(total, "
    "count)."
)
TOKENS = (
    "Tokens see each other outside marks, or are numbered by jnp.arange in each part anew; or "
    "total and count are no sums over tokens. Let them see each other in marks.attend, take their "
    "numbers from marks.index('sequence', size), shift targets when the batch is made, or lay the "
    "sequence out by the compiler."
)
RULE = (
    "What comes back from a backward rule (custom_vjp), or through what stops the gradient, "
    "depends on rows beside a row's own, or on their number. Let the rule treat each row by "
    "itself, or lay the batch out by the compiler."
)
NUMBER = (
    "It does something to the number of rows, as jnp.arange(len(x)) (marks.index('rows', size) "
    "gives those of the whole batch), draws for them from a key of its own, or lets rows look at "
    "each other; or divides by a number that the batch's values decide: return "
    "objective.Mean(total, count), two sums over rows."
)


def _reason(unlike):
    if unlike.way.startswith("sequence"):
        return TOKENS
    if unlike.name.startswith("gradient"):
        return RULE
    if unlike.masked:
        return MASKED
    if unlike.rows:
        return ROWS
    whole, parts = unlike.sums
    return _of_scalar(whole, parts) if len(whole) == 1 else _of_sums(whole, parts)


def _of_scalar(whole, parts):
    if _near(whole[0], parts[:, 0].sum()):
        return (
            "It is a sum over rows, and one scalar has to be a mean over rows, of which the parts' "
            "are averaged. Take jnp.mean over the rows, or return objective.Mean(total, count)."
        )
    return NUMBER


def _of_sums(whole, parts):
    total, count = (parts[:, i].sum() for i in (0, 1))
    told = f" (of both {whole[1]:.6g}, of the parts {parts[0, 1]:.6g} and {parts[1, 1]:.6g})"
    if not _near(whole[1], count):
        if _near(whole[1], parts[0, 1]) and _near(whole[1], parts[1, 1]):
            return (
                f"The count does not depend on the batch{told}, and would be added up once for "
                f"each part. Return the number of what total adds up, counted in the batch that "
                f"the loss is given, Mean(total, batch['mask'].sum()) or Mean(total, "
                f"batch['x'].size); or return a scalar, a mean over rows."
            )
        return (
            f"The count is not a bare sum over rows{told}, such as jnp.maximum(mask.sum(), 1), "
            f"mask.sum() + 1 or mask.mean(), which would be added up once for each part. Return "
            f"mask.sum() itself: where the whole batch counts 0, the mean and its gradient are 0."
        )
    if _near(whole[0], total / 2):
        return (
            "The total is a mean over rows, and would be added up once for each part: return sums "
            "over rows, such as each.sum() and mask.sum(), or a scalar, a mean over rows."
        )
    return (
        f"The total has a term that is no sum over rows (of both {whole[0]:.6g}, of the parts "
        f"{parts[0, 0]:.6g} and {parts[1, 0]:.6g}), such as a penalty on weights, which does not "
        f"depend on the batch and would be added once for each part. Multiply it by the count, "
        f"Mean(total + count * penalty, count), which adds it to the mean once; return a scalar, a "
        f"mean over rows; or leave weight decay to the optimizer. " + NUMBER
    )


def _near(a, b):
    return bool(np.isclose(a, b, rtol=1e-4, atol=0))
