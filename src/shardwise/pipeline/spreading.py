"""A function of whole trees, run on arrays that lie on several stages; only scalars travel.

The function is traced on the whole tree. An equation runs on the stage that holds its operands. An
array that lies in rows on several stages is worked on entry by entry, on each of them, and its
sums are added up: a global norm, and the norm of each array, come out as on one device.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import cut
from shardwise.pipeline.placing import Pipelined

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


class Spread:
    """`function(*trees)`, which returns a tuple of trees like `outputs`, where these live.

    Called with `Pipelined` trees like `inputs`. Only the layouts count here.

    Raises:
      ValueError: an equation that combines arrays of several stages, or the rows of an array that
        lies on several, other than by a sum, maximum, minimum or product.
    """

    def __init__(self, function, inputs, outputs):
        closed = cut.inlined(jax.make_jaxpr(function)(*(tree.abstract() for tree in inputs)))
        jaxpr = closed.jaxpr
        self.outputs, self.meshes = outputs, inputs[0].meshes
        self.constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self.inputs = list(zip(jaxpr.invars, (p for t in inputs for p in t.layout), strict=True))
        self.goals = list(zip(jaxpr.outvars, (p for t in outputs for p in t.layout), strict=True))
        placed = _Placed(self.inputs, self.meshes)
        self.eqns = [part for eqn in cut.equations(jaxpr) for part in placed.equations(eqn)]
        self.placed, self.exchanges = placed, placed.exchanges(self.eqns)
        self.jitted = {}

    def __call__(self, trees):
        parts = [tree.tree[piece.path] for tree in trees for piece in tree.layout]
        local, shared = [{} for _ in self.meshes], {}
        for (v, piece), part in zip(self.inputs, parts, strict=True):
            if piece.shape == ():
                shared[v] = part[piece.homes[0][0]]
            else:
                for stage, _ in piece.homes:
                    local[stage][v] = part[stage]
        for step, exchange in enumerate(self.exchanges):
            found = {}
            for stage, wanted in exchange.items():
                found |= self._run(stage, step, wanted, local[stage], shared)
            shared |= found
        done = [
            self._run(stage, "goals", [g for g in enumerate(self.goals)], local[stage], shared)
            for stage in range(len(self.meshes))
        ]
        return self._trees(done)

    def _of(self, piece):
        """The homes that compute it."""
        return piece.homes if _everywhere(piece, self.meshes) else piece.owners

    def _run(self, stage, step, wanted, local, shared):
        """{variable: number} of one exchange, or {number of the goal: array}."""
        if step == "goals":
            wanted = [(i, v, p) for i, (v, p) in wanted if stage in dict(self._of(p))]
        else:
            wanted = [(v, v, None) for v in wanted]
        if (stage, step) not in self.jitted:
            self.jitted[stage, step] = self._compile(stage, wanted, local, shared)
        jitted, mine, ours = self.jitted[stage, step]
        whole = NamedSharding(self.meshes[stage], P())
        numbers = jax.device_put([shared[v] for v in ours], whole)
        values = jitted([local[v] for v in mine], numbers)
        return dict(zip((key for key, _, _ in wanted), values, strict=True))

    def _compile(self, stage, wanted, local, shared):
        given = {*local, *shared, *self.constants}
        chosen, used = cut.needed(self.eqns, [v for _, v, _ in wanted], given)
        mine, ours = [v for v in local if v in used], [v for v in shared if v in used]

        def function(arrays, numbers):
            env = self.constants | dict(zip(mine, arrays, strict=True))
            env = cut.run(chosen, env | dict(zip(ours, numbers, strict=True)))
            return [self._goal(cut.read(env, [v])[0], v, p, stage) for _, v, p in wanted]

        mesh = self.meshes[stage]
        laid = [NamedSharding(mesh, P() if p is None else p.spec) for _, _, p in wanted]
        return jax.jit(function, out_shardings=laid), mine, ours

    def _goal(self, x, v, piece, stage):
        """An output in the shape in which it lives on the stage."""
        if piece is None or (jnp.shape(x) == piece.shape and not piece.in_rows):
            return x
        rows = piece.rows(stage)
        shape = piece.shape if rows is None else (rows[1] - rows[0], *piece.shape[1:])
        if isinstance(v, Literal) or (self.placed.homes.get(v) is None and jnp.shape(x) == ()):
            return jnp.broadcast_to(x, shape)
        return x if jnp.shape(x) == shape else x[slice(*rows)]

    def _trees(self, done):
        trees, at = [], 0
        for like in self.outputs:
            tree = {
                piece.path: {stage: done[stage][at + i] for stage, _ in self._of(piece)}
                for i, piece in enumerate(like.layout)
            }
            trees.append(Pipelined(tree, like.layout, like.structure, like.meshes))
            at += len(like.layout)
        return trees


class _Part(NamedTuple):
    """What one stage's rows of an array reduce to; a variable of its own."""

    variable: Any
    stage: int


class _Placed:
    """Where each variable lives: `homes[v]` as in a `Piece`, or None, wherever it is needed.

    An array that follows from scalars alone by broadcasting has the same number everywhere; it is
    kept as that number (`uniform`), since its shape depends on where it is used.
    """

    def __init__(self, inputs, meshes):
        free = {v for v, p in inputs if not p.shape or _everywhere(p, meshes)}
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


def _everywhere(piece, meshes):
    return not piece.in_rows and len(piece.homes) == len(meshes)
