"""A scan of a backward pass, cut into the scan that others wait for and the rest."""

import functools

import jax
from jax.extend.core import Literal

from shardwise.cut.equations import CALLS, REMAT, Equation, equations, inlined, needed, read, run


def split_scans(eqns, wanted):
    """`eqns`, in which a scan that yields both what `wanted` needs and more is cut in two.

    The first runs what `wanted` needs, and stacks what the second needs of it, layer by layer; the
    second runs the rest, the weights' gradients. Nothing is computed twice.
    """
    need, result = {v for v in wanted if not isinstance(v, Literal)}, []
    for eqn in reversed(eqns):
        parts = [eqn]
        if not need.isdisjoint(eqn.outvars):
            if eqn.name == "scan":
                parts = _split(eqn, [i for i, v in enumerate(eqn.outvars) if v in need])
            need.update(v for v in parts[0].invars if not isinstance(v, Literal))
        result += reversed(parts)
    return result[::-1]


def _split(eqn, wanted):
    params = eqn.origin.params
    body = inlined(params["jaxpr"], CALLS | REMAT)
    inner, consts = body.jaxpr, dict(zip(body.jaxpr.constvars, body.consts, strict=True))
    carries, first_x = _carries(eqn, inner)
    start = first_x - carries  # of the carry among the inputs
    eqns, given = equations(inner), {*inner.invars, *consts}
    chosen = _closed(eqns, inner, given, wanted, range(carries), start)
    rest = [i for i in range(len(inner.outvars)) if i not in chosen]
    eqns = split_scans(eqns, [inner.outvars[i] for i in chosen])
    ours, used = needed(eqns, [inner.outvars[i] for i in chosen], given)
    known = {v for e in ours for v in e.outvars} | {
        inner.invars[start + i] for i in chosen if i < carries
    }
    theirs, used_later = needed(eqns, [inner.outvars[i] for i in rest], given | known)
    if not rest or not theirs:
        return [eqn]
    order = {v: i for i, v in enumerate((*inner.invars, *(v for e in eqns for v in e.outvars)))}
    saved = sorted(known & used_later, key=order.__getitem__)
    tokens = [object() for _ in saved]  # the stacked values, between the two scans
    make = functools.partial(_half, eqn, inner, consts, carries, start, first_x)
    first = make("scan, to the input", ours, used, chosen, [], [], saved, tokens)
    second = make("scan, to the weights", theirs, used_later, rest, saved, tokens, [], [])
    return [first, second]


def _half(
    eqn,
    inner,
    consts,
    carries,
    start,
    first_x,
    name,
    eqns,
    used,
    outs,
    given,
    given_tokens,
    saved,
    tokens,
):
    """One of the two scans, as an equation: it yields the outputs `outs`, and stacks `saved`."""
    used = used | {v for v in (inner.outvars[i] for i in outs) if not isinstance(v, Literal)}
    fixed = [i for i in range(start) if inner.invars[i] in used]
    carried = [i for i in outs if i < carries]
    stacked = [i for i in range(first_x, len(inner.invars)) if inner.invars[i] in used]
    yielded = [i for i in outs if i >= carries]
    params = eqn.origin.params

    def scan(*values):
        constants, rest = values[: len(fixed)], values[len(fixed) :]
        init, xs = rest[: len(carried)], rest[len(carried) :]

        def body(carry, xs):
            env = dict(consts)
            env.update(zip((inner.invars[i] for i in fixed), constants, strict=True))
            env.update(zip((inner.invars[start + i] for i in carried), carry, strict=True))
            env.update(zip((*(inner.invars[i] for i in stacked), *given), xs, strict=True))
            env = run(eqns, env)
            kept = read(env, saved)
            out = [read(env, [inner.outvars[i] for i in group]) for group in (carried, yielded)]
            return out[0], (out[1], kept)

        options = dict(length=params["length"], reverse=params["reverse"], unroll=params["unroll"])
        last, (ys, kept) = jax.lax.scan(body, list(init), list(xs), **options)
        return [*last, *ys, *kept]

    inputs = [eqn.invars[i] for i in (*fixed, *(start + i for i in carried), *stacked)]
    outputs = [eqn.outvars[i] for i in (*carried, *yielded)]
    return Equation(name, (*inputs, *given_tokens), (*outputs, *tokens), scan, eqn.origin)


def _closed(eqns, inner, given, wanted, carries, start):
    """The outputs asked for, and each carry on which they depend from one step to the next."""
    chosen = set(wanted)
    while True:
        used = needed(eqns, [inner.outvars[i] for i in chosen], given)[1]
        used |= {inner.outvars[i] for i in chosen if not isinstance(inner.outvars[i], Literal)}
        more = {i for i in carries if inner.invars[start + i] in used} - chosen
        if not more:
            return sorted(chosen)
        chosen |= more


def _carries(eqn, inner):
    """(how many values are carried, the number of the first input that is stacked).

    By their ranks: outside, what is stacked has one axis more than inside.
    """
    ys = sum(_rank(a) > _rank(b) for a, b in zip(eqn.outvars, inner.outvars, strict=True))
    xs = sum(_rank(a) > _rank(b) for a, b in zip(eqn.invars, inner.invars, strict=True))
    return len(inner.outvars) - ys, len(inner.invars) - xs


def _rank(v):
    return getattr(v.aval, "ndim", 0)
