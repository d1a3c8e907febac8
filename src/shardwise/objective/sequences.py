"""Whether tokens see each other in marks alone, where a sequence is cut: by two traces of a loss.

One is for a part's own length and one for twice that; an axis that is twice as long in the second
is the sequence's. What slices it, orders it, counts along it or compares tokens with tokens would
be another function of a part than of the whole. What these traces cannot tell is an indexing by
numbers that the batch brings.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal

from shardwise import marks
from shardwise.objective import microbatches
from shardwise.objective.tokens import NONE, PARTIAL, TOTAL, Tokens, refuse


def check(bare: Callable, params: Any, batch: Any, rows: Any, args: tuple, key: Any) -> None:
    """Raise ValueError where a loss of `(params, batch, rows, args, key)`, of one part of the
    sequence, is no sum over tokens, or lets tokens see each other outside marks.
    """

    def traced(batch, rows):
        def part(params, batch, rows, args, key):
            index = microbatches.meaning(rows)
            with marks.bind(index=index, attend=_query, experts=_unchanged, total=_named):
                return bare(params, batch, *args, **({} if key is None else {"key": key}))[0]

        return jax.make_jaxpr(lambda *given: part(*given))(params, batch, rows, args, key)

    one, two = traced(batch, rows), traced(*jax.eval_shape(_longer, (batch, rows)))
    flags = Tokens().run(one.jaxpr, two.jaxpr, [NONE] * len(one.jaxpr.invars))
    if PARTIAL not in flags[0]:
        refuse("the total is no sum over tokens: each part of the sequence would add all of it")
    counts = [_number(closed, closed.jaxpr.outvars[1]) for closed in (one, two)]
    if PARTIAL not in flags[1] and (None in counts or counts[1] != 2 * counts[0]):
        refuse(
            "the count is no number of tokens, such as that of rows: each part of the sequence "
            "would add all of it. Count what the total adds up"
        )


def _query(q, k, v, places, mask=None):
    return q


def _unchanged(x, chosen, *rest):
    return x, jnp.ones(chosen.shape, bool)


def _named(x, axes):
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, TOTAL), x)


def _number(closed, v):
    """A number that stands in a program; None for one that it computes."""
    if isinstance(v, Literal):
        return float(v.val)
    known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    return float(known[v]) if v in known and jnp.ndim(known[v]) == 0 else None


def _longer(tree):
    return jax.tree.map(lambda x: jnp.concatenate([x, x], 1) if jnp.ndim(x) > 1 else x, tree)
