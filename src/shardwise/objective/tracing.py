"""A loss, traced once for one part: what its outputs follow from, and its count alone."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.interpreters import partial_eval

from shardwise import marks
from shardwise.objective import microbatches
from shardwise.objective.following import Step, every, label_of, steps
from shardwise.objective.means import Mean, normal

GROUPS = ("params", "batch", "rows", "args", "key")
BATCH = frozenset({"batch", "rows"})
# Of one number these make a number that is linear in it: a sum over rows stays one.
LINEAR = {"neg", "convert_element_type", "reshape", "squeeze", "reduce_sum", "copy", "name"}
INVERTING = {"div", "rsqrt", "integer_pow", "pow"}


@dataclasses.dataclass(frozen=True)
class Traced:
    """The traced loss: a function of groups of arrays, and what `trace` found in it.

    Calling it runs what was traced: `(Mean, aux)` of `(params, batch, rows, args, key)`.
    """

    closed: ClosedJaxpr
    structure: Any
    sizes: tuple[int, ...]
    count_follows: bool = False  # whether the count may depend on the parameters
    by_place: bool = True  # whether all draws from the key depend on marks.index

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
) -> Traced:
    """`loss(params, batch, *args)`, and `key=` where one is given, traced for one part of several.

    `rows` are the part's row numbers (`numbers` of the whole batch, divided as it is). All arrays
    may be abstract. What cannot be right when rows are divided is an error here, before
    anything runs.

    Raises:
      TypeError: outputs that are no loss, or a PRNG key among `args`.
      ValueError: a mean over something that the batch's values decide, a term of the total that
        does not depend on the batch, or draws of which some go by place and others by shape.
    """
    _check_args(args)
    bare = normal(loss, has_aux)

    def part(params, batch, rows, args, key):
        with marks.bind(index=microbatches.meaning(rows)):
            return bare(params, batch, *args, **({} if key is None else {"key": key}))

    groups = (params, batch, rows, args, key)
    # A function of its own for each trace: the trace of one seen before may be cached.
    closed, shapes = jax.make_jaxpr(lambda *groups: part(*groups), return_shape=True)(*groups)
    sizes = tuple(len(jax.tree.leaves(group)) for group in groups)
    traced, count_is_given = _examined(Traced(closed, jax.tree.structure(shapes), sizes))
    if count_is_given:
        double = jax.eval_shape(lambda *trees: _doubled(trees), batch, rows)
        again = jax.make_jaxpr(lambda *groups: part(*groups))(params, *double, args, key)
        _check_static_count(closed, again)
    return traced


def _doubled(trees):
    return jax.tree.map(lambda x: jnp.concatenate([x, x]) if jnp.ndim(x) else x, trees)


def _check_static_count(closed: ClosedJaxpr, doubled: ClosedJaxpr) -> None:
    """A count that is no value of the batch has to be the number of its rows, or so many each."""
    counts = []
    for program in (closed, doubled):
        found, outputs = steps(program.jaxpr)
        made_by = {v: step for step in found for v in step.outputs}
        counts.append(_static(outputs[1], made_by, program))
    if None in counts or counts[1] != 2 * counts[0]:
        raise ValueError(
            "the loss's count does not depend on the batch, and so would be added up once for each "
            "part. Return the number of what total adds up, counted in the batch that the loss is "
            "given: Mean(total, batch['mask'].sum()); or a scalar, a mean over rows."
        )


def _static(v: Any, made_by: dict[Any, Step], program: ClosedJaxpr) -> float | None:
    """A number that stands in the program, or None."""
    constants = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    while not isinstance(v, Literal):
        if v in constants:
            return float(constants[v])
        if v not in made_by or made_by[v].name not in LINEAR - {"neg"}:
            return None
        v = made_by[v].inputs[0]
    return float(v.val)


def _examined(traced: Traced) -> tuple[Traced, bool]:
    """The same with its findings, and whether the count follows from no value of the batch."""
    jaxpr, draws = traced.closed.jaxpr, []
    labels = [frozenset({g}) for g, n in zip(GROUPS, traced.sizes, strict=True) for _ in range(n)]

    def visit(step, given):
        if step.name == "random_bits":
            draws.append((frozenset().union(*given), step.params.get("shape")))

    steps, outputs, env = every(jaxpr, labels, visit)
    made_by = {v: step for step in steps for v in step.outputs}
    _check_quotients(outputs[0], made_by, env)
    if traced.has_count:
        _check_terms(outputs[0], made_by, env)
    by_place = _check_draws(draws)
    behind = label_of(env, outputs[1]) if traced.has_count else BATCH
    found = dataclasses.replace(traced, count_follows="params" in behind, by_place=by_place)
    return found, not behind & BATCH


def _check_quotients(total: Any, made_by: dict[Any, Step], env: dict) -> None:
    """A number divided by what the batch's values add up to is no sum, and no mean, over rows."""
    for step in _numbers_behind(total, made_by):
        if step.name not in INVERTING or (step.name == "integer_pow" and step.params["y"] > 0):
            continue
        below = step.inputs[1 if step.name == "div" else 0]
        if label_of(env, below) & BATCH and _rank(below) == 0:
            raise ValueError(
                "the loss divides by a number that it computes from the batch's values, such as "
                "the number of tokens that a mask leaves. Each part of the batch would divide by "
                "its own, and the mean of these is not the mean of all: return "
                "objective.Mean(total, count), undivided."
            )


