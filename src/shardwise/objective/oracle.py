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

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from shardwise.objective.reasons import Unlike, refuse, refuse_added, refuse_rows, refuse_scalar
from shardwise.objective.tracing import draws_by_place
from shardwise.objective.trials import Arrangement, Found, Trials, Turn, length_of, real, unit_of

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
    by_place: bool | None = None,
    gradient: bool | None = None,
) -> None:
    """Raise where the mean of two parts of `batch`, or what a row adds, is not that of both.

    Give it a batch whose rows differ, in padding too. It takes some of the rows, and compiles one
    program for them, and one more where the sequence is divided.

    Args:
      aux: how the auxiliary outputs of parts become one, as in `value_and_grad`; those that are
        added up are compared. With None nobody reads them.
      rows: of a part; by default four, where the batch has eight.
      ways: how the batch is divided: "devices" have consecutive rows, "microbatches" every m-th
        one, and of a "sequence" parts have half of the tokens, axis 1 of arrays that have two.
      by_place: whether draws from the key go by place (`marks.index`), as its trace tells by
        default; of parts that draw otherwise, only what a row adds is compared.
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
    if by_place is None:
        by_place = draws_by_place(loss, params, batch, args, key, has_aux)
    finite = False
    for part in plan(ways, rows, batch):
        trials = compiled(loss, has_aux, aux, part, gradient, params, batch, args, key)
        finite |= judge(trials, part, by_place)
    if not finite:
        raise ValueError("objective.check: the loss of this batch is not finite, or is 0.")


class Part(NamedTuple):
    """One program's share of a judgement: the ways of dividing, and how many rows and tokens."""

    ways: tuple[str, ...]
    rows: int
    unit: int
    length: int | None = None

    @property
    def sequence(self) -> bool:
        """Whether it is the sequence that is divided, rather than the rows."""
        return "sequence" in self.ways


def plan(ways: Sequence[str], rows: int, batch: Any) -> list[Part]:
    """The `Part` of each program for these ways to divide the batch, of parts of `rows` rows."""
    unit, found = unit_of(batch), []
    if unknown := set(ways) - {"devices", "microbatches", "sequence"}:
        raise ValueError(
            f"objective.check: ways has {min(unknown)!r}; expected some of 'devices', "
            f"'microbatches' and 'sequence'."
        )
    if over_rows := tuple(way for way in ways if way != "sequence"):
        found.append(Part(over_rows, 2 * rows, unit))
    if "sequence" in ways:
        length = length_of(batch)
        if length is None or length < 2:
            raise ValueError(
                "objective.check: the sequence is axis 1, and no array of the batch has one of 2 "
                "entries or more."
            )
        found.append(Part(("sequence",), rows, unit, length - length % 2))
    return found


def compiled(
    loss: Callable,
    has_aux: bool,
    aux: Any,
    part: Part,
    gradient: bool | None,
    params: Any,
    batch: Any,
    args: tuple,
    key: Any,
    mesh: Mesh | None = None,
) -> Trials:
    """The program of a part, in float32; in the loss's own dtypes where it takes no others."""
    given = loss, has_aux, part.rows, part.unit, part.length, part.sequence, gradient, mesh
    try:
        return Trials(*given, aux=aux).compile(params, batch, args, key)
    except Exception:
        return Trials(*given, aux=aux, widened=False).compile(params, batch, args, key)


class _Seen(NamedTuple):
    """The numbers that a turn found: parts together, these with a little noise, and parts alone."""

    ways: tuple[str, ...]
    together: Found
    near: Found
    alone: Found


@np.errstate(all="ignore")  # of what is not finite nothing is said
def judge(trials: Trials, part: Part, alone: bool) -> bool:
    """Return whether any total is finite and not 0; raise `Indivisible` where a number differs.

    `alone` says whether parts alone draw what they draw together.
    """
    _check_rows(trials)
    alone = alone and not trials.pairs
    splits = _splits(part, trials.size)
    keys = [k for k, _ in real(trials.arguments[0])]
    paths = [jax.tree_util.keystr(k, simple=True, separator="/") for k in keys]
    ways, found, swaps = part.ways, False, []
    for turn in () if part.sequence else (Turn(), Turn(0.3, 2), Turn(3.0, 3)):
        arrangements = [_beside(*splits[ways[0]], *"ab")]
        arrangements += [_beside(*splits[w], *t) for w in ways for t in ("ba", "aa", "bb")]
        near, _ = trials(turn._replace(noise=1e-6), arrangements[:1])
        swaps.append((ways, trials(turn, arrangements)[0], near))
        found |= _tells(swaps[-1][1])
    means = []
    for turn, padded in ((Turn(), False), (Turn(seed=1), True)):
        means.append(_seen(trials, splits, turn, padded))
        found |= _tells(means[-1].together)
        if part.sequence and means[-1].together.sums.shape[1] == 1:
            refuse_scalar("objective.check: ")
    added = list(means)
    for seed in range(SILENT):
        if all(np.any([s.together.sizes[0] for s in added], axis=0)):
            break
        added.append(_seen(trials, splits, Turn(3.0, seed), False))
    rounding, masked = 4 * trials.rounding, _masked(means)
    for ways, sums, near in () if masked and alone else swaps:
        _compare_swaps(ways, sums, near, paths, rounding)
    for seen in means if alone else ():
        _compare_means(seen, masked, paths, rounding)
    for each in added if alone and not trials.local else ():
        _compare_added(each, trials)
    for ways, sums, near in swaps if masked and alone else ():  # whose means tell more
        _compare_swaps(ways, sums, near, paths, rounding)
    return found


