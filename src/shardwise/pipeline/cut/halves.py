"""A stage's backward: whole, or in the half that others wait for and the half that nobody does."""

import dataclasses

import jax
from jax.extend.core import Var

from shardwise.jaxprs import CALLS, REMAT, Equation, carries, inlined, named_as, variables
from shardwise.pipeline.cut.parts import (
    REPEATED,
    Part,
    Shape,
    follows,
    inexact,
    part_of,
    shapes_of,
    split,
    traced,
)
from shardwise.pipeline.cut.stages import Stage


@dataclasses.dataclass(frozen=True)
class Halves:
    """The programs of one stage, each a `Part`: a function of lists of arrays.

    - `forward(params, data, carry) -> outputs, residuals`: without what follows from parameters or
      data alone, which the backward computes again;
    - `whole(params, data, residuals, cotangents) -> cotangents of carry, gradients`;
    - `to_input(params, data, residuals, cotangents) -> cotangents of carry, pending`;
    - `to_weights(params, data, residuals, pending) -> gradients`.

    `residuals` is what `forward` keeps, of the shapes `kept`. `pending` is what `to_input` has
    computed and `to_weights` needs; the attribute is its shapes. In the first stage, which has no
    carry, `to_input` just passes the cotangents on as pending, and `to_weights` does everything.
    Cotangents that go in are those of the stage's `seeds`, in order; those of carry are of its
    floating-point arrays, the seeds of the stage before. Each of `stage.params` has a gradient.
    `undivided` names the primitives that yield both halves at once and could not be cut: they run
    in `to_input`. Effects run once: in `forward`, `whole` or `to_input`.
    """

    stage: Stage
    forward: Part
    whole: Part
    to_input: Part
    to_weights: Part
    undivided: tuple[str, ...]
    pending: list[Shape]
    kept: list[Shape]


def backward(stage: Stage) -> Halves:
    """The `Halves` of a stage, by differentiating its function and slicing the traced result.

    Equations that depend on no cotangent are the forward's. Of others, those under `jax.jit` and
    `jax.checkpoint` are inlined, for the forward is another program by then; a scan is cut in two.
    """
    cots = [stage.outputs[i] for i in stage.seeds]

    def both(params, data, carry, cot):
        def outputs(params, carry):
            out = stage.function(params, data, carry)
            return [out[i] for i in stage.seeds], out

        _, pull, out = jax.vjp(outputs, params, carry, has_aux=True)
        grads, back = pull(cot)
        return out, [b for b, x in zip(back, carry, strict=True) if inexact(x)], grads

    both, _ = traced(both, CALLS, stage.params, stage.inputs, stage.carry, cots)
    params, data, carry, cot = both.inputs
    outputs, back, grads = both.outputs
    sources = follows(both)
    late = {v for v, groups in sources.items() if 3 in groups}  # behind cotangents
    is_late = lambda eqn: not late.isdisjoint(variables(eqn.invars))  # noqa: E731
    yielded = [v for eqn in both.eqns for v in eqn.outvars]
    early = [v for v in yielded if v not in late and sources[v] not in REPEATED]
    given = params, data, [*carry, *early], cot
    whole = both.part([back, grads], given, is_late, trim=2)
    kept = whole.inputs[2]
    forward = both.part([outputs, kept], both.inputs[:3], lambda eqn: not is_late(eqn))
    return Halves(stage, forward, whole, *_halves(whole), shapes_of(kept))


def _halves(whole):
    """(to the input, to the weights, what is undivided, pending's shapes) of a whole backward."""
    whole, _ = traced(whole, CALLS | REMAT, *map(shapes_of, whole.inputs))
    back, grads = whole.outputs
    whole = dataclasses.replace(whole, eqns=_split_scans(whole.eqns, back))
    sent = whole.part([back], whole.inputs, lambda eqn: True)
    sources = follows(whole)
    done = [v for e in sent.eqns for v in e.outvars if sources[v] not in REPEATED]
    *given, cot = whole.inputs
    to_weights = whole.part([grads], [*given, [*cot, *done]], trim=3)
    pending = to_weights.inputs[3]
    to_input = whole.part([back, pending], whole.inputs, lambda eqn: True)
    return to_input, to_weights, _undivided(sent.eqns, back, pending), shapes_of(pending)