def _check_terms(total: Any, made_by: dict[Any, Step], env: dict) -> None:
    """A term that does not depend on the batch would be counted once for each part."""
    pending = [total]
    while pending:
        v = pending.pop()
        if not label_of(env, v) & BATCH:
            if not _is_zero(v, made_by):
                raise ValueError(
                    "a term of the loss's total does not depend on the batch, such as a penalty on "
                    "weights: it would be added once for each part. Multiply it by the count, "
                    "Mean(total + count * penalty, count), which adds it to the mean once; return "
                    "a scalar, a mean over rows; or leave weight decay to the optimizer."
                )
            continue
        step = made_by.get(v)
        if step is None or any(_rank(x) for x in step.inputs):
            continue
        if step.name in LINEAR or step.name in ("add", "sub", "add_any"):
            pending += step.inputs
        elif step.name == "mul":
            dependent = [x for x in step.inputs if label_of(env, x) & BATCH]
            pending += dependent if len(dependent) == 1 else []
        elif step.name == "div" and not label_of(env, step.inputs[1]) & BATCH:
            pending.append(step.inputs[0])


def _check_draws(draws: list) -> bool:
    """Whether all draws from the key go by place."""
    if any("args" in labels and "key" not in labels for labels, _ in draws):
        raise TypeError(
            "the loss draws random numbers from a key among its further arguments, which would be "
            "the same in every part of the batch: hand the key over by key=."
        )
    from_key = [(labels, shape) for labels, shape in draws if "key" in labels]
    by_shape = [shape for labels, shape in from_key if "rows" not in labels]
    if by_shape and len(by_shape) < len(from_key):
        raise ValueError(
            f"the loss draws some random numbers by place (marks.index) and others by the shape of "
            f"its part, {by_shape[0]}: the former want the batch's own key, the latter one for "
            f"each part. Draw all of them by place, as model.drop does, or none."
        )
    return not by_shape


def _check_args(args: Any) -> None:
    for keys, x in jax.tree_util.tree_flatten_with_path(args)[0]:
        if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"a PRNG key among the loss's further arguments (args{jax.tree_util.keystr(keys)}):"
                f" hand it over by key=, so that each part of the batch draws its own numbers."
            )


def _numbers_behind(v: Any, made_by: dict[Any, Step]) -> list[Step]:
    """The steps that made a scalar out of scalars, from it backwards."""
    found, pending, seen = [], [v], set()
    while pending:
        step = made_by.get(pending.pop())
        if step is None or id(step) in seen:
            continue
        seen.add(id(step))
        found.append(step)
        pending += [x for x in step.inputs if not isinstance(x, Literal) and _rank(x) == 0]
    return found


def _is_zero(v: Any, made_by: dict[Any, Step]) -> bool:
    """Whether this is the literal 0, perhaps converted."""
    while not isinstance(v, Literal):
        step = made_by.get(v)
        if step is None or step.name not in LINEAR | {"broadcast_in_dim"}:
            return False
        v = step.inputs[0]
    return jnp.ndim(v.val) == 0 and v.val == 0


def _rank(v: Any) -> int:
    return len(v.aval.shape)
