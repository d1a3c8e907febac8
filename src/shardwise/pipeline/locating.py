"""The stages on which each equation of a function on arrays of several stages is to run."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from shardwise import jaxprs
from shardwise.jaxprs import CALLS, REMAT
from shardwise.pipeline.rows import by_rows, run_by_rows

# What is run as the equations within: an update is not differentiated, and keeps nothing.
INLINED = frozenset({*CALLS, *REMAT, "custom_jvp_call", "custom_vjp_call"})


class Step(NamedTuple):
    """An operation of a stage: `outvars` from `invars`, by `run(rows, *values) -> list`.

    `rows` is the stage's range of the rows, where the arrays lie in rows. `homes` says where it
    runs, None: wherever it is needed. Of `guards`, [(variable, number)], each is a branch of a
    `cond`: the step matters only where all of these variables have these numbers.
    """

    name: str
    invars: tuple
    outvars: tuple
    run: Callable
    homes: tuple | None
    guards: tuple


class Part(NamedTuple):
    """The variable of the number to which one stage's rows of an array reduce."""

    variable: Any
    stage: int


class Located:
    """The home of each variable, and the steps that a traced function becomes.

    `homes[v]` is as in a `Piece`; None is said of what follows from numbers alone, which any stage
    can compute. `axis[v]` is the axis along which an array lies in rows. Numbers travel.
    """

    def __init__(self, inputs, meshes):
        self.homes = {v: _homes(piece, meshes) for v, piece in inputs}
        self.axis = {v: 0 for v in self.homes if self._in_rows(self.homes[v])}
        self.label = {v: piece.path for v, piece in inputs}
        self.alias, self.constants = {}, {}

    def steps(self, closed, guards=()):
        """The steps of a traced function without inner functions."""
        self.constants |= zip(closed.jaxpr.constvars, closed.consts, strict=True)
        for eqn in jaxprs.equations(closed.jaxpr):
            invars = tuple(map(self.resolved, eqn.invars))
            yield from self._steps(eqn._replace(invars=invars), guards)

    def resolved(self, v):
        """The variable outside of a branch that a variable in it stands for."""
        return v if isinstance(v, Literal) else self.alias.get(v, v)

    def _steps(self, eqn, guards):
        _check_effects(eqn)
        located = [v for v in eqn.invars if self._is_located(v)]
        found = {self.homes[v] for v in located}
        homes = next(iter(found), None)
        if eqn.name == "cond" and (len(found) > 1 or self._in_rows(homes)):
            yield from self._branches(eqn, guards)
            return
        if len(found) > 1:
            paths = ", ".join(dict.fromkeys(self.label[v] for v in located))
            raise ValueError(
                f"pipeline.update: {eqn.name} combines arrays of several stages ({paths}); arrays "
                f"stay where they are, and only sums and other scalars cross. Use a transformation "
                f"that works array by array."
            )
        if located:
            self.label |= dict.fromkeys(eqn.outvars, self.label[located[0]])
        if self._in_rows(homes):
            yield from self._by_rows(eqn, homes, guards)
        else:
            yield self._step(eqn, homes, guards, lambda rows, *values: eqn.run(*values))

    def _step(self, eqn, homes, guards, run, outvars=None):
        outvars = outvars or eqn.outvars
        self.homes |= dict.fromkeys(outvars, homes)
        # What a step is guarded by is one of its inputs, to be there wherever it runs.
        watched = tuple(v for v, _ in guards if not isinstance(v, Literal))
        count = len(eqn.invars)
        return Step(
            eqn.name, (*eqn.invars, *watched), outvars,
            lambda rows, *values: run(rows, *values[:count]), homes, guards,
        )  # fmt: skip

    def _by_rows(self, eqn, homes, guards):
        axes = tuple(None if isinstance(v, Literal) else self.axis.get(v) for v in eqn.invars)
        total = max(rows[1] for _, rows in homes)
        how = by_rows(eqn, axes, total)
        if how is None:
            paths = dict.fromkeys(self.label[v] for v in eqn.invars if self._is_located(v))
            raise ValueError(
                f"pipeline.update: {eqn.name} on {', '.join(paths)}, of which each of {len(homes)} "
                f"stages holds rows, works neither entry by entry nor by a sum over all. Keep the "
                f"parameter as an array for each stage."
            )
        run = functools.partial(run_by_rows, eqn, how, axes, total)
        if how.result is not None:
            self.axis |= dict.fromkeys(eqn.outvars, how.result)
            yield self._step(eqn, homes, guards, run)
            return
        parts = [Part(eqn.outvars[0], stage) for stage, _ in homes]
        for part in parts:
            here = ((part.stage, dict(homes)[part.stage]),)
            yield self._step(eqn, here, guards, run, (part,))
        whole = eqn._replace(name="combine", invars=tuple(parts))
        combine = functools.partial(functools.reduce, how.combine)
        yield self._step(whole, None, guards, lambda rows, *values: [combine(values)])

    def _branches(self, eqn, guards):
        """The steps of a `cond`: those of its branches, and the choice among what they yield."""
        index, *operands = eqn.invars
        outs = []
        for number, branch in enumerate(eqn.origin.params["branches"]):
            # Traced anew: one branch may stand in several places.
            closed = jaxprs.inlined(branch, INLINED)
            self.alias |= zip(closed.jaxpr.invars, operands, strict=True)
            yield from self.steps(closed, (*guards, (index, number)))
            outs.append([self.resolved(v) for v in closed.jaxpr.outvars])
        for v, *cases in zip(eqn.outvars, *outs, strict=True):
            choice = jaxprs.Equation("select_n", (index, *cases), (v,), _choose, None)
            yield from self._steps(choice, guards)

    def stage_of(self, v):
        """The stage of a number that one stage computes; None for anything else."""
        if isinstance(v, Part):
            return v.stage
        homes = self.homes.get(v)
        return homes[0][0] if homes is not None and v.aval.shape == () else None

    def check(self, v, piece, meshes):
        """Raise if the output `v` is to live elsewhere than where it is computed."""
        if isinstance(v, Literal) or not self._is_located(v):
            return
        if self.homes[v] == _homes(piece, meshes) and self.axis.get(v, 0) == 0:
            return
        raise ValueError(
            f"pipeline.update: {piece.path} combines arrays of several stages, or their rows: it "
            f"would come from {self.label[v]}, and arrays stay where they are. Use a "
            f"transformation that works array by array."
        )

    def _is_located(self, v):
        known = not isinstance(v, Literal) and self.homes.get(v) is not None
        return known and v.aval.shape != ()

    @staticmethod
    def _in_rows(homes):
        return homes is not None and len(homes) > 1


def everywhere(piece, meshes):
    """Whether the array of a piece is whole on each stage."""
    return not piece.in_rows and len(piece.homes) == len(meshes)


def _homes(piece, meshes):
    """The homes where a piece counts as living: None if all stages have it, one if one has."""
    if not piece.shape or everywhere(piece, meshes):
        return None
    return piece.owners if len(piece.owners) > 1 else ((piece.owners[0][0], None),)


def _choose(index, *cases):
    if index.dtype != bool or len(cases) != 2:
        index = jnp.clip(index.astype("int32"), 0, len(cases) - 1)
    return [jax.lax.select_n(index, *cases)]


def _check_effects(eqn):
    if eqn.origin is not None and eqn.origin.effects:
        raise ValueError(
            f"pipeline.update: {eqn.name} has an effect, and an update runs in pieces on several "
            f"stages, some of them several times. Print or call back on what it returns."
        )
