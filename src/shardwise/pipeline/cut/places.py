"""The stage of each equation of a loss that is traced with its marks."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from shardwise import jaxprs, marks
from shardwise.jaxprs import CALLS, variables
from shardwise.pipeline.cut.parts import REPEATED, Part, follows, traced

MARK = "shardwise stage boundary "


def trace(function: Callable, params: Any, data: Any) -> tuple:
    """(`function(params, data)` with its marks, what it returns); calls of `jax.jit` are inlined.

    A mark within a scan, a remat or another inner function, which cannot be cut, is a ValueError.
    """
    with marks.bind(stage_boundary=mark):
        program, out = traced(function, CALLS, params, data)
    for eqn in program.eqns:
        if any(_leaf(e) is not None for e in jaxprs.within(eqn.origin)):
            raise ValueError(
                f"cut: marks.stage_boundary stands within a {eqn.name}, whose inside cannot be "
                f"cut; call it between such parts, at the loss's own level."
            )
    return program, out


def mark(x: Any) -> Any:
    """The meaning of `marks.stage_boundary` in a trace that is to be cut."""
    leaves, structure = jax.tree.flatten(x)
    if not leaves:
        raise ValueError(
            "cut: marks.stage_boundary was given no array, so it marks no place; give it the "
            "activation that the next stage reads."
        )
    named = [checkpoint_name(leaf, f"{MARK}{i}") for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, named)


def _leaf(eqn):
    """Which leaf of a mark this equation is; None if of none."""
    name = str(eqn.params.get("name", "")) if eqn.primitive.name == "name" else ""
    return int(name.removeprefix(MARK)) if name.startswith(MARK) else None


def placed(loss: Part) -> tuple[list[list], dict]:
    """(what crosses into each stage, and out of the last; {id of an effect's equation: stage})."""
    activations, marks = _activations(loss)
    used = dict.fromkeys(variables(loss.outputs[0]), marks)  # the last stage that reads a variable
    first, stage, effects = dict(used), {}, {}
    for eqn, at in reversed(activations):
        if at is None:  # before every mark: as late as its readers allow
            at = min([first[v] for v in eqn.outvars if v in first], default=0)
        if eqn.effects:
            effects[id(eqn)] = at
        stage.update(dict.fromkeys(eqn.outvars, at))
        for v in variables(eqn.invars):
            used[v], first[v] = max(used.get(v, 0), at), min(first.get(v, at), at)
    order = sorted(stage, key=stage.__getitem__)
    into = [[v for v in order if stage[v] < s <= used.get(v, -1)] for s in range(marks + 1)]
    return [*into, loss.outputs[0]], effects


def _activations(loss):
    """([(equation that is not repeated, its stage; None before every mark)], number of marks)."""
    leaf_of = {id(eqn): _leaf(eqn.origin) for eqn in loss.eqns}
    sources = follows(loss, lambda eqn: eqn.effects or leaf_of[id(eqn)] is not None)
    level, found = {}, []  # how many marks a variable is behind
    marks, before = 0, math.inf
    for eqn in loss.eqns:
        inputs = variables(eqn.invars)
        at = behind = max([level.get(v, 0) for v in inputs], default=0)
        if (leaf := leaf_of[id(eqn)]) is not None:
            marks += leaf <= before  # the leaves of one mark are in order
            at, behind, before = marks - 1, marks, leaf
        elif eqn.effects:
            _check_unordered(eqn)
            if set().union(*(sources[v] for v in inputs)) in REPEATED:
                at = behind = marks  # those that it is written behind
        level.update(dict.fromkeys(eqn.outvars, behind))
        if eqn.effects or any(sources[v] not in REPEATED for v in eqn.outvars):
            found.append((eqn, at if behind else None))
    return found, marks


def _check_unordered(eqn):
    for name in (type(effect).__name__ for effect in eqn.origin.effects):
        if "Ordered" in name:
            raise ValueError(
                f"cut: the loss has an effect that asks for an order, {name} in {eqn.name}; stages "
                f"run at the same time. Leave ordered=True out, and put what tells the order, a "
                f"row or a step, into what is printed or sent."
            )
