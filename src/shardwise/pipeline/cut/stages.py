"""The stages of a loss: what each reads, what comes in, what goes out, and its function."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardwise.jaxprs import Equation, named_as, variables
from shardwise.pipeline.cut.parts import Part, Shape, follows, inexact, shapes_of
from shardwise.pipeline.cut.places import placed, trace

CAST = "convert_element_type"


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage: `function(params, data, carry) -> outputs`, each a list in the order given here.

    `index` counts from 0; `last` says whether it is the last. `rows` is a dict with an entry for
    each parameter leaf that lives here, by its number: (a, b) if rows a to b - 1 of it do, None if
    all of it does. `data` are the numbers of the batch's (and further arguments') leaves that it
    reads. `starts` has, where the loss slices rows of something it computed from these, such as
    the keys of all layers, the first row of each of this stage's slices, and is () elsewhere. They
    go in as the last of data, int32 [k], so that stages that differ in rows alone share a program.

    Lists of `jax.ShapeDtypeStruct` are `params`, of the parameters in the order of `rows` and of
    these rows alone; `inputs`, what the function takes as data; `carry`, what the stage before
    gives, and none in the first; `outputs`, the next stage's carry, in the last stage the leaves of
    what the loss returns. `seeds` are the numbers of the outputs that have cotangents: all that are
    floating-point; in the last stage the first alone.
    """

    index: int
    last: bool
    seeds: tuple[int, ...]
    rows: dict[int, tuple[int, int] | None]
    data: tuple[int, ...]
    starts: tuple[int, ...]
    params: list[Shape]
    inputs: list[Shape]
    carry: list[Shape]
    outputs: list[Shape]
    function: Callable


class Cut(NamedTuple):
    """The stages of a loss, and the tree of its output, of shapes and dtypes."""

    stages: list[Stage]
    shapes: Any


def stages(loss: Callable, params: Any, *data: Any) -> Cut:
    """The stages of `loss(params, *data)`: a pair with `.stages` and `.shapes`.

    `.stages` is the list of `Stage`s, k + 1 for k calls of `marks.stage_boundary`; `.shapes` is the
    tree that the loss returns, of `jax.ShapeDtypeStruct`. Arguments may be abstract. A parameter of
    which every stage takes only rows of its own, by a static slice, of it or of its cast, lives in
    rows; one that several stages read lives on each.

    Raises:
      ValueError: a mark where the program cannot be cut, or around no array; an ordered effect.
    """
    program, (shapes,) = trace(lambda params, data: [loss(params, *data)], params, data)
    crossing, effects = placed(program)
    program = dataclasses.replace(program, eqns=_rows_first(program.eqns, program.inputs[0]))
    parts = [
        program.part([outputs], [*program.inputs, carry], lambda e, s=s: effects[id(e)] == s)
        for s, (carry, outputs) in enumerate(itertools.pairwise(crossing))
    ]
    rows = _rows(program.inputs[0], parts)
    return Cut([_stage(s, parts, rows) for s in range(len(parts))], shapes)


def _stage(s, parts, rows):
    part, sources = parts[s], follows(parts[s])
    params, data, carry = part.inputs
    held = {v: rows[v][s] for v in params if s in rows[v]}
    read_here, starts, first_rows, eqns = [v for v in data if v in part.used], object(), [], []
    for eqn in part.eqns:
        if ends := _row_slice(eqn):
            of, (first, end) = eqn.invars[0], ends
            if sources.get(of, {0}) <= {1}:  # it follows from data, or nothing
                eqn = _taken(eqn, end - first, len(first_rows), starts)
                first_rows.append(first)
            elif held.get(of):
                eqn = _taken(eqn, end - first, first - held[of][0])
        eqns.append(eqn)
    more = [starts] * bool(first_rows)
    inputs, last = (list(held), [*read_here, *more], carry), s == len(parts) - 1
    outputs = shapes_of(part.outputs[0])
    return Stage(
        index=s,
        last=last,
        seeds=(0,) if last else tuple(i for i, x in enumerate(outputs) if inexact(x)),
        rows={params.index(v): ends for v, ends in held.items()},
        data=tuple(map(data.index, read_here)),
        starts=tuple(first_rows),
        params=[
            x if ends is None else Shape((ends[1] - ends[0], *x.shape[1:]), x.dtype)
            for x, ends in zip(shapes_of(held), held.values(), strict=True)
        ],
        inputs=[*shapes_of(read_here), *(Shape((len(first_rows),), jnp.int32) for _ in more)],
        carry=shapes_of(carry),
        outputs=outputs,
        function=dataclasses.replace(part, inputs=inputs, eqns=eqns),
    )


def _rows_first(eqns: Sequence[Equation], params: Sequence) -> list[Equation]:
    """The same program, in which rows of a cast parameter are the cast of the parameter's rows:
    they show which layers a stage holds, and no other layer is cast there.
    """
    known = {v: (v, ()) for v in params}  # of a variable: the parameter that it is, by which casts
    found = []
    for eqn in eqns:
        parameter, casts = known.get(next(iter(variables(eqn.invars)), None), (None, ()))
        if parameter is not None and eqn.name == CAST:
            known[eqn.outvars[0]] = parameter, (*casts, eqn)
        if not casts or _row_slice(eqn) is None:
            found.append(eqn)
            continue
        between = [object() for _ in casts]  # variables of their own
        ends = itertools.pairwise([parameter, *between, eqn.outvars[0]])
        for step, (before, after) in zip((eqn, *casts), ends, strict=True):
            found.append(step._replace(invars=(before,), outvars=(after,)))
    return found


def _rows(params: Sequence, parts: Sequence[Part]) -> dict:
    """{parameter: {stage that holds it: (first, last)}}; what nobody reads, the first stage holds.

    They are rows if every stage that reads the parameter slices it along the first axis, and the
    slices tile it; else None, all of it.
    """
    found: dict = {v: {} for v in params}
    for s, part in enumerate(parts):
        for v in params:
            cuts = [_row_slice(eqn) for eqn in part.eqns if v in eqn.invars]
            if None in cuts or v in part.outputs[0]:
                found[v][s] = None
            elif cuts:
                found[v][s] = min(a for a, _ in cuts), max(b for _, b in cuts)
    for v, ends in found.items():
        tiles = sorted(ends.values()) if len(ends) > 1 and None not in ends.values() else []
        if not tiles or [0, *(b for _, b in tiles)] != [*(a for a, _ in tiles), v.aval.shape[0]]:
            found[v] = dict.fromkeys(ends or [0])
    return found


def _row_slice(eqn: Equation) -> tuple[int, int] | None:
    """The rows that a static slice takes of whole rows; None for any other equation."""
    if eqn.name != "slice" or eqn.origin.params["strides"] is not None:
        return None
    start, limit = eqn.origin.params["start_indices"], eqn.origin.params["limit_indices"]
    shape = eqn.invars[0].aval.shape
    whole = shape and (*start[1:], *limit[1:]) == (*[0] * len(shape[1:]), *shape[1:])
    return (start[0], limit[0]) if whole else None


def _taken(eqn: Equation, size: int, start: int, *starts: Any) -> Equation:
    """A slice of rows, as one from row `start` on, or from that of this number in `starts`."""

    def run(x, *first_rows):
        with named_as(eqn.origin):
            if first_rows:
                return [jax.lax.dynamic_slice_in_dim(x, first_rows[0][start], size)]
            return [jax.lax.slice_in_dim(x, start, start + size)]

    return eqn._replace(invars=(eqn.invars[0], *starts), run=run)