def _undivided(eqns, back, pending):
    """Primitives that yield at once what the input's half needs and what only the weights do."""
    reads = {v for eqn in eqns for v in variables(eqn.invars)} | set(variables(back))
    found = {e.name for e in eqns if any(v in pending and v not in reads for v in e.outvars)}
    return tuple(sorted(name for name in found if not name.startswith("scan, ")))


def _split_scans(eqns, wanted):
    """`eqns`, in which a scan that yields both what `wanted` needs and more is cut in two.

    The first runs what `wanted` needs and what has effects, and stacks, layer by layer, what the
    second needs of it, which runs the rest. Nothing is computed twice.
    """
    need, result = set(variables(wanted)), []
    for eqn in reversed(eqns):
        parts = [eqn]
        if eqn.effects or not need.isdisjoint(eqn.outvars):
            if eqn.name == "scan":
                parts = _split_scan(eqn, [i for i, v in enumerate(eqn.outvars) if v in need])
            need.update(variables(parts[0].invars))
        result += reversed(parts)
    return result[::-1]


def _split_scan(eqn, wanted):
    closed = inlined(eqn.origin.params["jaxpr"], CALLS | REMAT)
    carried = carries(eqn, closed.jaxpr)
    sizes = carried.start, carried.stop - carried.start, len(eqn.invars) - carried.stop
    body = part_of(closed, sizes, [len(eqn.outvars)])
    chosen = _closed(body, wanted)
    outputs = [body.outputs[0][i] for i in chosen]
    body = dataclasses.replace(body, eqns=_split_scans(body.eqns, outputs))
    ours = body.part([outputs], body.inputs, lambda eqn: True)
    rest = [i for i in range(len(eqn.outvars)) if i not in chosen]
    known = [v for i, v in enumerate(body.inputs[1]) if i in chosen]
    known += [v for e in ours.eqns for v in e.outvars]
    theirs = body.part([[body.outputs[0][i] for i in rest]], [*body.inputs, known], trim=3)
    if not theirs.eqns:
        return [eqn]
    length = eqn.origin.params["length"]  # of what is stacked between the two scans
    stacked = {v: Var(v.aval.update(shape=(length, *v.aval.shape))) for v in theirs.inputs[3]}
    return [
        _half(eqn, "scan, to the input", ours, chosen, {}, stacked),
        _half(eqn, "scan, to the weights", theirs, rest, stacked, {}),
    ]


def _closed(body, wanted):
    """The outputs asked for, and each carry on which they depend from one step to the next.

    With effects in the body, what they depend on too.
    """
    chosen, more = set(), set(wanted)
    while more:
        chosen |= more
        outputs = [v for i, v in enumerate(body.outputs[0]) if i in chosen]
        used = body.part([outputs], body.inputs, lambda eqn: True).used
        more = {i for i, v in enumerate(body.inputs[1]) if v in used} - chosen
    return sorted(chosen)


def _half(eqn, name, part, numbers, receives, yields):
    """One of the two scans, of a part of the body that has the outputs of these numbers.

    `receives` and `yields`, {variable of the body: variable outside}, are stacked beside them.
    """
    constants, carry, xs = part.inputs[:3]
    outside = dict(zip((*constants, *carry, *xs), eqn.invars, strict=True))
    constants, xs = ([v for v in group if v in part.used] for group in (constants, xs))
    last = sum(i < len(carry) for i in numbers)
    carry, outputs = [carry[i] for i in numbers[:last]], part.outputs[0]
    body = dataclasses.replace(
        part,
        inputs=[constants, carry, [*xs, *receives]],
        outputs=[outputs[:last], [*outputs[last:], *yields]],
    )
    sizes = [len(group) for group in body.inputs]
    options = {key: eqn.origin.params[key] for key in ("length", "reverse", "unroll")}

    def scan(*values):
        fixed, init, each = split(values, sizes)
        with named_as(eqn.origin):
            done, ys = jax.lax.scan(lambda *step: body(fixed, *step), init, each, **options)
        return [*done, *ys]

    return Equation(
        name,
        (*(outside[v] for v in (*constants, *carry, *xs)), *receives.values()),
        (*(eqn.outvars[i] for i in numbers), *yields.values()),
        scan,
        eqn.origin,
        any(e.effects for e in part.eqns),
    )
