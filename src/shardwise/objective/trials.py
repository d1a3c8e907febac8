"""The programs that an oracle runs: a loss's numbers over rows that stand elsewhere, or alone.

All rows and parameters are arguments, and so is where rows stand, so that two programs serve every
turn: for two parts together, and for one alone, which is compiled when it is asked for.
"""

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
from shardwise import tree as trees
from shardwise.objective import stand_ins
from shardwise.objective.means import normal, widened
from shardwise.objective.parts import meaning, numbers, outputs, unit_of
from shardwise.objective.tracing import trace

# Of XLA's CPU compiler, for programs that run a few times.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}


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
        """The number of entries of two parts together, rows of the batch or tokens."""
        return self.length if self.sequence else self.rows


class Turn(NamedTuple):
    """A perturbation of parameters: a factor, the seed of what shakes them, the size of noise."""

    factor: float = 1.0
    seed: int = 0
    noise: float = 0.0


class Found(NamedTuple):
    """The numbers of chosen entries, in float64, and the sizes of what they tell of.

    First total and perhaps count, of which they are the sizes; then one number for each parameter's
    gradient, and for each auxiliary output that is added up, whose sizes are norms.
    """

    values: np.ndarray
    sizes: np.ndarray


class Trials:
    """A case, traced for the rows of a part and for half of them.

    In float32 where `widened`: whether a loss divides is no matter of rounding.
    """

    def __init__(self, case: Case, part: Part, widened: bool = True):
        self.case, self.part, self.widened = case, part, widened
        self.local = {}  # {entries: the shapes of what is local}
        self.outputs = {}  # {entries: [(path of an auxiliary output, its way, its shape)]}
        self.names = []  # of the numbers, but for auxiliary outputs; the first `sums` are sums
        self.sums, self.rounding = 0, 0.0  # of the loss's total, relative to it
        self.shaken = None  # the last turn, and parameters shaken for it
        self.further, self.structure = jax.tree.flatten((case.args, case.key))
        arrays = [x if hasattr(x, "dtype") else None for x in self.further]  # others stay as given
        self.arguments = case.batch, arrays
        self.gradient = bool(case.gradient)
        whole = self._traced(part.size)
        names = (eqn.primitive.name for eqn in jaxprs.every(whole.jaxpr.jaxpr))
        if case.gradient is None and any(name.startswith("custom_vjp") for name in names):
            self.gradient = True
            whole = self._traced(part.size)
        half = self._traced(part.size // 2)
        self.together = whole.lower().compile()
        self.alone = functools.cache(lambda: half.lower().compile())

    def _traced(self, entries):
        where = None if self.case.mesh is None else NamedSharding(self.case.mesh, P())
        options = QUICK if jax.default_backend() == "cpu" else None
        run = functools.partial(self._numbers)  # as JAX caches what it traced of the method
        run = jax.jit(run, out_shardings=where, compiler_options=options)
        params, none = jax.tree.map(self._abstract, self.case.params), np.zeros(entries, np.int32)
        self.held = sum(_bytes(x) for x in jax.tree.leaves(params))
        return run.trace(params, *self.arguments, none, none, none > 0)

    def _abstract(self, x):
        """What `_shaken` makes of a parameter, of which nothing is made before memory is asked."""
        made = jax.eval_shape(lambda x: stand_ins.shaken(Turn(), x, self.widened), x)
        return made.update(sharding=stand_ins.sharding_of(x))

    def _shaken(self, turn):
        if self.shaken is None or self.shaken[0] != turn:
            self.shaken = None  # no two copies are held
            self.shaken = turn, stand_ins.shaken(turn, self.case.params, self.widened)
        return self.shaken[1]

    @property
    def memory(self) -> int:
        """The bytes that a device needs beside what it has, a copy of the parameters among them."""
        found = self.together.memory_analysis()
        if found is None:  # some backends cannot say
            return self.held
        return self.held + found.temp_size_in_bytes + found.output_size_in_bytes

    @property
    def pairs(self) -> bool:
        """Whether a matrix of pairs of rows is local."""
        return any(map(stand_ins.of_pairs, *self.local.values()))

    def __call__(self, turn: Turn, chosen=None, padding: Sequence[int] = ()) -> Found:
        """The numbers of the entries `chosen`: rows of the batch, or tokens of a sequence.

        As many as two parts have (by default all, in order) take the places 0, 1 and so on; of one
        part alone each takes its own. At the places of `padding` are zeros.
        """
        order = np.arange(self.part.size, dtype=np.int32)
        chosen = order if chosen is None else chosen
        together = len(chosen) == len(order)
        program, places = (self.together, order) if together else (self.alone(), chosen)
        given = chosen, places, ~np.isin(places, padding)
        found = jax.device_get(program(self._shaken(turn), *self.arguments, *given))
        return Found(*(np.asarray(x, np.float64) for x in found))

    def _numbers(self, params, batch, arrays, chosen, places, kept):
        case, entries = self.case, len(chosen)
        pairs = zip(arrays, self.further, strict=True)
        args, key = self.structure.unflatten([own if x is None else x for x, own in pairs])
        if self.widened:
            batch, args = widened((batch, args))
        batch = jax.tree.map(self._taken, batch)
        seen = self.local[entries] = []

        def local(x):
            seen.extend(map(jnp.shape, jax.tree.leaves(x)))
            return stand_ins.filled(x)

        rows_of = jax.tree.map(lambda x: self._arranged(x, chosen, kept), batch)
        bound_to = dict(total=stand_ins.filled, local=local)
        if self.part.sequence:
            rows = numbers(batch, places)
            bound_to |= dict(attend=stand_ins.attend, experts=stand_ins.to_no_expert)
        else:
            rows = jax.tree.map(lambda x: self._arranged(x, places), numbers(batch))
        bare = normal(case.loss, case.has_aux)

        def of(params):
            bound = marks.bind(index=meaning(rows), **bound_to)
            with bound, jax.default_matmul_precision("float32"):
                (total, count), extra = bare(params, rows_of, *args, key=key)
            self.rounding = float(jnp.finfo(jnp.result_type(total)).eps)
            total = widened(jnp.asarray(total))
            sums = [total] if count is None else [total, jnp.asarray(count).astype(jnp.float32)]
            self.names, self.sums = ["total", "count"][: len(sums)], len(sums)
            leaves = outputs(case.aux, extra)
            self.outputs[entries] = [(path, way, jnp.shape(x)) for path, x, way in leaves]
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

    def _arranged(self, x, chosen, kept=True):
        """The entries of an array that are chosen, zeros where they are not kept."""
        rows, sequence = self.part.rows, self.part.sequence
        if x.ndim < 1 + sequence:
            return x
        x = jnp.moveaxis(x, 1, 0) if sequence else x.reshape(rows, len(x) // rows, *x.shape[1:])
        x = x[chosen]
        if kept is not True and not jnp.issubdtype(x.dtype, jax.dtypes.extended):
            x = jnp.where(kept.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))
        return jnp.moveaxis(x, 0, 1) if sequence else x.reshape(-1, *x.shape[2:])


def compiled(case: Case, part: Part) -> Trials:
    """The program of a part, in float32; in the loss's own dtypes where it takes no others."""
    try:
        return Trials(case, part)
    except Exception:
        return Trials(case, part, widened=False)


def _bytes(x):
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize


def _is_real(x):
    """Whether a parameter, or its gradient, is of numbers that have a gradient."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
