"""A loss, traced once for one part: what its outputs and draws follow from, and its count alone."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval

from shardwise import jaxprs, marks
from shardwise.objective.means import Mean, normal
from shardwise.objective.parts import RETURNED, SEQUENCE, check_arrays, meaning
from shardwise.objective.reasons import refuse_scalar

DRAWS = {"random_bits", "random_gamma", "rng_bit_generator"}  # from a key, their first input


@dataclasses.dataclass(frozen=True)
class Traced:
    """The traced loss, a function of `(params, batch, rows, args, key)`; `shapes` it returns."""

    closed: ClosedJaxpr
    shapes: tuple[Mean, Any]
    by_place: bool  # whether all draws from the key depend on marks.index

    def __call__(self, *groups: Any) -> tuple[Mean, Any]:
        out = jaxpr_as_fun(self.closed)(*jax.tree.leaves(groups))
        return jax.tree.unflatten(jax.tree.structure(self.shapes), out)

    @functools.cached_property
    def _count(self):
        """(the program of the count alone, for each input whether the program reads it)."""
        jaxpr = self.closed.jaxpr
        wanted = [i == 1 for i in range(len(jaxpr.outvars))]
        # Chosen here, since DCE keeps all effects: prints come once.
        chosen, _ = jaxprs.needed(jaxpr.eqns, [jaxpr.outvars[1]], given=())
        # The numbers of equations dropped belong to no effect that remains.
        jaxpr, used = partial_eval.dce_jaxpr(jaxpr.replace(eqns=chosen), wanted)
        return ClosedJaxpr(jaxpr, self.closed.consts), used

    def count(self, params: Any, batch: Any, rows: Any, args: Any, key: Any) -> jax.Array:
        """The count of one part, from the batch alone; 1 for a loss that is a mean over rows."""
        if not self.has_count:
            return jnp.float32(1)
        closed, used = self._count
        leaves = zip(jax.tree.leaves((params, batch, rows, args, key)), used, strict=True)
        return jnp.asarray(jaxpr_as_fun(closed)(*(x for x, wanted in leaves if wanted))[0])

    def check_count(self, params: Any, who: str) -> None:
        """Raise where the loss's count may depend on parameters of the structure of `params`."""
        if self.has_count and any(self._count[1][: len(jax.tree.leaves(params))]):
            raise ValueError(
                f"{who}: the loss's count depends on the parameters, or its trace cannot tell "
                f"(within a custom_vjp or custom_jvp). With several microbatches, or blocks, the "
                f"count has to be known before the first backward pass: use one microbatch and no "
                f"exact=, or a count from the batch alone."
            )

    @property
    def has_count(self) -> bool:
        """Whether the loss returned a `Mean`."""
        return self.shapes[0].count is not None


def trace(loss: Callable, params, batch, rows, args=(), key=None, has_aux=False) -> Traced:
    """`loss(params, batch, *args)`, and `key=` where one is given, traced for one part of several.

    `rows` are the part's row numbers (of `numbers`, divided as the batch). Arrays may be abstract.

    Raises:
      TypeError: outputs that are no loss, aux that are no arrays, or draws from a key in `args`.
      ValueError: draws some by place and some by shape; one scalar, where the sequence is cut.
    """
    bare = normal(loss, has_aux)

    def part(params, batch, rows, args, key):
        with marks.bind(index=meaning(rows)):
            out = bare(params, batch, *args, key=key)
        check_arrays(out[1], "the loss's auxiliary outputs", RETURNED)
        return out

    groups = dict(params=params, batch=batch, rows=rows, args=args, key=key)
    closed, shapes = jax.make_jaxpr(part, return_shape=True)(*groups.values())
    draws = _Draws()
    draws.run(closed.jaxpr, [label for name, tree in groups.items() for label in _of(name, tree)])
    by_place = _by_place(draws.found, rows.get(SEQUENCE))
    if SEQUENCE in rows and shapes[0].count is None:
        refuse_scalar()
    return Traced(closed, shapes, by_place)


class _Draws(jaxprs.Follower):
    """A Follower that collects the labels and the shape of what is drawn from each key."""

    def __init__(self):
        self.found = []

    def through(self, eqn, given):
        if self.settled and eqn.primitive.name in DRAWS:
            drawn = eqn.outvars[0].aval.shape[eqn.invars[0].aval.ndim :]  # from one key of several
            self.found.append((given[0], eqn.params.get("shape", drawn)))
        return super().through(eqn, given)


def _of(name, tree):
    """The labels of each leaf of a group; the places in a sequence that is cut have one more."""
    for keys, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
        places = name == "rows" and keys[-1].key == SEQUENCE
        yield frozenset({name, SEQUENCE} if places else {name})


def _by_place(found, places):
    """Whether all draws from the key go by place; raises where no one key would do for all."""
    if any("args" in labels and "key" not in labels for labels, _ in found):
        raise TypeError(
            "the loss draws random numbers from a key among its further arguments, which would be "
            "the same in every part of the batch: hand the key over by key=."
        )
    from_key = [(labels, shape) for labels, shape in found if "key" in labels]
    by_shape = [shape for labels, shape in from_key if "rows" not in labels]
    if by_shape and len(by_shape) < len(from_key):
        raise ValueError(
            f"the loss draws some random numbers by place (marks.index) and others by the shape of "
            f"its part, {by_shape[0]}: the former want the batch's own key, the latter one for "
            f"each part. Draw all of them by place, as layers.drop does, or none."
        )
    for labels, shape in from_key if places is not None else ():
        if "rows" in labels and SEQUENCE not in labels and places.shape[1] in shape:
            raise ValueError(
                f"the loss draws random numbers of shape {shape}, and the sequence is cut, "
                f"{places.shape[1]} entries to a part: each part would draw the same for its own. "
                f"Draw by place, from marks.index('sequence', size) too, as layers.drop does."
            )
    return not by_shape
