"""A function of whole trees, run on arrays that lie on several stages; only scalars travel.

The function is traced on the whole tree. An equation runs on the stage that holds its operands. An
array that lies in rows on several stages is worked on entry by entry, on each of them, and its
sums are added up: a global norm, and the norm of each array, come out as on one device.
"""

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import cut
from shardwise.pipeline.locating import Placed, everywhere
from shardwise.pipeline.placing import Pipelined


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
        placed = Placed(self.inputs, self.meshes)
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
        return piece.homes if everywhere(piece, self.meshes) else piece.owners

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
