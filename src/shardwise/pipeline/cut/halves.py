"""A stage's backward: whole, or in the half that others wait for and the half that nobody does."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from shardwise.jaxprs import CALLS, REMAT, equations, inlined, needed, read, run, variables
from shardwise.pipeline.cut.scans import split_scans
from shardwise.pipeline.cut.stages import Stage


@dataclasses.dataclass(frozen=True)
class Halves:
    """The programs of one stage, each a function of lists of arrays.

    - `forward(params, data, carry) -> outputs, residuals`: what the backward needs is returned,
      but for what follows from parameters or data alone, which the backward computes again;
    - `whole(params, data, residuals, cotangents) -> cotangents of carry, gradients`;
    - `to_input(params, data, residuals, cotangents) -> cotangents of carry, pending`;
    - `to_weights(params, data, residuals, pending) -> gradients`.

    `to_weights` computes nothing that `to_input` has computed: that is in `pending`. Cotangents
    are those of the outputs that are floating-point numbers, and of a last stage's `seeds`. The
    first stage has nothing to send back: its `to_weights` does everything. `undivided` names the
    primitives that yield both halves at once and could not be cut: they run in `to_input`, and
    what they yield of the weights' gradients is pending. Effects run where they are computed,
    once: in `forward`, or in `whole`, or in `to_input`. `reads` has, for each program by its name,
    the numbers of the parameters that it reads.
    """

    forward: Callable
    whole: Callable
    to_input: Callable
    to_weights: Callable
    undivided: tuple[str, ...]
    reads: dict[str, tuple[int, ...]]


def backward(stage: Stage) -> Halves:
    """The `Halves` of a stage, by differentiating its function and slicing the traced result.

    What depends on no cotangent is the forward's. Of what does, equations under `jax.jit` and
    `jax.checkpoint` are inlined (the forward is another program by then, so nothing that is to be
    computed again can be taken from it), and a scan is cut into two.
    """
    cots = [stage.outputs[i] for i in differentiable(stage)]

    def both(params, data, carry, cot):
        def outputs(params, carry):
            out = stage.function(params, data, carry)
            return [out[i] for i in differentiable(stage)], out

        _, pull, out = jax.vjp(outputs, params, carry, has_aux=True)
        grads, back = pull(cot)
        return out, [b for b, x in zip(back, carry, strict=True) if inexact(x)], grads

    traced = _traced(both, CALLS, stage.params, stage.inputs, stage.carry, cots)
    params, data, carry, cot = traced.inputs
    outputs, back, grads = traced.outputs
    repeated, late = traced.repeated(), traced.following(cot)
    is_early = lambda eqn: late.isdisjoint(variables(eqn.invars))  # noqa: E731
    early = [v for v in traced.yielded if v not in late and v not in repeated]
    kept = traced.used([back, grads], params, data, [*carry, *early], cot)[2]
    whole = traced.program([back, grads], params, data, kept, cot, keep=lambda e: not is_early(e))
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in kept]
    to_input, weights, undivided = _halves(
        _traced(whole, CALLS | REMAT, stage.params, stage.inputs, shapes, cots)
    )
    forward = traced.program([outputs, kept], params, data, carry, keep=is_early)
    programs = dict(forward=forward, whole=whole, to_input=to_input, to_weights=weights)
    reads = {name: program.reads for name, program in programs.items()}
    to_weights = lambda *values: weights(*values)[0]  # noqa: E731
    return Halves(forward, whole, to_input, to_weights, undivided, reads)


def _halves(traced):
    params, data, kept, cot = traced.inputs
    back, grads = traced.outputs
    traced = dataclasses.replace(traced, eqns=split_scans(traced.eqns, back))
    given = {*params, *data, *kept, *cot, *traced.constants}
    needed_here = needed(traced.eqns, back, given, lambda eqn: eqn.effects)[0]
    repeated = traced.repeated()
    done = [v for eqn in needed_here for v in eqn.outvars if v not in repeated]
    pending = traced.used([grads], params, data, kept, [*cot, *done])[3]
    weights = traced.program([grads], params, data, kept, pending)
    return (
        traced.program([back, pending], params, data, kept, cot, keep=lambda eqn: True),
        weights,
        _undivided(needed_here, back, pending),
    )


def differentiable(stage: Stage) -> list[int]:
    """The numbers of the outputs that have cotangents."""
    numbers = stage.seeds if stage.last else range(len(stage.outputs))
    return [i for i in numbers if inexact(stage.outputs[i])]


def inexact(x):
    """Whether `x` is of a floating-point dtype, and so has a cotangent."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A traced program: its equations, and its inputs and outputs in the groups it was given in."""

    eqns: list
    constants: dict
    inputs: list
    outputs: list

    @property
    def yielded(self):
        return [v for eqn in self.eqns for v in eqn.outvars]

    def following(self, sources):
        """The variables that depend on `sources`."""
        found = set(sources)
        for eqn in self.eqns:
            if not found.isdisjoint(variables(eqn.invars)):
                found.update(eqn.outvars)
        return found

    def repeated(self):
        """The variables that follow from the first group of inputs alone, or the second alone.

        Nothing that follows from an effect: that happens once.
        """
        reads = {v: {i} for i, group in enumerate(self.inputs) for v in group}
        reads |= {v: set() for v in self.constants}
        for eqn in self.eqns:
            kinds = set().union(*(reads[v] for v in variables(eqn.invars)))
            reads.update(dict.fromkeys(eqn.outvars, {0, 1} if eqn.effects else kinds))
        return {v for v in self.yielded if reads[v] in (set(), {0}, {1})}

    def used(self, outputs, *groups):
        """The variables of each group that `outputs` need if all of the groups are given."""
        given = {v for group in groups for v in group} | set(self.constants)
        found = needed(self.eqns, [v for group in outputs for v in group], given)[1]
        return [[v for v in group if v in found] for group in groups]

    def program(self, outputs, *inputs, keep=lambda eqn: False):
        """The function from groups of inputs to groups of outputs, of the equations it needs.

        Of those with effects, it has the ones for which `keep` is true.
        """
        given = {v for group in inputs for v in group} | set(self.constants)
        flat = [v for group in outputs for v in group]
        chosen, used = needed(self.eqns, flat, given, lambda eqn: eqn.effects and keep(eqn))
        reads = tuple(i for i, v in enumerate(inputs[0]) if v in used)
        return _Program(chosen, self.constants, inputs, outputs, reads)


