"""Parameters of which each stage takes rows of its own, and so holds these alone."""

import itertools
from collections.abc import Iterator, Sequence

import jax
from jax.extend.core import Literal

from shardwise.jaxprs import Equation, named_as

CAST = "convert_element_type"


def taken_first(eqns: Sequence[Equation], params: Sequence) -> list[Equation]:
    """The same program, in which rows of a cast parameter are the cast of the parameter's rows.

    A loss may cast its weights before it hands a stage its layers. Taken first, the rows show which
    layers the stage holds, and no other layer is cast there.
    """
    casts: dict = {v: () for v in params}  # of a variable: from a parameter, by which casts
    origin, found = {v: v for v in params}, []
    for eqn in eqns:
        v = eqn.invars[0] if eqn.invars else None
        known = not isinstance(v, Literal) and v in casts
        if known and eqn.name == CAST:
            casts[eqn.outvars[0]], origin[eqn.outvars[0]] = (*casts[v], eqn), origin[v]
        if known and casts[v] and row_slice(eqn) is not None:
            found += _through(eqn, origin[v], casts[v])
        else:
            found.append(eqn)
    return found


def _through(taking, parameter, casts) -> Iterator[Equation]:
    """Rows of the parameter, then their casts."""
    values = [object() for _ in casts]  # variables of their own
    yield taking._replace(invars=(parameter,), outvars=(values[0],))
    ends = [*values[1:], taking.outvars[0]]
    for cast, before, after in zip(casts, values, ends, strict=True):
        yield cast._replace(invars=(before,), outvars=(after,))


def rows_of(params: Sequence, read: Sequence[tuple]) -> dict:
    """{parameter: {stage: (first, last)}}, of those that every stage slices along the first axis.

    `read` has (equations, outputs) of each stage. Where one reads all of it, or stages overlap, it
    says None of every stage that reads it.
    """
    found: dict = {}
    for s, (eqns, outputs) in enumerate(read):
        for v in params:
            readers = [eqn for eqn in eqns if v in eqn.invars]
            if readers or v in outputs:
                cuts = [row_slice(eqn) for eqn in readers]
                whole = None in cuts or v in outputs
                ends = None if whole else (min(a for a, _ in cuts), max(b for _, b in cuts))
                found.setdefault(v, {})[s] = ends
    for v, ends in found.items():
        parts = sorted(ends.values()) if None not in ends.values() else []
        tiles = parts and parts[0][0] == 0 and parts[-1][1] == v.aval.shape[0]
        tiles = tiles and all(a[1] == b[0] for a, b in itertools.pairwise(parts))
        if not tiles or len(parts) == 1:
            found[v] = dict.fromkeys(ends)
    return found


def row_slice(eqn: Equation) -> tuple[int, int] | None:
    """The rows that a static slice takes of whole rows; None for any other equation."""
    if eqn.name != "slice" or eqn.origin.params["strides"] is not None:
        return None
    start, limit = eqn.origin.params["start_indices"], eqn.origin.params["limit_indices"]
    shape = eqn.invars[0].aval.shape
    whole = shape and (*start[1:], *limit[1:]) == (*[0] * len(shape[1:]), *shape[1:])
    return (start[0], limit[0]) if whole else None


def shifted(eqn: Equation, held: dict) -> Equation:
    """A slice of rows, as a slice of the rows that are `held`, {parameter: (first, last)}."""
    ends = held.get(eqn.invars[0]) if eqn.name == "slice" else None
    if ends is None:
        return eqn
    first, last = (row - ends[0] for row in row_slice(eqn))

    def run_on_rows(x):
        with named_as(eqn.origin):
            return [jax.lax.slice_in_dim(x, first, last)]

    return eqn._replace(run=run_on_rows)
