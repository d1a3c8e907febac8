"""A loss, traced once for one part: what its outputs follow from, and its count alone."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.interpreters import partial_eval

from shardwise import marks
from shardwise.objective import auxiliary, microbatches
from shardwise.objective.examining import Program, check_draws, examine
from shardwise.objective.following import LOCAL
from shardwise.objective.means import Mean, normal
from shardwise.objective.sums import check_aux

GROUPS = ("params", "batch", "rows", "args", "key")


@dataclasses.dataclass(frozen=True)
class Traced:
    """The traced loss: a function of groups of arrays, and what `trace` found in it.

    Calling it runs what was traced: `(Mean, aux)` of `(params, batch, rows, args, key)`.
    """

    closed: ClosedJaxpr
    structure: Any
    count_follows: bool = False  # whether the count may depend on the parameters
    by_place: bool = True  # whether all draws from the key depend on marks.index
    linear: bool = True  # whether no rule of the loss's own may turn a zero cotangent into others

    def __call__(self, *groups: Any) -> tuple[Mean, Any]:
        out = jaxpr_as_fun(self.closed)(*jax.tree.leaves(groups))
        return jax.tree.unflatten(self.structure, out)

    @functools.cached_property
    def _count(self):
        """The program of the count alone, and which inputs it reads."""
        jaxpr = self.closed.jaxpr
        wanted = [i == 1 for i in range(len(jaxpr.outvars))]
        needed, chosen = {jaxpr.outvars[1]}, []
        for eqn in reversed(jaxpr.eqns):  # here, since DCE keeps all effects: prints come once
            if not needed.isdisjoint(eqn.outvars):
                chosen.append(eqn)
                needed.update(v for v in eqn.invars if not isinstance(v, Literal))
        # The numbers of equations dropped belong to no effect that remains.
        jaxpr, used = partial_eval.dce_jaxpr(jaxpr.replace(eqns=chosen[::-1]), wanted)
        return ClosedJaxpr(jaxpr, self.closed.consts), used

    def count(self, params: Any, batch: Any, rows: Any, args: Any, key: Any) -> jax.Array:
        """The count of one part, from the batch alone; 1 for a loss that is a mean over rows."""
        if not self.has_count:
            return jnp.float32(1)
        if isinstance(self.closed.jaxpr.outvars[1], Literal):
            return jnp.asarray(self.closed.jaxpr.outvars[1].val)
        closed, used = self._count
        leaves = zip(jax.tree.leaves((params, batch, rows, args, key)), used, strict=True)
        return jaxpr_as_fun(closed)(*(x for x, wanted in leaves if wanted))[0]

    @property
    def has_count(self) -> bool:
        """Whether the loss returned a `Mean`."""
        mean, _ = jax.tree.unflatten(self.structure, range(self.structure.num_leaves))
        return mean.count is not None

    @property
    def dtype(self) -> Any:
        """That of the mean, as one device has it."""
        total, *count = self.closed.out_avals[: 1 + self.has_count]
        return jnp.result_type(total.dtype, *(c.dtype for c in count)) if count else total.dtype


def trace(
    loss: Callable,
    params: Any,
    batch: Any,
    rows: Any,
    args: tuple = (),
    key: Any = None,
    has_aux: bool = False,
    aux: Any = "sum",
) -> Traced:
    """`loss(params, batch, *args)`, and `key=` where one is given, traced for one part of several.

    `rows` are the part's row numbers (`numbers` of the whole batch, divided as it is). All arrays
    may be abstract. `aux` says how the auxiliary outputs of all parts become one. Of what cannot be
    right when rows are divided this finds how sums are formed; `check` finds the rest, by numbers.

    Raises:
      TypeError: outputs that are no loss, an auxiliary output that is no array, or a PRNG key among
        `args`.
      ValueError: a mean over something that the batch's values decide, a term of the total that
        does not depend on the batch, a scalar that is a sum over rows, a total or count that is
        none; an auxiliary output that is a mean and would be added up, or has rows and would not be
        concatenated; draws of which some go by place and others by shape.
    """
    _check_args(args)
    bare = normal(loss, has_aux)

    def part(params, batch, rows, args, key):
        with marks.bind(index=microbatches.meaning(rows), local=_named):
            out = bare(params, batch, *args, **({} if key is None else {"key": key}))
        auxiliary.check(out[1])
        return out

    groups = (params, batch, rows, args, key)
    # A function of its own for each trace: the trace of one seen before may be cached.
    closed, shapes = jax.make_jaxpr(lambda *groups: part(*groups), return_shape=True)(*groups)
    labels = [label for name, tree in zip(GROUPS, groups, strict=True) for label in _of(name, tree)]

    traced = Traced(closed, jax.tree.structure(shapes))
    places = rows.get(microbatches.SEQUENCE) if isinstance(rows, dict) else None
    cut = None if places is None else places.shape[1]
    if cut is not None and not traced.has_count:
        raise ValueError(
            "the sequence is cut, and the loss is one scalar: a mean over rows, of what each makes "
            "of its whole sequence. Return objective.Mean(total, count), two sums over tokens."
        )
    program = Program.read(closed, labels)

    def doubled():
        more = jax.eval_shape(_twice, (batch, rows))
        again = jax.make_jaxpr(lambda *groups: part(*groups))(params, *more, args, key)
        return Program.read(again, labels)

    facts = examine(program, traced.has_count, doubled, cut)
    if outputs := auxiliary.outputs(aux, shapes[1], 1 + traced.has_count):
        check_aux(program, doubled, outputs)
    return dataclasses.replace(traced, **facts)


def draws_by_place(
    loss: Callable, params: Any, batch: Any, args: tuple, key: Any, has_aux: bool = False
) -> bool:
    """Whether all that a loss draws from its key, if it is given one, depends on `marks.index`.

    Raises:
      ValueError: some goes by place, and some by shape.
    """
    if key is None:
        return True
    bare = normal(loss, has_aux)

    def part(params, batch, rows, key):
        with marks.bind(index=microbatches.meaning(rows)):
            return bare(params, batch, *args, key=key)

    groups = dict(params=params, batch=batch, rows=microbatches.numbers(batch), key=key)
    closed = jax.make_jaxpr(lambda *groups: part(*groups))(*groups.values())
    labels = [label for name, tree in groups.items() for label in _of(name, tree)]
    return check_draws(Program.read(closed, labels).draws)


def _of(name, tree):
    """The labels of a group's leaves; the places in a sequence that is cut have one more."""
    for keys, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
        places = name == "rows" and keys[-1].key == microbatches.SEQUENCE
        yield frozenset({name, microbatches.SEQUENCE} if places else {name})


def _twice(tree):
    return jax.tree.map(lambda x: jnp.concatenate([x, x]) if jnp.ndim(x) else x, tree)


def _named(x):
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, LOCAL), x)


def _check_args(args: Any) -> None:
    for keys, x in jax.tree_util.tree_flatten_with_path(args)[0]:
        if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"a PRNG key among the loss's further arguments (args{jax.tree_util.keystr(keys)}):"
                f" hand it over by key=, so that each part of the batch draws its own numbers."
            )
