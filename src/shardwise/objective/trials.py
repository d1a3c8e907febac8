"""The program that an oracle runs: a loss's numbers over rows that stand in other places, or alone.

All rows and parameters are arguments, and arrangements are handed over as numbers, so that one
compilation serves every turn. The loss stands in it twice, for two parts together and for one
alone; parameters are shaken once a turn, outside the loops.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import jaxprs, marks
from shardwise import tree as trees
from shardwise.objective import stand_ins
from shardwise.objective.means import normal, wide
from shardwise.objective.parts import meaning, numbers, outputs, unit_of
from shardwise.objective.tracing import trace

# Of XLA's CPU compiler, for a program that runs a few times.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
MOST = 8  # arrangements in one call


class Case(NamedTuple):
    """A loss of `(params, batch, *args)`, and the arrays on which it is judged.

    aux: how auxiliary outputs of parts become one; None where nobody reads them;
    gradient: whether gradients are compared too; None where the loss has backward rules;
    mesh: where arrays are that are cut; None where all are on one device.
    """

    loss: Callable
    params: Any
    batch: Any
    args: tuple = ()
    key: Any = None
    has_aux: bool = False
    aux: Any = "sum"
    gradient: bool | None = None
    mesh: Mesh | None = None

    def draws_by_place(self) -> bool:
        """Whether all draws from the key go by place (`marks.index`), as a trace tells."""
        if self.key is None:
            return True

        def of_arrays(params, batch, key):
            return self.loss(params, batch, *self.args, key=key)

        given = self.params, self.batch, numbers(self.batch), (), self.key, self.has_aux
        return trace(of_arrays, *given).by_place


class Part(NamedTuple):
    """One program's share of a judgement: the ways of dividing, and the rows of two parts together.

    Of a sequence, `length` tokens are taken (None: all).
    """

    ways: tuple[str, ...]
    rows: int
    length: int | None = None

    @property
    def sequence(self) -> bool:
        """Whether it is the sequence that is divided, rather than the rows."""
        return "sequence" in self.ways

    @property
    def size(self) -> int:
        """The entries of two parts together: rows of the batch, or tokens."""
        return self.length if self.sequence else self.rows


class Arrangement(NamedTuple):
    """An arrangement of entries in a row: those chosen, the places (int) they take, those kept.

    Entries are rows of the batch, or tokens of a sequence; what is not kept is zeros, as padding.
    """

    chosen: np.ndarray
    places: np.ndarray
    kept: np.ndarray


class Turn(NamedTuple):
    """A perturbation of parameters: a factor, the seed of what shakes them, the size of noise."""

    factor: float = 1.0
    seed: int = 0
    noise: float = 0.0


class Found(NamedTuple):
    """The numbers of each arrangement, in float64, and the sizes of what they tell of.

    First total and perhaps count, of which they are the sizes; then one number for each parameter's
    gradient, and for each auxiliary output that is added up, whose sizes are norms.
    """

    values: np.ndarray
    sizes: np.ndarray


class Trials:
    """A case, compiled for the rows of a part and for half of them; in float32 where `widened`."""

    def __init__(self, case: Case, part: Part, widened: bool = True):
        self.case, self.part, self.widened = case, part, widened
        self.pairs = False  # whether a matrix of pairs of rows is local
        self.local = False  # whether anything is
        self.outputs = {}  # {entries: {path of an auxiliary output: (its way, its shape)}}
        self.names = []  # of the numbers, but for auxiliary outputs; the first `sums` are sums
        self.sums, self.rounding = 0, 0.0  # of the loss's total, relative to it
        arrays, self.joined = _apart((case.args, case.key))
        self.arguments = case.params, case.batch, arrays
        self.gradient = bool(case.gradient)
        traced = self._traced()
        names = (eqn.primitive.name for eqn in jaxprs.every(traced.jaxpr.jaxpr))
        if case.gradient is None and any(name.startswith("custom_vjp") for name in names):
            self.gradient = True
            traced = self._traced()
        self.compiled = traced.lower().compile()

    def _traced(self):
        where = None if self.case.mesh is None else NamedSharding(self.case.mesh, P())
        options = QUICK if jax.default_backend() == "cpu" else None
        run = functools.partial(self._run)  # as JAX caches what it traced of the method
        run = jax.jit(run, out_shardings=where, compiler_options=options)
        return run.trace(*self.arguments, *self._padded(Turn(), (), ()))

    @property
    def memory(self) -> int:
        """The bytes that a device needs beside the arguments."""
        found = self.compiled.memory_analysis()
        return 0 if found is None else found.temp_size_in_bytes + found.output_size_in_bytes

    def __call__(
        self, turn: Turn, together: Sequence[Arrangement], alone: Sequence[Arrangement] = ()
    ) -> tuple[Found, Found]:
        """(the numbers of parts together, the numbers of parts alone)."""
        given = self._padded(turn, together, alone)
        out = jax.device_get(self.compiled(*self.arguments, *given))
        return tuple(
            Found(*(np.asarray(x[: len(own)], np.float64) for x in found))
            for found, own in zip(out, (together, alone), strict=True)
        )

    def _padded(self, turn, together, alone):
        given, size = Turn(*(np.float32(x) for x in turn)), self.part.size
        return given, _stacked(together, size), _stacked(alone, size // 2)

    def _run(self, params, batch, arrays, turn, together, alone):
        args, key = self.joined(arrays)
        own = {} if key is None else {"key": key}
        params, batch, args = (stand_ins.widened(x, self.widened) for x in (params, batch, args))
        params = jax.tree.map(functools.partial(stand_ins.shaken, turn), params)
        batch = jax.tree.map(self._taken, batch)
        shapes: list[list] = []

        def each(group):
            count, arrangements = group
            seen = []  # shapes of what is local, as often as it is traced

            @jax.jit  # so that it is traced once
            def one(arrangement):
                return self._numbers(params, batch, args, own, Arrangement(*arrangement), seen)

            first = jax.tree.map(lambda x: x[0], arrangements)
            empty = jax.tree.map(
                lambda x: jnp.zeros((MOST, *x.shape), x.dtype), jax.eval_shape(one, first)
            )

            def step(i, found):
                now = one(jax.tree.map(lambda x: x[i], arrangements))
                return jax.tree.map(lambda all_, x: all_.at[i].set(x), found, now)

            found = jax.lax.fori_loop(0, count, step, empty)
            shapes.append(list(seen))
            return found

        out = each(together), each(alone)
        self.pairs = any(map(stand_ins.of_pairs, *shapes))
        self.local = any(shapes)
        return out

    def _numbers(self, params, batch, args, own, arrangement, seen):
        case, entries = self.case, len(arrangement.places)
        rows = self._places(batch, arrangement.places)
        rows_of = jax.tree.map(lambda x: self._arranged(x, arrangement), batch)
        bound_to: dict[str, Callable] = dict(
            total=stand_ins.filled, local=functools.partial(stand_ins.own, seen)
        )
        if self.part.sequence:
            bound_to |= dict(attend=stand_ins.attend, experts=stand_ins.to_no_expert)
        bare = normal(case.loss, case.has_aux)

        def of(params):
            bound = marks.bind(index=meaning(rows), **bound_to)
            with bound, jax.default_matmul_precision("float32"):
                (total, count), extra = bare(params, rows_of, *args, **own)
            self.rounding = float(jnp.finfo(jnp.result_type(total)).eps)
            total = jnp.asarray(total).astype(wide(jnp.result_type(total)))
            sums = [total] if count is None else [total, jnp.asarray(count).astype(jnp.float32)]
            self.names, self.sums = ["total", "count"][: len(sums)], len(sums)
            leaves = outputs(case.aux, extra)
            self.outputs[entries] = {path: (way, jnp.shape(x)) for path, x, way in leaves}
            added = [stand_ins.projected(x) for _, x, way in leaves if way == "sum"]
            # Of a mean over rows a part is a share; a sum is made small, as a mean is.
            weight = (entries if count is None else 1) / self.part.size
            return total * weight, ([(x, jnp.abs(x)) for x in sums], added)

        if self.gradient:
            grads, (sums, added) = jax.grad(of, has_aux=True, allow_int=True)(params)
            paths = [p or "the parameters" for p, x in trees.leaves(params) if _is_real(x)]
            self.names += [f"gradient of {path}" for path in paths]
            sums += [stand_ins.projected(g) for g in filter(_is_real, jax.tree.leaves(grads))]
        else:
            sums, added = of(params)[1]
        return Found(*map(jnp.stack, zip(*sums, *added, strict=True)))

    def _taken(self, x):
        """The rows and tokens of an array of the batch that take part."""
        x, length = jnp.asarray(x), self.part.length
        if not x.ndim:
            return x
        x = x[: len(x) // unit_of(self.case.batch) * self.part.rows]
        return x[:, :length] if length and x.ndim > 1 else x

    def _arranged(self, x, arrangement):
        chosen, _, kept = arrangement
        rows, sequence = self.part.rows, self.part.sequence
        if x.ndim < 1 + sequence:
            return x
        x = jnp.moveaxis(x, 1, 0) if sequence else x.reshape(rows, len(x) // rows, *x.shape[1:])
        x = x[chosen]
        if not jnp.issubdtype(x.dtype, jax.dtypes.extended):
            x = jnp.where(kept.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))
        return jnp.moveaxis(x, 0, 1) if sequence else x.reshape(-1, *x.shape[2:])

    def _places(self, batch, places):
        """The row numbers, and places in the sequence, that `marks.index` answers with."""
        if self.part.sequence:
            return numbers(batch, places)
        rows = (x.reshape(self.part.rows, -1)[places].reshape(-1) for x in numbers(batch).values())
        return {str(len(x)): x for x in rows}


def compiled(case: Case, part: Part) -> Trials:
    """The program of a part, in float32; in the loss's own dtypes where it takes no others."""
    try:
        return Trials(case, part)
    except Exception:
        return Trials(case, part, widened=False)


def _stacked(arrangements, size):
    """(the number of arrangements, their three fields, each padded to [MOST, size])."""
    blank = Arrangement(np.zeros(size, np.int32), np.zeros(size, np.int32), np.zeros(size, bool))
    padded = [*arrangements, *[blank] * (MOST - len(arrangements))]
    fields = (np.stack(field) for field in zip(*padded, strict=True))
    return np.int32(len(arrangements)), Arrangement(*fields)


def _is_real(x):
    """Whether a parameter, or its gradient, is of numbers that have a gradient."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _apart(tree):
    """(the arrays of a tree, the function from these to the tree, whose other leaves stay)."""
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(leaves) if hasattr(x, "dtype")]

    def joined(arrays):
        own = dict(zip(places, arrays, strict=True))
        return structure.unflatten([own.get(i, x) for i, x in enumerate(leaves)])

    return [leaves[i] for i in places], joined
