"""A function of whole trees, run on arrays that lie on several stages; only scalars travel.

The function is traced on the whole tree. An equation runs on the stage that holds its operands. An
array that lies in rows on several stages is worked on by each of them, and its sums are added up: a
global norm, and the norm of each array, come out as on one device.
"""

import collections
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import jaxprs
from shardwise.pipeline.branches import run_steps
from shardwise.pipeline.crossing import exchanges
from shardwise.pipeline.locating import INLINED, Located, everywhere
from shardwise.pipeline.placing import Pipelined


class Spread:
    """`function(*trees)`, which returns a tuple of trees, each array where it lives.

    Called with `Pipelined` trees like `inputs`, of which only the layouts count here.
    `layouts(shapes)` gives the layout of each output. The first `donated` inputs are used up, where
    an output can take their place.

    Raises:
      ValueError: an equation that combines arrays of several stages, or the rows of an array that
        lies on several, other than by a sum, maximum, minimum, product, and, or.
    """

    def __init__(
        self, function: Callable, inputs: tuple[Pipelined, ...], layouts: Callable, donated: int = 0
    ):
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(
            *(tree.abstract() for tree in inputs)
        )
        closed, self.meshes = jaxprs.inlined(traced, INLINED), inputs[0].meshes
        self.structures = [jax.tree.structure(tree) for tree in shapes]
        self.layouts = layouts(shapes)
        pieces = [(piece, i < donated) for i, tree in enumerate(inputs) for piece in tree.layout]
        variables = closed.jaxpr.invars
        self.inputs = [(v, p) for v, (p, _) in zip(variables, pieces, strict=True)]
        self.donated = {v: p for v, (p, mine) in zip(variables, pieces, strict=True) if mine}
        located = Located(self.inputs, self.meshes)
        self.steps = list(located.steps(closed))
        outvars = map(located.resolved, closed.jaxpr.outvars)
        outputs = (piece for layout in self.layouts for piece in layout)
        self.goals = list(zip(outvars, outputs, strict=True))
        for v, piece in self.goals:
            located.check(v, piece, self.meshes)
        self.located, self.exchanges = located, exchanges(located, self.steps, self.goals)
        self.jitted = {}

    def __call__(self, trees: tuple[Pipelined, ...]) -> tuple[Pipelined, ...]:
        parts = [tree.tree[piece.path] for tree in trees for piece in tree.layout]
        arrays = [x for part in parts for x in part.values()]
        once = len({id(x) for x in arrays}) == len(arrays)  # or one would be used up by another
        local, shared = [{} for _ in self.meshes], {}
        for (v, piece), part in zip(self.inputs, parts, strict=True):
            if piece.shape == ():
                shared[v] = part[piece.homes[0][0]]
            else:
                for stage, _ in piece.homes:
                    local[stage][v] = part[stage]
        for number, exchange in enumerate(self.exchanges):
            found = {}
            for stage, wanted in exchange.items():
                goals = [(v, v, None) for v in wanted]
                found |= self._run(stage, number, goals, local[stage], shared, False)
            shared |= found
        stages = range(len(self.meshes))
        done = [self._run(s, "goals", self._goals(s), local[s], shared, once) for s in stages]
        return self._trees(done)

    def programs(self) -> Iterator[tuple[int, int | str, Callable, tuple]]:
        """(stage, number of an exchange or "goals", jitted, abstract arguments), in their order."""
        local, shared = [{} for _ in self.meshes], {}
        for v, piece in self.inputs:
            for stage, _ in piece.homes if piece.shape else ():
                laid = NamedSharding(self.meshes[stage], piece.spec)
                kind = _kind(piece, stage)
                local[stage][v] = jax.ShapeDtypeStruct(*kind[:2], sharding=laid)
            if not piece.shape:
                shared[v] = piece
        for number, exchange in enumerate(self.exchanges):
            found = {}
            for stage, wanted in exchange.items():
                goals = [(v, v, None) for v in wanted]
                jitted, given = self._abstract(stage, goals, local[stage], shared, False)
                found |= zip(wanted, jax.eval_shape(jitted, *given), strict=True)
                yield stage, number, jitted, given
            shared |= found
        for stage, here in enumerate(local):
            goals = self._goals(stage)
            if goals:
                yield stage, "goals", *self._abstract(stage, goals, here, shared, True)

    def _abstract(self, stage, goals, local, shared, donate):
        jitted, given, spent, numbers = self._compile(stage, goals, local, shared, donate)
        whole = NamedSharding(self.meshes[stage], P())
        told = [jax.ShapeDtypeStruct((), shared[v].dtype, sharding=whole) for v in numbers]
        return jitted, ([local[v] for v in spent], [local[v] for v in given], told)

    def _goals(self, stage):
        """[(number, variable, `Piece`)] of the outputs that a stage computes."""
        return [(i, v, p) for i, (v, p) in enumerate(self.goals) if stage in dict(self._of(p))]

    def _of(self, piece):
        """The homes that compute the array of a piece."""
        return piece.homes if everywhere(piece, self.meshes) else piece.owners

    def _run(self, stage, number, goals, local, shared, donate):
        """{variable: number} of one exchange, or {number of a goal: array}, run on one stage."""
        key = stage, number, donate
        if key not in self.jitted:
            self.jitted[key] = self._compile(stage, goals, local, shared, donate)
        jitted, given, spent, numbers = self.jitted[key]
        whole = NamedSharding(self.meshes[stage], P())
        numbers = jax.device_put([shared[v] for v in numbers], whole)
        values = jitted([local[v] for v in spent], [local[v] for v in given], numbers)
        return dict(zip((key for key, _, _ in goals), values, strict=True))

    def _compile(self, stage, goals, local, shared, donate):
        known = {*local, *shared, *self.located.constants}
        chosen, used = jaxprs.needed(self.steps, [v for _, v, _ in goals], known)
        spent = self._spent(stage, goals, [v for v in local if v in used]) if donate else []
        given = [v for v in local if v in used and v not in spent]
        numbers = [v for v in shared if v in used]

        def function(spent_arrays, given_arrays, values):
            env = dict(self.located.constants)
            env |= zip(spent, spent_arrays, strict=True)
            env |= zip((*given, *numbers), (*given_arrays, *values), strict=True)
            run_steps(chosen, env, stage, [v for _, v, _ in goals])
            return [self._goal(env, v, piece, stage) for _, v, piece in goals]

        mesh = self.meshes[stage]
        laid = [NamedSharding(mesh, P() if p is None else p.spec) for _, _, p in goals]
        jitted = jax.jit(function, out_shardings=laid, donate_argnums=0)
        return jitted, given, spent, numbers

    def _spent(self, stage, goals, variables):
        """The inputs whose memory an output can take over: of equal shape, dtype and layout."""
        free = collections.Counter(_kind(piece, stage) for _, _, piece in goals)
        spent = []
        for v in variables:
            if v in self.donated and free[_kind(self.donated[v], stage)] > 0:
                free[_kind(self.donated[v], stage)] -= 1
                spent.append(v)
        return spent

    def _goal(self, env, v, piece, stage):
        """An output as it lives on the stage, in memory of its own."""
        x = jnp.asarray(jaxprs.read(env, [v])[0])
        if piece is None:
            return x
        if piece.in_rows and (isinstance(v, Literal) or self.located.homes.get(v) is None):
            x = x[slice(*piece.rows(stage))]
        return jnp.copy(x)

    def _trees(self, done):
        trees, at = [], 0
        for layout, structure in zip(self.layouts, self.structures, strict=True):
            tree = {
                piece.path: {stage: done[stage][at + i] for stage, _ in self._of(piece)}
                for i, piece in enumerate(layout)
            }
            trees.append(Pipelined(tree, layout, structure, self.meshes))
            at += len(layout)
        return tuple(trees)


def _kind(piece, stage):
    rows = piece.rows(stage)
    shape = piece.shape if rows is None else (rows[1] - rows[0], *piece.shape[1:])
    return shape, piece.dtype, piece.spec
