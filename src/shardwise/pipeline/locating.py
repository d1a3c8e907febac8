"""Where each equation of a function on arrays of several stages is to run."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal

from shardwise import cut

# Reductions over all of an array, and how those of its rows become one.
REDUCTIONS = {
    "reduce_sum": jnp.add,
    "reduce_max": jnp.maximum,
    "reduce_min": jnp.minimum,
    "reduce_prod": jnp.multiply,
}
# The same shape in and out, and yet not entry by entry.
MIXING = {"rev", "sort", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "scan", "while"}
# Of the same number everywhere, these make the same number everywhere.
RESHAPING = {"broadcast_in_dim", "reshape", "squeeze"}


class _Part(NamedTuple):
    """What one stage's rows of an array reduce to; a variable of its own."""

    variable: Any
    stage: int


class Placed:
    """Where each variable lives: `homes[v]` as in a `Piece`, or None, wherever it is needed.

    An array that follows from scalars alone by broadcasting has the same number everywhere; it is
    kept as that number (`uniform`), since its shape depends on where it is used.
    """

    def __init__(self, inputs, meshes):
        free = {v for v, p in inputs if not p.shape or everywhere(p, meshes)}
        self.homes = {v: None if v in free else p.owners for v, p in inputs}
        self.label = {v: p.path for v, p in inputs}
        self.uniform = set()

    def equations(self, eqn):
        """The equation as it is to run: itself, or a sum by parts and what adds them up."""
        located = [v for v in eqn.invars if self._located(v)]
        found = {self.homes[v] for v in located}
        if len(found) > 1:
            paths = ", ".join(self.label[v] for v in located)
            raise ValueError(
                f"pipeline.update: {eqn.name} combines arrays of several stages ({paths}); arrays "
                f"stay where they are, and only sums and other scalars cross. Use a transformation "
                f"that works array by array."
            )
        homes = next(iter(found), None)
        if located:
            self.label |= dict.fromkeys(eqn.outvars, self.label[located[0]])
        if homes is None:
            return [self._free(eqn)]
        if len(homes) > 1 and eqn.name in REDUCTIONS and eqn.outvars[0].aval.shape == ():
            return self._reduced(eqn, homes)
        if len(homes) > 1 and not self._by_entry(eqn):
            raise ValueError(
                f"pipeline.update: {eqn.name} on {self.label[located[0]]}, of which each of "
                f"{len(homes)} stages holds rows, works neither entry by entry nor by a sum over "
                f"all. Keep the parameter as an array for each stage."
            )
        self.homes |= dict.fromkeys(eqn.outvars, homes)
        return [self._widened(eqn, rows=len(homes) > 1)]

    def exchanges(self, eqns):
        """[{stage: numbers}]: those that other stages need, in the order in which they can be."""
        crossing, depth = {}, {}
        for eqn in eqns:
            at = self._homes_of(eqn)
            for v in eqn.invars:
                home = None if isinstance(v, Literal) else self._number(v)
                if home is not None and at != ((home, None),):
                    crossing[v] = home
        for eqn in eqns:
            inputs = [v for v in eqn.invars if not isinstance(v, Literal)]
            step = max((depth.get(v, 0) + (v in crossing) for v in inputs), default=0)
            depth.update(dict.fromkeys(eqn.outvars, step))
        steps = [{} for _ in range(max((depth[v] for v in crossing), default=-1) + 1)]
        for v, stage in crossing.items():
            steps[depth[v]].setdefault(stage, []).append(v)
        return steps

    def _homes_of(self, eqn):
        if isinstance(eqn.outvars[0], _Part):
            return ((eqn.outvars[0].stage, None),)
        return self.homes.get(eqn.outvars[0])

    def _number(self, v):
        """The stage of a number that one stage computes; None for anything else."""
        if isinstance(v, _Part):
            return v.stage
        homes = self.homes.get(v)
        return homes[0][0] if homes is not None and v.aval.shape == () else None

    def _located(self, v):
        known = not isinstance(v, Literal) and self.homes.get(v) is not None
        return known and v.aval.shape != ()

    def _free(self, eqn):
        """From numbers alone, or from nothing: wherever it is needed."""
        self.homes |= dict.fromkeys(eqn.outvars)
        arrays = [v for v in eqn.invars if not isinstance(v, Literal) and v.aval.shape != ()]
        if eqn.name in RESHAPING and set(arrays) <= self.uniform:
            self.uniform.update(v for v in eqn.outvars if v.aval.shape != ())
            return eqn._replace(run=lambda x: [x])
        if arrays and set(arrays) <= self.uniform and self._by_entry(eqn):
            self.uniform.update(eqn.outvars)
            return eqn
        return self._widened(eqn, rows=False)

    def _widened(self, eqn, rows):
        """The equation, with the numbers that stand for arrays made arrays."""
        if not any(not isinstance(v, Literal) and v in self.uniform for v in eqn.invars):
            return eqn
        which = [not isinstance(v, Literal) and v in self.uniform for v in eqn.invars]

        def run(*values):
            here = [x for x, number in zip(values, which, strict=True) if not number]
            shape = next((jnp.shape(x) for x in here if jnp.shape(x)), ())
            wide = [
                jnp.broadcast_to(x, shape if rows else v.aval.shape) if number else x
                for x, v, number in zip(values, eqn.invars, which, strict=True)
            ]
            return eqn.run(*wide)

        return eqn._replace(run=run)

    def _reduced(self, eqn, homes):
        parts = [_Part(eqn.outvars[0], stage) for stage, _ in homes]
        self.homes[eqn.outvars[0]] = None
        combine = functools.partial(functools.reduce, REDUCTIONS[eqn.name])
        whole = cut.Equation(
            "sum of parts", tuple(parts), eqn.outvars, lambda *x: [combine(x)], eqn.origin
        )
        return [*(eqn._replace(outvars=(part,)) for part in parts), whole]

    def _by_entry(self, eqn):
        shapes = {v.aval.shape for v in (*eqn.invars, *eqn.outvars)} - {()}
        return len(shapes) == 1 and eqn.name not in MIXING and len(eqn.outvars) == 1


def everywhere(piece, meshes):
    """Whether it is whole on each stage."""
    return not piece.in_rows and len(piece.homes) == len(meshes)
