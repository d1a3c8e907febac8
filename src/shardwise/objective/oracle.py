"""A test by numbers whether a loss divides: two parts of a batch together, and each alone.

Where rows are their own, A and B in either order (AB, BA) add up to what each makes beside itself
(AA, BB), whatever is drawn by shape. One program on the same rows rounds alike, so that this is
exact to some 1e-7. And the mean of AB is that of A and B as parts, and so are auxiliary outputs
that are added up. Parameters are shaken, scaled and, where they are zeros, filled; once B is zeros,
as padding is: what one turn hides, another shows, but for what a loss does only beyond a threshold
that no turn crosses (`where(mean > 1e6, ...)`). `marks.total` and `marks.local` are constants, and
where the sequence is cut no token sees another in `marks.attend`. Rows stand twice in a turn, and
are zeros in one: numbers of groups that the batch brings must bear both.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardwise.objective import reasons
from shardwise.objective.parts import length_of, unit_of
from shardwise.objective.reasons import APART, BESIDE, Indivisible, refuse
from shardwise.objective.trials import Case, Part, Trials, Turn, compiled

ALIKE, TOLERANCE = 3e-6, 1e-5  # of one program's numbers, and of those of two programs
NOISE = 1e-6  # in parameters, of which a number that moves far tells little
TURNS = Turn(), Turn(0.3, 2), Turn(3.0, 3)
LEAST = 4  # rows in a part: of two, a median is a mean
SILENT = 8  # further turns for auxiliary outputs that are 0, as the accuracy of a few rows


def check(
    loss: Callable,
    params: Any,
    batch: Any,
    *args: Any,
    key: Any = None,
    has_aux: bool = False,
    aux: Any = "sum",
    rows: int | None = None,
    ways: Sequence[str] = ("devices", "microbatches"),
    gradient: bool | None = None,
) -> None:
    """Raise `Indivisible` if the loss changes where `batch` is divided.

    The mean of some rows has to be that of two parts of them, combined; and what a row adds must
    not depend on the rows beside it. Give it a batch whose rows differ, in padding too. It compiles
    two programs for some rows, and two more where the sequence is divided. If a loss draws from the
    key by shape, rather than by place (`marks.index`), only what a row adds is compared.

    Args:
      aux: how the auxiliary outputs of parts become one, as in `value_and_grad`; those that are
        added up are compared. With None nobody reads them.
      rows: the number of rows of a part, by default 4; half of the batch's if that is less. Of the
        batch the first 2·rows are looked at, no others.
      ways: how the batch is divided: "devices", into consecutive rows; "microbatches", into every
        other row; "sequence", into halves of the tokens, axis 1 of arrays that have two or more.
      gradient: whether gradients are compared too, by one number for each parameter, a weighted
        sum of its gradient in float32. By default they are where the loss has a backward rule of
        its own (custom_vjp): the mean tells nothing of that.

    Raises:
      Indivisible: a number that differs by some 1e-5 of it (a gradient or aux by 1e-4; more in a
        loss that takes no float32), and by more than noise of 1e-6 in parameters explains; with the
        likely reason, and what to do (a ValueError).
      ValueError: fewer than two rows; a loss that is not finite, or is 0; an unknown way.
      TypeError: outputs that are no loss.
    """
    unit = unit_of(batch)
    if unit < 2:
        raise ValueError("objective.check: expected a batch of 2 rows or more.")
    rows = min(unit // 2, rows or LEAST)
    case = Case(loss, params, batch, args, key, has_aux, aux, gradient)
    by_place = case.draws_by_place()
    told = [judge(compiled(case, part), by_place) for part in plan(ways, batch, rows)]
    if not any(told):
        raise ValueError("objective.check: the loss of this batch is not finite, or is 0.")


def plan(
    ways: Sequence[str], batch: Any, rows: int = LEAST, length: int | None = None
) -> list[Part]:
    """The `Part` for each kind of these ways to divide the batch, of parts of `rows` rows.

    Of all tokens, or of so many (`length`, even).
    """
    found = []
    if unknown := set(ways) - {"devices", "microbatches", "sequence"}:
        raise ValueError(
            f"objective.check: ways has {min(unknown)!r}; expected some of 'devices', "
            f"'microbatches' and 'sequence'."
        )
    if over_rows := tuple(way for way in ways if way != "sequence"):
        found.append(Part(over_rows, 2 * rows, length))
    if "sequence" in ways:
        whole = length_of(batch)
        if whole < 2:
            raise ValueError(
                "objective.check: the sequence is axis 1, and no array of the batch has one of 2 "
                "entries or more."
            )
        found.append(Part(("sequence",), rows, length or whole - whole % 2))
    return found


@np.errstate(all="ignore")  # of what is not finite nothing is said
def judge(trials: Trials, alone: bool) -> bool:
    """Return whether any total is finite and not 0; raise `Indivisible` where a number differs.

    `alone` says whether parts alone draw what they draw together.
    """
    part = trials.part
    _check_rows(trials)
    if part.sequence and trials.sums == 1:
        reasons.refuse_scalar("objective.check: ")
    splits, apart, masked = _splits(part), [], False
    if alone and not trials.pairs:
        padded = _apart(trials, splits, Turn(seed=1), padded=True)
        apart = [*_apart(trials, splits, Turn()), *padded]
        # Of a mean under a mask, zeros in place of one part leave the other's.
        means = np.array([(whole.values[0], a.values[0]) for _, whole, _, (a, _) in padded])
        masked = trials.sums == 1 and np.allclose(*means.T, rtol=1e-4, atol=0)
    if masked:  # of a mean under a mask, this tells more
        _check_parts(trials, apart, reasons.MASKED)
    for turn in () if part.sequence else TURNS:
        _check_beside(trials, splits, turn)
    _check_parts(trials, apart)
    if apart and not any(trials.local.values()):
        _check_added(trials, splits, apart)
    compared = TURNS[:1] if part.sequence else TURNS
    totals = (trials(turn).values[0] for turn in compared)
    return any(np.isfinite(total) and total != 0 for total in totals)  # 0 tells nothing


def _splits(part):
    """{way: the entries of two parts}; for a sequence one more, in which the parts alternate."""
    order = np.arange(part.size, dtype=np.int32)
    in_order, alternating = np.split(order, 2), (order[0::2], order[1::2])
    if part.sequence:
        return {"sequence": in_order, "sequence, every other token": alternating}
    return {way: alternating if way == "microbatches" else in_order for way in part.ways}


def _check_beside(trials, splits, turn):
    """Refuse a number of AB and BA that is not together that of AA and BB."""
    near = trials(turn._replace(noise=NOISE))
    for way, (a, b) in splits.items():
        found = []
        for pair in (a, b), (b, a), (a, a), (b, b):
            chosen = np.empty(trials.part.size, np.int32)
            chosen[a], chosen[b] = pair
            found.append(trials(turn, chosen))
        ab, ba, aa, bb = values = np.stack([each.values for each in found])
        spare = max(ALIKE, 4 * trials.rounding) * _sizes(trials, *found)
        spare[trials.sums :] *= 30
        alike = abs(ab + ba - aa - bb) <= spare + 10 * abs(ab - near.values)
        unlike = np.isfinite(values).all(axis=0) & ~alike
        for j, name in enumerate(trials.names):
            if unlike[j]:
                told = BESIDE.format(name, (ab + ba)[j] / 2, (aa + bb)[j] / 2)
                refuse(way, told, reasons.RULE if j >= trials.sums else reasons.ROWS)


def _apart(trials, splits, turn, padded=False):
    """[(way, numbers of AB, these with a little noise, those of A and B)]; B may be padding."""
    found = []
    for way, (a, b) in splits.items():
        padding = b if padded else ()
        whole, *alone = (trials(turn, chosen, padding) for chosen in (None, a, b))
        near = trials(turn._replace(noise=NOISE), padding=padding)
        found.append((way, whole, near, alone))
    return found


def _check_parts(trials, apart, reason=None):
    """Refuse a mean or gradient of AB that is not that of A and B as parts."""
    for way, whole, near, alone in apart:
        sums = slice(trials.sums)
        own, parts = whole.values[sums], np.stack([each.values[sums] for each in alone])
        ours, moved, theirs = _mean(own), _mean(near.values[sums]), _mean(*parts)
        if not np.isfinite([*own, ours, moved]).all():  # of one part alone it has to be, too
            continue
        spare = max(TOLERANCE, 4 * trials.rounding) * max(abs(ours), abs(moved), abs(theirs))
        if not abs(ours - theirs) <= spare + 10 * abs(ours - moved):
            refuse(way, APART.format("mean", ours, theirs), reason or reasons.of_means(own, parts))
        differs, together = _added(whole, near, alone, _sizes(trials, whole))
        for j, name in enumerate(trials.names[trials.sums :], trials.sums):
            if differs[j]:
                told = APART.format(name, whole.values[j], together[j])
                refuse(way, told, reasons.RULE)


def _check_added(trials, splits, apart):
    """Refuse an auxiliary output to be added up whose sum over parts is not that of the whole."""
    paths = [path for path, way, _ in trials.outputs[trials.part.size] if way == "sum"]
    first, seen = len(trials.names), list(apart)
    for seed in range(SILENT):
        if np.any([whole.sizes[first:] for _, whole, *_ in seen], axis=0).all():
            break
        seen += _apart(trials, splits, Turn(3.0, seed))
    for _, whole, near, alone in seen:
        sizes = np.max([each.sizes for each in (whole, *alone)], axis=0)
        differs, together = _added(whole, near, alone, sizes)
        for j, path in enumerate(paths, first):
            if differs[j]:
                raise Indivisible(
                    f"objective.check: aux='sum' adds up the loss's auxiliary output {path} of all "
                    f"parts of the batch, which makes {together[j]:.8g}, and of the whole it is "
                    f"{whole.values[j]:.8g}. Return objective.Mean(total, count) for a mean over "
                    f"rows, exact for every padding, or say aux='mean', exact where parts count "
                    f"alike; aux='max' for a largest value; aux=None for what nobody reads."
                )


def _added(whole, near, alone, sizes):
    """(whether numbers are not those of the parts, as far as `near` tells; the parts' sums)."""
    parts = alone[0].values + alone[1].values
    spare = 10 * TOLERANCE * sizes + 10 * abs(whole.values - near.values)
    finite = np.isfinite([whole.values, parts, sizes]).all(axis=0)
    return finite & ~(abs(whole.values - parts) <= spare), parts


def _sizes(trials, *found):
    """The sizes of numbers, a gradient's at least a hundredth of the largest."""
    sizes = np.max([each.sizes for each in found], axis=0)
    grads = sizes[trials.sums : len(trials.names)]
    grads[:] = np.maximum(grads, grads.max(initial=0) / 100)
    return sizes


def _check_rows(trials):
    """Refuse an output that has the rows of its part and is not to be concatenated."""
    whole, part = (trials.outputs[n] for n in (trials.part.size, trials.part.size // 2))
    for (path, way, shape), (_, _, of_part) in zip(whole, part, strict=True):
        if way != "concatenate" and shape != of_part:
            raise Indivisible(
                f"objective.check: the loss's auxiliary output {path} has the rows of its part of "
                f"the batch, and aux={way!r} would make one of the rows of all parts: say "
                f"aux='concatenate', or sum over them in the loss."
            )


def _mean(*sums):
    total, *count = np.sum(sums, axis=0)
    return total / (count[0] if count else len(sums))
