"""Random draws of a loss: those by place (`marks.index`) are alike in the whole and in parts."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from shardwise import jaxprs, marks
from shardwise.objective.means import normal
from shardwise.objective.microbatches import SEQUENCE, meaning, numbers


def by_place(closed: ClosedJaxpr, groups: dict[str, Any]) -> bool:
    """Whether all of a traced loss's draws from its key go by place (`marks.index`).

    `groups` are the loss's arguments: "rows" the row numbers, "key" the key, "args" the further
    arguments.

    Raises:
      TypeError: draws from a key among the further arguments.
      ValueError: some go by place and others by shape; or draws of a part of the sequence do not go
        by place in it.
    """
    follower, rows = _Draws(), groups["rows"]
    labels = [label for name, tree in groups.items() for label in _of(name, tree)]
    follower.run(closed.jaxpr, labels)
    places = rows.get(SEQUENCE) if isinstance(rows, dict) else None
    return _checked(follower.found, None if places is None else places.shape[1])


def of_loss(
    loss: Callable, params: Any, batch: Any, args: tuple, key: Any, has_aux: bool = False
) -> bool:
    """`by_place` of a loss of `(params, batch, *args)`, and `key=` where one is given."""
    if key is None:
        return True
    bare = normal(loss, has_aux)

    def part(params, batch, rows, key):
        with marks.bind(index=meaning(rows)):
            return bare(params, batch, *args, key=key)

    groups = dict(params=params, batch=batch, rows=numbers(batch), key=key)
    return by_place(jax.make_jaxpr(lambda *given: part(*given))(*groups.values()), groups)


class _Draws(jaxprs.Follower):
    """A Follower that collects the labels and the shape of each draw of random bits."""

    def __init__(self):
        self.found = []

    def through(self, eqn, given):
        out = super().through(eqn, given)
        if self.settled and eqn.primitive.name == "random_bits":
            self.found.append((out[0], eqn.params.get("shape")))
        return out


def _of(name, tree):
    """The labels of each leaf of a group; the places in a sequence that is cut have one more."""
    for keys, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
        places = name == "rows" and keys[-1].key == SEQUENCE
        yield frozenset({name, SEQUENCE} if places else {name})


def _checked(found, cut):
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
            f"each part. Draw all of them by place, as model.drop does, or none."
        )
    for labels, shape in from_key if cut is not None else ():
        if "rows" in labels and SEQUENCE not in labels and cut in (shape or ()):
            raise ValueError(
                f"the loss draws random numbers of shape {shape}, and the sequence is cut, {cut} "
                f"entries to a part: each part would draw the same for its own. Draw by place, "
                f"from marks.index('sequence', size) too, as model.drop does."
            )
    return not by_shape
