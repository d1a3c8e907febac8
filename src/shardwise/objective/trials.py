"""The program that an oracle runs: a loss's sums over rows that stand in other places, or alone.

All rows and parameters are arguments, and arrangements are handed over as numbers, so that one
compilation serves every turn. The loss stands in it twice, for two parts together and for one
alone; parameters are shaken once a turn, outside the loops.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import jaxprs, marks
from shardwise.objective import stand_ins
from shardwise.objective.means import normal, wide
from shardwise.objective.parts import SEQUENCE, meaning, outputs


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
    """The numbers of each arrangement, in float64: total and perhaps count; one number and the norm
    for each parameter's gradient, and for each auxiliary output that is added up.
    """

    sums: np.ndarray
    projections: np.ndarray
    norms: np.ndarray
    added: np.ndarray
    sizes: np.ndarray


@dataclasses.dataclass
class Trials:
    """A loss of `(params, batch, *args)`, compiled for `rows` of a batch and for half of them.

    Args:
      size: entries of two parts together: rows of the batch, or tokens.
      unit: the greatest number of rows that all arrays of the batch have a multiple of.
      sequence: whether parts are of the sequence, of which `length` tokens are taken.
      gradient: whether gradients are compared too; None where the loss has backward rules.
      mesh: where arrays are that are cut; None where all are on one device.
      widened: whether numbers are float32 at least.
      aux: how auxiliary outputs of parts become one; None where nobody reads them.
    """

    loss: Callable
    has_aux: bool
    rows: int
    unit: int
    length: int | None = None
    sequence: bool = False
    gradient: bool | None = False
    mesh: Mesh | None = None
    widened: bool = True
    aux: Any = None

    def __post_init__(self):
        self.pairs = False  # whether a matrix of pairs of rows is local
        self.local = False  # whether anything is
        self.outputs = {}  # {entries: {path of an auxiliary output: (its way, its shape)}}
        self.rounding = 0.0  # of the loss's total, relative to it

    @property
    def size(self) -> int:
        """The number of entries of two parts together."""
        return self.length if self.sequence else self.rows

    def compile(self, params: Any, batch: Any, args: tuple, key: Any) -> "Trials":
        """Trace and compile; afterwards `memory` is known, and the object can be called."""
        arrays, fixed = _apart((args, key))
        self.arguments = params, batch, arrays
        given = *self.arguments, *self._padded(Turn(), (), ())
        wanted, self.gradient = self.gradient, bool(self.gradient)
        traced = self._traced(fixed, given)
        if wanted is None and _has_rules(traced.jaxpr.jaxpr):
            self.gradient = True
            traced = self._traced(fixed, given)
        self.compiled = traced.lower().compile()
        return self

    def _traced(self, fixed, given):
        run = functools.partial(self._run, fixed)
        where = None if self.mesh is None else NamedSharding(self.mesh, P())
        return jax.jit(run, out_shardings=where, compiler_options=_quickly()).trace(*given)

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
        numbers = Turn(*(np.float32(x) for x in turn))
        return numbers, _stacked(together, self.size), _stacked(alone, self.size // 2)

    def _run(self, fixed, params, batch, arrays, turn, together, alone):
        args, key = _joined(fixed, arrays)
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
                return self._sums(params, batch, args, own, Arrangement(*arrangement), seen)

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

    def _sums(self, params, batch, args, own, arrangement, seen):
        share = len(arrangement.places) / self.size  # of a mean over rows: what a part is of it
        rows = self._numbers(batch, arrangement.places)
        rows_of = jax.tree.map(lambda x: self._arranged(x, arrangement), batch)
        bound_to: dict[str, Callable] = dict(
            total=stand_ins.filled, local=functools.partial(stand_ins.own, seen)
        )
        if self.sequence:
            bound_to |= dict(attend=stand_ins.attend, experts=stand_ins.to_no_expert)
        bare = normal(self.loss, self.has_aux)

        def sums(params):
            bound = marks.bind(index=meaning(rows), **bound_to)
            with bound, jax.default_matmul_precision("float32"):
                (total, count), extra = bare(params, rows_of, *args, **own)
            self.rounding = float(jnp.finfo(jnp.result_type(total)).eps)
            total = jnp.asarray(total).astype(wide(jnp.result_type(total)))
            found = [total] if count is None else [total, jnp.asarray(count).astype(jnp.float32)]
            weight = share if count is None else 1 / self.size
            leaves = outputs(self.aux, extra)
            told = {path: (way, jnp.shape(x)) for path, x, way in leaves}
            self.outputs[len(arrangement.places)] = told
            added = _told([x for _, x, way in leaves if way == "sum"])
            return total * weight, (jnp.stack(found), added)

        if not self.gradient:
            found, added = sums(params)[1]
            return Found(found, *_told([]), *added)
        grads, (found, added) = jax.grad(sums, has_aux=True, allow_int=True)(params)
        return Found(found, *_told([g for _, g in real(grads)]), *added)

    def _taken(self, x):
        """The rows and tokens of an array of the batch that take part."""
        x = jnp.asarray(x)
        if not x.ndim:
            return x
        x = x[: len(x) // self.unit * self.rows]
        return x[:, : self.length] if self.length and x.ndim > 1 else x

    def _arranged(self, x, arrangement):
        chosen, _, kept = arrangement
        if x.ndim < 1 + self.sequence:
            return x
        per = 1 if self.sequence else len(x) // self.rows
        x = jnp.moveaxis(x, 1, 0) if self.sequence else x.reshape(self.rows, per, *x.shape[1:])
        x = x[chosen]
        if not jnp.issubdtype(x.dtype, jax.dtypes.extended):
            x = jnp.where(kept.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))
        return jnp.moveaxis(x, 0, 1) if self.sequence else x.reshape(-1, *x.shape[2:])

    def _numbers(self, batch, places):
        """The row numbers, and places in the sequence, that `marks.index` answers with."""
        sizes = {len(x) for x in jax.tree.leaves(batch) if x.ndim}
        found = {}
        for size in sizes:
            rows = jnp.arange(size, dtype=jnp.int32)
            if not self.sequence:
                rows = rows.reshape(self.rows, -1)[places].reshape(-1)
            found[str(len(rows))] = rows
        if self.sequence:
            found[SEQUENCE] = jnp.broadcast_to(places, (min(sizes), len(places)))
        return found


# Of XLA's CPU compiler, for a program that runs a few times.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
MOST = 8  # arrangements in one call


def _stacked(arrangements, size):
    """(the number of arrangements, their three fields, each padded to [MOST, size])."""
    blank = Arrangement(np.zeros(size, np.int32), np.zeros(size, np.int32), np.zeros(size, bool))
    padded = [*arrangements, *[blank] * (MOST - len(arrangements))]
    fields = (np.stack(field) for field in zip(*padded, strict=True))
    return np.int32(len(arrangements)), Arrangement(*fields)


def _told(arrays):
    """(one number of each array, the norm of each array)."""
    told = [stand_ins.projected(x) for x in arrays]
    return tuple(jnp.stack([x[i] for x in told]) if told else jnp.zeros(0) for i in (0, 1))


def unit_of(batch: Any) -> int:
    """The greatest number that divides the rows of each array; 0 for a batch without rows."""
    return math.gcd(*(jnp.shape(x)[0] for x in jax.tree.leaves(batch) if jnp.ndim(x)), 0)


def length_of(batch: Any) -> int | None:
    """The length of the sequence: of axis 1, where arrays have one."""
    return next((jnp.shape(x)[1] for x in jax.tree.leaves(batch) if jnp.ndim(x) > 1), None)


def real(tree: Any) -> list:
    """(path, leaf) of each leaf that has a gradient."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(k, x) for k, x in leaves if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]


def _has_rules(jaxpr):
    """Whether the program has a backward rule of the loss's own (custom_vjp)."""
    return any(eqn.primitive.name.startswith("custom_vjp") for eqn in jaxprs.every(jaxpr))


def _quickly():
    return QUICK if jax.default_backend() == "cpu" else None


def _apart(tree):
    """(the arrays of a tree; its other leaves, which stay as they are, and its structure)."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
    is_array = [hasattr(x, "dtype") for x in leaves]
    arrays = [x for x, own in zip(leaves, is_array, strict=True) if own]
    rest = [None if own else x for x, own in zip(leaves, is_array, strict=True)]
    return arrays, (rest, is_array, structure)


def _joined(fixed, arrays):
    rest, is_array, structure = fixed
    given = iter(arrays)
    leaves = [next(given) if own else x for x, own in zip(rest, is_array, strict=True)]
    return jax.tree.unflatten(structure, leaves)
