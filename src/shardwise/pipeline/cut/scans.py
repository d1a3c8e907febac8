"""A scan of a backward pass, cut into the scan that others wait for and the rest."""

import dataclasses
from typing import Any

import jax

from shardwise.jaxprs import (
    CALLS,
    REMAT,
    Equation,
    carries,
    equations,
    inlined,
    named_as,
    needed,
    read,
    run,
    variables,
)


def split_scans(eqns, wanted):
    """`eqns`, in which a scan that yields both what `wanted` needs and more is cut in two.

    The first runs what `wanted` needs and what has effects, and stacks what the second needs of
    it, layer by layer; the second runs the rest, the weights' gradients. Nothing is computed twice.
    """
    need, result = set(variables(wanted)), []
    for eqn in reversed(eqns):
        parts = [eqn]
        if eqn.effects or not need.isdisjoint(eqn.outvars):
            if eqn.name == "scan":
                parts = _split(eqn, [i for i, v in enumerate(eqn.outvars) if v in need])
            need.update(variables(parts[0].invars))
        result += reversed(parts)
    return result[::-1]


def _split(eqn, wanted):
    scan = _Scan.of(eqn)
    outvars, chosen = scan.body.outvars, scan.closed(wanted)
    rest = [i for i in range(len(outvars)) if i not in chosen]
    eqns = split_scans(scan.eqns, [outvars[i] for i in chosen])
    given = {*scan.body.invars, *scan.consts}
    effects = lambda eqn: eqn.effects  # noqa: E731
    ours, used = needed(eqns, [outvars[i] for i in chosen], given, effects)
    carried = {scan.body.invars[scan.start + i] for i in chosen if i < scan.carries}
    known = {v for e in ours for v in e.outvars} | carried
    theirs, used_later = needed(eqns, [outvars[i] for i in rest], given | known)
    if not rest or not theirs:
        return [eqn]
    order = (*scan.body.invars, *(v for e in eqns for v in e.outvars))
    place = {v: i for i, v in enumerate(order)}
    saved = sorted(known & used_later, key=place.__getitem__)
    stacked = {v: object() for v in saved}  # between the two scans
    return [
        scan.half("scan, to the input", ours, used, chosen, yields=stacked),
        scan.half("scan, to the weights", theirs, used_later, rest, receives=stacked),
    ]


@dataclasses.dataclass(frozen=True)
class _Scan:
    """A scan, and its body's program, whose inputs are `start` constants, then carries, then xs."""

    origin: Equation
    body: Any
    consts: dict
    eqns: list
    carries: int
    start: int

    @classmethod
    def of(cls, eqn):
        closed = inlined(eqn.origin.params["jaxpr"], CALLS | REMAT)
        body = closed.jaxpr
        consts = dict(zip(body.constvars, closed.consts, strict=True))
        carried = carries(eqn, body)
        number = carried.stop - carried.start
        return cls(eqn, body, consts, equations(body), number, carried.start)

    def closed(self, wanted):
        """The outputs asked for, and each carry on which they depend from one step to the next.

        With effects in the body, what they depend on too.
        """
        chosen, given = set(wanted), {*self.body.invars, *self.consts}
        while True:
            outvars = [self.body.outvars[i] for i in chosen]
            used = needed(self.eqns, outvars, given, lambda eqn: eqn.effects)[1]
            used |= set(variables(outvars))
            carried = [self.body.invars[self.start + i] for i in range(self.carries)]
            more = {i for i, v in enumerate(carried) if v in used} - chosen
            if not more:
                return sorted(chosen)
            chosen |= more

    def half(self, name, eqns, used, outs, receives=None, yields=None):
        """One of the two scans, as an equation that yields the outputs `outs`.

        `yields` and `receives`, {variable of the body: variable outside}, are stacked beside them.
        """
        receives, yields, body = receives or {}, yields or {}, self.body
        used = used | set(variables(body.outvars[i] for i in outs))
        split = self.start + self.carries
        fixed = [i for i in range(self.start) if body.invars[i] in used]
        carried = [self.start + i for i in outs if i < self.carries]
        stacked = [i for i in range(split, len(body.invars)) if body.invars[i] in used]
        last = [i for i in outs if i < self.carries]
        each = [i for i in outs if i >= self.carries]
        known = [[body.invars[i] for i in group] for group in (fixed, carried, stacked)]

        def step(env, carry, xs):
            env = env | dict(zip((*known[1], *known[2], *receives), (*carry, *xs), strict=True))
            env = run(eqns, env)
            ends = [read(env, [body.outvars[i] for i in group]) for group in (last, each)]
            return ends[0], (ends[1], read(env, yields))

        def scan(*values):
            constants, values = values[: len(fixed)], values[len(fixed) :]
            env = self.consts | dict(zip(known[0], constants, strict=True))
            init, xs = list(values[: len(carried)]), list(values[len(carried) :])
            params = self.origin.origin.params
            options = {key: params[key] for key in ("length", "reverse", "unroll")}
            with named_as(self.origin.origin):
                found = jax.lax.scan(lambda *given: step(env, *given), init, xs, **options)
            done, (ys, kept) = found
            return [*done, *ys, *kept]

        inputs = [self.origin.invars[i] for i in (*fixed, *carried, *stacked)]
        outputs = [self.origin.outvars[i] for i in (*last, *each)]
        return Equation(
            name,
            (*inputs, *receives.values()),
            (*outputs, *yields.values()),
            scan,
            self.origin.origin,
            any(eqn.effects for eqn in eqns),
        )
