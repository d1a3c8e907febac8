"""Which equation, which parameter and which value belongs to which stage."""

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from shardwise.cut.equations import Equation, equations, needed, read, run
from shardwise.cut.tracing import trace


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage: `function(params, data, carry) -> outputs`, each a list in the order given here.

    `rows[i]` tells what of the parameter leaf `i` lives here: None all of it, (a, b) its rows a to
    b. `data` are the numbers of the batch's (and further arguments') leaves that it reads;
    `params`, `inputs`, `carry` and `outputs` are the shapes and dtypes of arguments and results.
    The outputs of the last stage are those of the loss.
    """

    index: int
    last: bool
    rows: dict
    data: tuple
    params: list
    inputs: list
    carry: list
    outputs: list
    function: Any


class _Program(NamedTuple):
    """The traced loss: its equations, and for each the stage (None: wherever it is needed)."""

    eqns: list
    constants: dict
    params: list
    data: list
    outputs: list
    stage: dict  # of an activation: the stage that yields it
    used: dict  # of an activation: the last stage that reads it


def stages(loss, params, *data, constrain=None):
    """The stages of `loss(params, *data)`, k + 1 for k calls of `marks.stage_boundary`.

    Arguments may be abstract; `constrain(x, name)`, if given, is what `marks.constrain` does. A
    parameter of which every stage takes only rows of its own, by a static slice, lives in rows; one
    that several stages read lives on each.

    Raises:
      ValueError: a mark where the program cannot be cut.
    """
    leaves, structure = jax.tree.flatten(params)
    others, data_structure = jax.tree.flatten(data)
    n = len(leaves)

    def flat(*args):
        tree, rest = jax.tree.unflatten(structure, args[:n]), args[n:]
        return loss(tree, *jax.tree.unflatten(data_structure, rest))

    closed, shapes, marks = trace(flat, [_abstract(x) for x in (*leaves, *others)], constrain)
    program, last = _assign(closed, n, marks), len(set(marks.values()))
    chosen = [_choose(program, s, s == last) for s in range(last + 1)]
    rows = _rows(program, chosen)
    return [_stage(program, s, s == last, *chosen[s], rows) for s in range(last + 1)], shapes


def _assign(closed, n, marks):
    jaxpr = closed.jaxpr
    eqns, params, data = equations(jaxpr), jaxpr.invars[:n], jaxpr.invars[n:]
    reads = {v: {"params"} for v in params} | {v: {"data"} for v in data}
    level = dict.fromkeys(reads, 0)
    for eqn in eqns:
        inputs = [v for v in eqn.invars if not isinstance(v, Literal)]
        kinds = set().union(*(reads.get(v, set()) for v in inputs))
        at, mark = max([level.get(v, 0) for v in inputs], default=0), marks.get(eqn.outvars[0])
        if mark is not None:
            kinds, at = {"params", "data"}, mark + 1
        reads.update(dict.fromkeys(eqn.outvars, kinds))
        level.update(dict.fromkeys(eqn.outvars, at))
    stage, used = (
        {},
        {v: len(set(marks.values())) for v in jaxpr.outvars if not isinstance(v, Literal)},
    )
    first = dict(used)
    for eqn in reversed(eqns):
        if len(reads[eqn.outvars[0]]) < 2:
            continue  # of parameters alone, or of data alone: repeated where it is needed
        mark = marks.get(eqn.outvars[0])
        at = level[eqn.outvars[0]] if mark is None else mark
        if at == 0 and mark is None:  # before every mark: as late as its readers allow
            at = min([first[v] for v in eqn.outvars if v in first], default=0)
        stage.update(dict.fromkeys(eqn.outvars, at))
        for v in eqn.invars:
            if not isinstance(v, Literal) and len(reads.get(v, ())) == 2:
                used[v], first[v] = max(used.get(v, 0), at), min(first.get(v, at), at)
    constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    return _Program(eqns, constants, params, data, list(jaxpr.outvars), stage, used)


def _crossing(program, boundary):
    """The activations that go from stage `boundary` to the next."""
    return [
        v
        for v, at in sorted(program.stage.items(), key=lambda item: item[1])
        if at <= boundary < program.used.get(v, -1)
    ]


def _choose(program, s, last):
    """(equations, carry variables, output variables) of stage `s`."""
    carry = _crossing(program, s - 1)
    outputs = program.outputs if last else _crossing(program, s)
    given = {*carry, *program.params, *program.data, *program.constants}
    return needed(program.eqns, outputs, given)[0], carry, outputs


def _rows(program, chosen):
    """For each parameter that every stage slices along its first axis: {stage: (first, last)}."""
    found = {}
    for s, (eqns, _, outputs) in enumerate(chosen):
        for v in program.params:
            readers = [eqn for eqn in eqns if v in eqn.invars]
            if readers or v in outputs:
                cuts = [_row_slice(eqn) for eqn in readers]
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


def _row_slice(eqn):
    """The rows that a static slice takes of whole rows; None for any other equation."""
    if eqn.name != "slice" or eqn.origin.params["strides"] is not None:
        return None
    start, limit = eqn.origin.params["start_indices"], eqn.origin.params["limit_indices"]
    shape = eqn.invars[0].aval.shape
    whole = shape and (*start[1:], *limit[1:]) == (*[0] * len(shape[1:]), *shape[1:])
    return (start[0], limit[0]) if whole else None


def _stage(program, s, last, eqns, carry, outputs, rows):
    mine = [v for v in program.params if s in rows.get(v, {})]
    if s == 0:  # what nobody reads lives on the first stage
        mine = [v for v in program.params if s in rows.get(v, {s: None})]
    used = {v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal)} | set(
        v for v in outputs if not isinstance(v, Literal)
    )
    data = [v for v in program.data if v in used]
    held = {v: rows.get(v, {}).get(s) for v in mine}
    shifted = [_shifted(eqn, held) for eqn in eqns]

    def function(params, data_values, carry_values):
        env = dict(program.constants)
        env.update(zip(mine, params, strict=True))
        env.update(zip(data, data_values, strict=True))
        env.update(zip(carry, carry_values, strict=True))
        return read(run(shifted, env), outputs)

    return Stage(
        index=s,
        last=last,
        rows={program.params.index(v): ends for v, ends in held.items()},
        data=tuple(program.data.index(v) for v in data),
        params=[_of_rows(v, held[v]) for v in mine],
        inputs=[_shape(v) for v in data],
        carry=[_shape(v) for v in carry],
        outputs=[_abstract(v.val) if isinstance(v, Literal) else _shape(v) for v in outputs],
        function=function,
    )


def _shifted(eqn, held):
    """A slice of rows, as a slice of the rows that are held."""
    ends = held.get(eqn.invars[0]) if eqn.name == "slice" else None
    if ends is None:
        return eqn
    first, last = (row - ends[0] for row in _row_slice(eqn))
    run_on_rows = lambda x: [jax.lax.slice_in_dim(x, first, last)]  # noqa: E731
    return Equation("slice", eqn.invars, eqn.outvars, run_on_rows, eqn.origin)


def _shape(v):
    return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)


def _of_rows(v, ends):
    shape = v.aval.shape if ends is None else (ends[1] - ends[0], *v.aval.shape[1:])
    return jax.ShapeDtypeStruct(shape, v.aval.dtype)


def _abstract(x):
    """Shape and dtype as JAX sees them."""
    return jax.eval_shape(lambda x: x, x)
