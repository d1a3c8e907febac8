"""A test by numbers whether a loss divides: two parts of a batch together, and each alone.

Where rows are their own, A and B in either order (AB, BA) add up to what each makes beside itself
(AA, BB), whatever is drawn by shape. One program on the same rows rounds alike, so that this is
exact to some 1e-7. And the mean of AB is that of A and B as parts. Parameters are shaken, scaled
and, where they are zeros, filled; once B is zeros, as padding is: what one turn hides, another
shows. `marks.total` and `marks.local` are constants, and where the sequence is cut no token sees
another in `marks.attend`.

Auxiliary outputs that are added up are compared in the same way.

Numbers tell of the rows and parameters that they are made of. What a loss does only beyond a
threshold that no turn crosses (`where(mean > 1e6, ...)`) they do not show. Rows stand twice in a
turn, and are zeros in one: numbers of groups that the batch brings must bear both, as they have to
bear padding.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardwise.objective.parts import length_of, unit_of
from shardwise.objective.reasons import Unlike, refuse, refuse_added, refuse_rows, refuse_scalar
from shardwise.objective.trials import Arrangement, Case, Found, Part, Trials, Turn, compiled

ALIKE, TOLERANCE = 3e-6, 1e-5  # of one program's numbers, and of those of two programs
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
    """Raise where the mean of two parts of `batch`, or what a row adds, is not that of both.

    Give it a batch whose rows differ, in padding too. It takes some of the rows, and compiles one
    program for them, and one more where the sequence is divided. Of parts that draw from the key by
    shape, rather than by place (`marks.index`), only what a row adds is compared.

    Args:
      aux: how the auxiliary outputs of parts become one, as in `value_and_grad`; those that are
        added up are compared. With None nobody reads them.
      rows: of a part; by default four, where the batch has eight.
      ways: how the batch is divided: "devices" have consecutive rows, "microbatches" every m-th
        one, and of a "sequence" parts have half of the tokens, axis 1 of arrays that have two.
      gradient: compare a number of each parameter's gradient too, in float32: of a backward rule
        of the loss's own (custom_vjp) the mean tells nothing. By default, where there is one.

    Raises:
      ValueError: a number that differs, with its values, what looks like it, and what to do; a
        batch of one row; a loss that is not finite.
      TypeError: outputs that are no loss.
    """
    unit = unit_of(batch)
    if unit < 2:
        raise ValueError("objective.check: expected a batch of 2 rows or more.")
    rows = min(unit // 2, rows or LEAST)
    case = Case(loss, params, batch, args, key, has_aux, aux, gradient)
    by_place = case.draws_by_place()
    told = [judge(compiled(case, part), by_place) for part in plan(ways, rows, batch)]
    if not any(told):
        raise ValueError("objective.check: the loss of this batch is not finite, or is 0.")


def plan(ways: Sequence[str], rows: int, batch: Any) -> list[Part]:
    """The `Part` of each program for these ways to divide the batch, of parts of `rows` rows."""
    found = []
    if unknown := set(ways) - {"devices", "microbatches", "sequence"}:
        raise ValueError(
            f"objective.check: ways has {min(unknown)!r}; expected some of 'devices', "
            f"'microbatches' and 'sequence'."
        )
    if over_rows := tuple(way for way in ways if way != "sequence"):
        found.append(Part(over_rows, 2 * rows))
    if "sequence" in ways:
        length = length_of(batch)
        if length is None or length < 2:
            raise ValueError(
                "objective.check: the sequence is axis 1, and no array of the batch has one of 2 "
                "entries or more."
            )
        found.append(Part(("sequence",), rows, length - length % 2))
    return found


class _Seen(NamedTuple):
    """The numbers that a turn found: parts together, these with a little noise, and parts alone."""

    together: Found
    near: Found
    alone: Found


@np.errstate(all="ignore")  # of what is not finite nothing is said
def judge(trials: Trials, alone: bool) -> bool:
    """Return whether any total is finite and not 0; raise `Indivisible` where a number differs.

    `alone` says whether parts alone draw what they draw together.
    """
    part = trials.part
    _check_rows(trials)
    if part.sequence and trials.sums == 1:
        refuse_scalar("objective.check: ")
    alone = alone and not trials.pairs
    splits = _splits(part)
    turns = () if part.sequence else (Turn(), Turn(0.3, 2), Turn(3.0, 3))
    swaps = [_swapped(trials, splits, turn) for turn in turns]
    means = [_parted(trials, splits, Turn()), _parted(trials, splits, Turn(seed=1), padded=True)]
    rounding = 4 * trials.rounding
    masked = trials.sums == 1 and _is_masked(means[1])
    rows = (unlike for seen in swaps for unlike in _of_rows(trials, splits, seen, rounding))
    parts = (u for seen in means for u in _of_parts(trials, splits, seen, masked, rounding))
    kinds = [parts, rows] if masked else [rows, parts]  # that of means tells more
    for unlike in itertools.chain(*(kinds if alone else [rows])):
        refuse(unlike)
    if alone and not trials.local:
        _check_added(trials, splits, means)
    return any(_tells(seen.together) for seen in (*swaps, *means))


def _swapped(trials, splits, turn):
    """Two parts as they are, AB, and for each way of dividing BA, AA and BB."""
    a, b = next(iter(splits.values()))
    arrangements = [_beside(a, b, a, b)]
    for a, b in splits.values():
        arrangements += [_beside(a, b, *pair) for pair in ((b, a), (a, a), (b, b))]
    return _seen(trials, turn, arrangements, first=1)


def _parted(trials, splits, turn, padded=False):
    """For each way of dividing two parts together, AB, and each alone; B may be padding."""
    empty = [b if padded else () for _, b in splits.values()]
    pairs = list(zip(splits.values(), empty, strict=True))
    whole = [_beside(a, b, a, b, none) for (a, b), none in pairs]
    each = [_arranged(x, x, none) for both, none in pairs for x in both]
    return _seen(trials, turn, whole, each)


def _seen(trials, turn, together, alone=(), first=None):
    found, parts = trials(turn, together, alone)
    near, _ = trials(turn._replace(noise=1e-6), together[:first])
    return _Seen(found, near, parts)


def _tells(found):
    """Whether the first total is a number that could differ: of a mask of zeros it is 0."""
    total, *_ = found.values[0]
    return bool(np.isfinite(total) and total != 0)


def _splits(part):
    """{way: the entries of two parts}; for a sequence one more, in which the parts alternate."""
    order = np.arange(part.size, dtype=np.int32)
    in_order, alternating = np.split(order, 2), (order[0::2], order[1::2])
    if part.sequence:
        return {"sequence": in_order, "sequence, every other token": alternating}
    return {way: alternating if way == "microbatches" else in_order for way in part.ways}


def _beside(a, b, x, y, padding=()):
    """The Arrangement with the entries `x` in the place of A, and `y` in that of B."""
    chosen = np.empty(len(a) + len(b), np.int32)
    chosen[a], chosen[b] = x, y
    return _arranged(chosen, np.arange(len(chosen), dtype=np.int32), padding)


def _arranged(chosen, places, padding):
    return Arrangement(chosen, places, ~np.isin(places, padding))


def _of_rows(trials, splits, seen, rounding) -> Iterator[Unlike]:
    """Numbers of AB and BA that are not together those of AA and BB."""
    found, sizes = seen.together, _sizes(trials, seen)
    noise = abs(found.values[0] - seen.near.values[0])
    for i, way in enumerate(splits):
        at = [0, *range(1 + 3 * i, 4 + 3 * i)]
        for j, name in enumerate(trials.names):
            ab, ba, aa, bb = values = found.values[at, j]
            spare = max(ALIKE, rounding) * sizes[at, j].max() * (1 if j < trials.sums else 30)
            alike = abs(ab + ba - aa - bb) <= spare + 10 * noise[j]
            if np.isfinite(values).all() and not alike:
                yield Unlike(way, name, (ab + ba) / 2, (aa + bb) / 2, rows=True)


def _is_masked(padded):
    """Whether zeros in place of one part leave the mean of the other, as of a mean under a mask."""
    whole, alone = padded.together.values[:, 0], padded.alone.values[::2, 0]
    return bool(np.allclose(whole, alone, rtol=1e-4, atol=0))


def _of_parts(trials, splits, seen, masked, rounding) -> Iterator[Unlike]:
    """Means and gradients of AB that are not those of A and B as parts."""
    sizes = _sizes(trials, seen)
    for i, way in enumerate(splits):
        found, near = seen.together.values[i], seen.near.values[i]
        alone = seen.alone.values[2 * i : 2 * i + 2]
        whole, parts = found[: trials.sums], alone[:, : trials.sums]
        ours, moved, theirs = _mean(whole), _mean(near[: trials.sums]), _mean(*parts)
        if not np.isfinite([*whole, ours, moved]).all():  # of one part alone it has to be, too
            continue
        spare = max(TOLERANCE, rounding) * max(abs(ours), abs(moved), abs(theirs))
        if not abs(ours - theirs) <= spare + 10 * abs(ours - moved):
            yield Unlike(way, "mean", ours, theirs, sums=(whole, parts), masked=masked)
        for j in range(trials.sums, len(trials.names)):
            if _differs(found[j], alone[:, j].sum(), sizes[i, j], near[j]):
                yield Unlike(way, trials.names[j], found[j], alone[:, j].sum())


def _check_added(trials, splits, means):
    """Refuse an auxiliary output to be added up whose sum over parts is not that of the whole."""
    paths = [path for path, (way, _) in trials.outputs[trials.part.size].items() if way == "sum"]
    columns, seen = slice(len(trials.names), None), list(means)
    for seed in range(SILENT):
        if np.any([s.together.sizes[0, columns] for s in seen], axis=0).all():
            break
        seen.append(_parted(trials, splits, Turn(3.0, seed)))
    for together, near, alone in seen:
        for i in range(len(splits)):
            for j, path in enumerate(paths, len(trials.names)):
                both = slice(2 * i, 2 * i + 2)
                whole, parts = together.values[i, j], alone.values[both, j].sum()
                size = max(together.sizes[i, j], alone.sizes[both, j].max())
                if _differs(whole, parts, size, near.values[i, j]):
                    refuse_added(path, whole, parts)


def _differs(whole, parts, size, near):
    """Whether a number that is the whole's is not that of the parts, as far as `near` it tells."""
    spare = 10 * TOLERANCE * size + 10 * abs(whole - near)
    return np.isfinite([whole, parts, size]).all() and not abs(whole - parts) <= spare


def _sizes(trials, seen):
    """The sizes of numbers together, a gradient's at least a hundredth of the largest."""
    sizes, grads = seen.together.sizes.copy(), slice(trials.sums, len(trials.names))
    sizes[:, grads] = np.maximum(sizes[:, grads], sizes[:, grads].max(initial=0) / 100)
    return sizes


def _check_rows(trials):
    """Refuse an output that has the rows of its part and is not to be concatenated."""
    whole, part = (trials.outputs[n] for n in (trials.part.size, trials.part.size // 2))
    for path, (way, shape) in whole.items():
        if way != "concatenate" and shape != part[path][1]:
            refuse_rows(path, way)


def _mean(*sums):
    total, *count = np.sum(sums, axis=0)
    return total / (count[0] if count else len(sums))