@dataclasses.dataclass(frozen=True, eq=False)
class _Program:
    """Equations as a function; `reads` are the numbers of the first group's inputs in use."""

    eqns: list
    constants: dict
    inputs: tuple
    outputs: list
    reads: tuple[int, ...]

    def __call__(self, *values):
        env = dict(self.constants)
        for group, arrays in zip(self.inputs, values, strict=True):
            env.update(zip(group, arrays, strict=True))
        env = run(self.eqns, env)
        return tuple(read(env, group) for group in self.outputs)


def _traced(function, names, *groups):
    """`function` of groups of abstract arrays, with calls of `names` inlined."""
    sizes = [len(group) for group in groups]
    flat = lambda *values: function(*_split(values, sizes))  # noqa: E731
    closed, out = jax.make_jaxpr(flat, return_shape=True)(*[x for group in groups for x in group])
    closed = inlined(closed, names)
    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    outputs = _split(closed.jaxpr.outvars, [len(group) for group in out])
    return _Traced(equations(closed.jaxpr), constants, _split(closed.jaxpr.invars, sizes), outputs)


def _undivided(eqns, back, pending):
    """Primitives that yield at once what the input's half needs and what only the weights do."""
    reads = {v for eqn in eqns for v in variables(eqn.invars)} | set(variables(back))
    found = {e.name for e in eqns if any(v in pending and v not in reads for v in e.outvars)}
    return tuple(sorted(name for name in found if not name.startswith("scan, ")))


def _split(values, sizes):
    groups, at = [], 0
    for size in sizes:
        groups.append(list(values[at : at + size]))
        at += size
    return groups
