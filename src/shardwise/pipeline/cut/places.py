"""The stage to which each equation of a traced loss belongs."""

from typing import NamedTuple

from shardwise.jaxprs import equations, variables


class Program(NamedTuple):
    """The traced loss: its equations, and for each the stage (None: wherever it is needed)."""

    eqns: list
    constants: dict
    params: list
    data: list
    outputs: list
    stage: dict  # of an activation: the stage that yields it
    used: dict  # of an activation: the last stage that reads it
    effects: dict  # of an equation with effects, by its id: the stage in which it runs


def assign(closed, n, marks):
    """The `Program` of a trace whose first `n` inputs are parameters, and of its marks.

    Raises:
      ValueError: an effect that asks for an order.
    """
    jaxpr = closed.jaxpr
    eqns, params, data = equations(jaxpr), jaxpr.invars[:n], jaxpr.invars[n:]
    reads, level, before = _levels(eqns, params, data, marks)
    stage, used = {}, {v: len(set(marks.values())) for v in variables(jaxpr.outvars)}
    first, effects = dict(used), {}
    for eqn in reversed(eqns):
        if len(reads[id(eqn)]) < 2:
            continue  # of parameters alone, or of data alone: repeated where it is needed
        mark = _mark(eqn, marks)
        at = level[id(eqn)] if mark is None else mark
        if at == 0 and mark is None:  # before every mark: as late as its readers allow
            at = min([first[v] for v in eqn.outvars if v in first], default=0)
        if eqn.effects:
            at = effects[id(eqn)] = max(at, before.get(id(eqn), 0))
        stage.update(dict.fromkeys(eqn.outvars, at))
        for v in variables(eqn.invars):
            if len(reads.get(v, ())) == 2:
                used[v], first[v] = max(used.get(v, 0), at), min(first.get(v, at), at)
    constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    return Program(eqns, constants, params, data, list(jaxpr.outvars), stage, used, effects)


def _levels(eqns, params, data, marks):
    """The inputs that each variable and equation (by id) reads, and how many marks it is behind.

    And for an effect of parameters or data alone, which is behind none: how many it is written
    behind. What has effects counts as an activation, since it is never repeated.
    """
    reads = {v: {"params"} for v in params} | {v: {"data"} for v in data}
    level, before, passed = dict.fromkeys(reads, 0), {}, 0
    for eqn in eqns:
        inputs = variables(eqn.invars)
        kinds = set().union(*(reads.get(v, set()) for v in inputs))
        at, mark = max([level.get(v, 0) for v in inputs], default=0), _mark(eqn, marks)
        if mark is not None:
            kinds, at = {"params", "data"}, mark + 1
            passed = max(passed, at)
        if eqn.effects:
            _check_unordered(eqn)
            if len(kinds) < 2:
                before[id(eqn)] = at = passed
            kinds = {"params", "data"}
        reads.update(dict.fromkeys((*eqn.outvars, id(eqn)), kinds))
        level.update(dict.fromkeys((*eqn.outvars, id(eqn)), at))
    return reads, level, before


def _mark(eqn, marks):
    """The number of the mark that this equation is, or None."""
    return next((marks[v] for v in eqn.outvars if v in marks), None)


def _check_unordered(eqn):
    ordered = [type(e).__name__ for e in eqn.origin.effects if "Ordered" in type(e).__name__]
    if ordered:
        raise ValueError(
            f"cut: the loss has an effect that asks for an order, {ordered[0]} in {eqn.name}; "
            f"stages run at the same time. Leave ordered=True out, and put what tells the order, "
            f"a row or a step, into what is printed or sent."
        )


def crossing(program, boundary):
    """The activations that go from stage `boundary` to the next."""
    return [
        v
        for v, at in sorted(program.stage.items(), key=lambda item: item[1])
        if at <= boundary < program.used.get(v, -1)
    ]