def _seen(trials, splits, turn, padded):
    whole = [_beside(a, b, *"ab", padded) for a, b in splits.values()]
    each = [_alone(*x) for a, b in splits.values() for x in ((a, False), (b, padded))]
    together, alone = trials(turn, whole, each)
    near, _ = trials(turn._replace(noise=1e-6), whole)
    return _Seen(tuple(splits), together, near, alone)


def _tells(found):
    """Whether the first total is a number that could differ: of a mask of zeros it is 0."""
    return bool(np.isfinite(found.sums[0]).all() and found.sums[0, 0] != 0)


def _splits(part, size):
    """{way: the entries of two parts}; for a sequence one more, in which the parts alternate."""
    order = np.arange(size)
    in_order, alternating = np.split(order, 2), (order[0::2], order[1::2])
    if part.sequence:
        return {"sequence": in_order, "sequence, every other token": alternating}
    return {way: alternating if way == "microbatches" else in_order for way in part.ways}


def _beside(a, b, x, y, padded=False):
    """The Arrangement with part `x` in the place of A and `y` in that of B, each "a" or "b"; what
    stands in the place of B may be zeros, as padding is.
    """
    chosen = np.empty(len(a) + len(b), np.int32)
    chosen[a], chosen[b] = (a if x == "a" else b), (a if y == "a" else b)
    places = np.arange(len(chosen), dtype=np.int32)
    return Arrangement(chosen, places, ~np.isin(places, b if padded else ()))


def _alone(entries, padded):
    numbers = np.asarray(entries, np.int32)
    return Arrangement(numbers, numbers, np.full(len(numbers), not padded))


def _compare_swaps(ways, found, near, paths, rounding):
    noise = [abs(x[0] - y[0]) for x, y in zip(found, near, strict=True)]
    largest = np.max(found.norms, initial=0)
    for i, way in enumerate(ways):
        at = [0, *range(1 + 3 * i, 4 + 3 * i)]  # AB, BA, AA, BB
        for j, name in enumerate(("total", "count")[: found.sums.shape[1]]):
            values = found.sums[at, j]
            spare = max(ALIKE, rounding) * abs(values).max()
            _compare_four(way, name, values, spare, noise[0][j])
        for j, path in enumerate(paths if found.norms.size else ()):
            size = 30 * max(found.norms[at, j].max(), largest / 100)
            told = f"gradient of {path or 'the parameters'}"
            spare = max(ALIKE, rounding) * size
            _compare_four(way, told, found.projections[at, j], spare, noise[1][j])


def _compare_four(way, name, values, spare, noise):
    ab, ba, aa, bb = values
    if np.isfinite(values).all() and not abs(ab + ba - aa - bb) <= spare + 10 * noise:
        refuse(Unlike(way, name, (ab + ba) / 2, (aa + bb) / 2, rows=True))


def _masked(means):
    """Whether zeros in place of one part leave the mean of the other, as of a mean under a mask."""
    padded = means[1]
    if padded.together.sums.shape[1] > 1:
        return False
    whole, alone = padded.together.sums[:, 0], padded.alone.sums[::2, 0]
    return bool(np.allclose(whole, alone, rtol=1e-4, atol=0))


def _compare_means(seen, masked, paths, rounding):
    for i, way in enumerate(seen.ways):
        whole, near = seen.together.sums[i], seen.near.sums[i]
        parts = seen.alone.sums[2 * i : 2 * i + 2]
        values = _mean(whole), _mean(near), _mean(*parts)
        if not np.isfinite([*whole, *values[:2]]).all():  # of one part alone it has to be, too
            continue
        allowed = max(TOLERANCE, rounding) * max(map(abs, values)) + 10 * abs(values[0] - values[1])
        if not abs(values[0] - values[2]) <= allowed:
            refuse(Unlike(way, "mean", values[0], values[2], sums=(whole, parts), masked=masked))
        _compare_gradients(seen, i, way, paths)


def _compare_gradients(seen, i, way, paths):
    found, near, alone = seen.together, seen.near, seen.alone
    largest = np.max(found.norms[i], initial=0)
    for j, path in enumerate(paths if found.norms.size else ()):
        whole, parts = found.projections[i, j], alone.projections[2 * i : 2 * i + 2, j].sum()
        size = max(found.norms[i, j], largest / 100)
        noise = 10 * abs(whole - near.projections[i, j])
        if np.isfinite([whole, parts, size]).all() and not (
            abs(whole - parts) <= 10 * TOLERANCE * size + noise
        ):
            refuse(Unlike(way, f"gradient of {path or 'the parameters'}", whole, parts))


def _check_rows(trials):
    """Refuse an output that has the rows of its part and is not to be concatenated."""
    whole, part = (trials.outputs.get(n, {}) for n in (trials.size, trials.size // 2))
    for path, (way, shape) in whole.items():
        if way != "concatenate" and shape != part[path][1]:
            refuse_rows(path, way)


def _compare_added(seen, trials):
    """Refuse an auxiliary output to be added up whose sum over parts is not that of the whole."""
    paths = [path for path, (way, _) in trials.outputs.get(trials.size, {}).items() if way == "sum"]
    for i in range(len(seen.ways)):
        for j, path in enumerate(paths):
            whole, near = seen.together.added[i, j], seen.near.added[i, j]
            parts = seen.alone.added[2 * i : 2 * i + 2, j].sum()
            size = max(seen.together.sizes[i, j], seen.alone.sizes[2 * i : 2 * i + 2, j].max())
            allowed = 10 * TOLERANCE * size + 10 * abs(whole - near)
            if np.isfinite([whole, parts, size]).all() and not abs(whole - parts) <= allowed:
                refuse_added(path, whole, parts)


def _mean(*sums):
    total, *count = np.sum(sums, axis=0)
    return total / (count[0] if count else len(sums))
