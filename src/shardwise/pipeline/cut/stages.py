"""The stages of a loss: what each reads, what comes in, what goes out, and its function."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from shardwise.jaxprs import needed, read, run, variables
from shardwise.pipeline.cut.marked import constrained, trace
from shardwise.pipeline.cut.places import assign, crossing
from shardwise.pipeline.cut.rows import rows_of, shifted, taken_first

Shape = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage: `function(params, data, carry) -> outputs`, each a list in the order given here.

    `rows[i]` tells what of the parameter leaf `i` lives here: None all of it, (a, b) its rows a to
    b. `data` are the numbers of the batch's (and further arguments') leaves that it reads;
    `params`, `inputs`, `carry` and `outputs` are the shapes and dtypes of arguments and results.
    The outputs of the last stage are those of the loss, of which `seeds` are differentiated, the
    first one unless the stage is replaced by one of others.
    """

    index: int
    last: bool
    seeds: tuple[int, ...]
    rows: dict[int, tuple[int, int] | None]
    data: tuple[int, ...]
    params: list[Shape]
    inputs: list[Shape]
    carry: list[Shape]
    outputs: list[Shape]
    function: Callable


class Cut(NamedTuple):
    """The stages of a loss, and the tree of its output, of shapes and dtypes."""

    stages: list[Stage]
    shapes: Any


def stages(
    loss: Callable,
    params: Any,
    *data: Any,
    relocate: Callable | None = None,
) -> Cut:
    """The stages of `loss(params, *data)`, k + 1 for k calls of `marks.stage_boundary`.

    Arguments may be abstract. A parameter of which every stage takes only rows of its own, by a
    static slice, of it or of its cast, lives in rows; one that several stages read lives on each.

    Args:
      relocate: `relocate(sharding)` is what a `with_sharding_constraint` of the loss becomes.

    Raises:
      ValueError: a mark where the program cannot be cut, or around no array; an effect that asks
        for an order.
    """
    leaves, structure = jax.tree.flatten(params)
    others, data_structure = jax.tree.flatten(data)
    n = len(leaves)

    def flat(*args):
        tree, rest = jax.tree.unflatten(structure, args[:n]), args[n:]
        return loss(tree, *jax.tree.unflatten(data_structure, rest))

    args = [_abstract(x) for x in (*leaves, *others)]
    closed, shapes, marks = trace(flat, args)
    if relocate is not None:
        closed = constrained(closed, relocate)
    program, last = assign(closed, n, marks), len(set(marks.values()))
    program = program._replace(eqns=taken_first(program.eqns, program.params))
    chosen = [_choose(program, s, s == last) for s in range(last + 1)]
    rows = rows_of(program.params, [(eqns, outputs) for eqns, _, outputs in chosen])
    parts = [_stage(program, s, s == last, *chosen[s], rows) for s in range(last + 1)]
    return Cut(parts, shapes)


def _choose(program, s, last):
    """(equations, carry variables, output variables) of stage `s`."""
    carry = crossing(program, s - 1)
    outputs = program.outputs if last else crossing(program, s)
    given = {*carry, *program.params, *program.data, *program.constants}
    mine = lambda eqn: program.effects.get(id(eqn)) == s  # noqa: E731
    return needed(program.eqns, outputs, given, mine)[0], carry, outputs


def _stage(program, s, last, eqns, carry, outputs, rows):
    mine = [v for v in program.params if s in rows.get(v, {})]
    if s == 0:  # what nobody reads lives on the first stage
        mine = [v for v in program.params if s in rows.get(v, {s: None})]
    used = {v for eqn in eqns for v in variables(eqn.invars)} | set(variables(outputs))
    data = [v for v in program.data if v in used]
    held = {v: rows.get(v, {}).get(s) for v in mine}
    here = [shifted(eqn, held) for eqn in eqns]

    def function(params, data_values, carry_values):
        env = dict(program.constants)
        env.update(zip(mine, params, strict=True))
        env.update(zip(data, data_values, strict=True))
        env.update(zip(carry, carry_values, strict=True))
        return read(run(here, env), outputs)

    return Stage(
        index=s,
        last=last,
        seeds=(0,) if last else (),
        rows={program.params.index(v): ends for v, ends in held.items()},
        data=tuple(program.data.index(v) for v in data),
        params=[_of_rows(v, held[v]) for v in mine],
        inputs=[_shape(v) for v in data],
        carry=[_shape(v) for v in carry],
        outputs=[_abstract(v.val) if isinstance(v, Literal) else _shape(v) for v in outputs],
        function=function,
    )


def _shape(v):
    return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)


def _of_rows(v, ends):
    shape = v.aval.shape if ends is None else (ends[1] - ends[0], *v.aval.shape[1:])
    return jax.ShapeDtypeStruct(shape, v.aval.dtype)


def _abstract(x):
    """Shape and dtype as JAX sees them."""
    return jax.eval_shape(lambda x: x, x)
