"""The errors of the oracle: which number differs, what such mistakes look like, what to do."""

from typing import NoReturn

import numpy as np


class Indivisible(ValueError):
    """The ValueError of a loss whose value or gradient changes if its batch is divided."""


SUM = (
    "It is a sum over rows, and one scalar has to be a mean over rows, of which the parts' are "
    "averaged. Take jnp.mean over the rows, or return objective.Mean(total, count)."
)
BESIDE = (
    "the {} of two parts beside each other is {:.8g}, and {:.8g} where each stands beside itself"
)
APART = "the {} is {:.8g} of the whole, and {:.8g} from parts"
MASKED = (
    "It divides by a number that it computes from the batch's values, such as the number of tokens "
    "that a mask leaves. Each part of the batch would divide by its own, and the mean of these is "
    "not the mean of all: return objective.Mean(total, count), undivided."
)
ROWS = (
    "Rows of the batch look at each other in the loss, as in contrastive losses, batch statistics, "
    "sorted or chosen rows, balance or capacity of experts, or a root or power of a mean over "
    "rows. Take sums by marks.total, which adds up those of all devices, without a gradient; or "
    "lay the batch out by the compiler (by='compiler', rules.jit) and without microbatches, where "
    "every loss equals one device's, to rounding. Where a part's own rows are meant, say so of the "
    "result: marks.local(x). A mean over what the batch's own values decide is "
    "objective.Mean(total, count)."
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
    "gives those of the whole batch), draws for them from a key of its own or, under vmap, from an "
    "'rbg' key, or lets rows look at each other; or divides by a number that the batch's values "
    "decide: return objective.Mean(total, count), two sums over rows."
)


def refuse(way: str, told: str, reason: str) -> NoReturn:
    """Raise Indivisible: by this way of dividing a number differs, as is `told`; likely why."""
    cut = {"devices": "over devices", "microbatches": "into microbatches"}
    if way.startswith("sequence"):
        reason = TOKENS
    raise Indivisible(
        f"objective.check: the loss is another where its batch is divided "
        f"{cut.get(way, 'along its sequence')}: {told}. {reason}"
    )


def refuse_scalar(who: str = "") -> NoReturn:
    """Raise Indivisible: where the sequence is cut, one scalar is no loss."""
    raise Indivisible(
        f"{who}the sequence is cut, and the loss is one scalar: a mean over rows, of what each "
        f"makes of its whole sequence. Return objective.Mean(total, count), two sums over tokens."
    )


def of_means(whole: np.ndarray, parts: np.ndarray) -> str:
    """What differs between the sums of a whole [sums] and of two parts [2, sums], most likely."""
    total, *count = parts.sum(axis=0)
    if not count:
        return SUM if _near(whole[0], total) else NUMBER
    told = f" (of both {whole[1]:.6g}, of the parts {parts[0, 1]:.6g} and {parts[1, 1]:.6g})"
    if not _near(whole[1], count[0]):
        if _near(whole[1], parts[:, 1]):
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
        f"mean over rows; or leave weight decay to the optimizer. {NUMBER}"
    )


def _near(a, b):
    return np.allclose(a, b, rtol=1e-4, atol=0)
