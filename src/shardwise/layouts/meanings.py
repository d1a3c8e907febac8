"""What marks mean under a layout."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise.layouts.layout import Layout

LOGITS = "logits"


@dataclasses.dataclass(frozen=True)
class Pins:
    """The meaning of `marks.constrain`: [rows, sequence, features] is cut over these mesh axes.

    `features` are those of the activation named "logits" alone: the vocabulary. `between` cuts the
    sequence further where no product is. Of `rows` and `sequence`, what a shard_map around cuts by
    hand is left out.
    """

    mesh: Mesh
    by_hand: bool
    rows: tuple[str, ...]
    sequence: tuple[str, ...]
    features: tuple[str, ...]
    between: tuple[str, ...]

    def __call__(self, x: jax.Array, name: str) -> jax.Array:
        """`x` pinned, if it has these three axes."""
        logits = name == LOGITS
        columns = self.sequence if logits else (*self.sequence, *self.between)
        entries = [entry or None for entry in (self.rows, columns, self.features * logits)]
        if x.ndim != 3 or (self.by_hand and not any(entries) and not self.features):
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh(), P(*entries)))

    def _mesh(self):
        if self.by_hand and jax.__version_info__ >= (0, 8):
            return jax.sharding.get_abstract_mesh()  # that of the shard_map around
        return self.mesh


@dataclasses.dataclass(frozen=True)
class Remat:
    """The meaning of `marks.layer`: what it keeps for its backward pass, a policy says."""

    policy: Any

    def __call__(self, body: Callable) -> Callable:
        return jax.checkpoint(body, policy=self.policy)


def meanings(layout: Layout) -> Mapping[str, Callable]:
    """{mark: meaning} of the marks that the layout gives one, beside `use`."""
    rows, columns = (() if layout.by_hand else axes for axes in (layout.rows, layout.context))
    between = layout.tensor if layout.sequence else ()
    found: dict[str, Callable] = {}
    if layout.tensor or not layout.by_hand:
        found["constrain"] = Pins(
            layout.mesh, layout.by_hand, rows, columns, layout.tensor, between
        )
    if layout.context and layout.by_hand:
        found["attend"] = attention(layout)
    if layout.remat is not None:
        found["layer"] = Remat(layout.remat)
    return found


def attention(layout: Layout) -> Callable:
    """The form of attention by hand over the context axes."""
    from shardwise import context

    forms = {"all_gather": context.all_gather, "ulysses": context.ulysses}
    axes = layout.context
    return forms.get(layout.attention, context.ring)(axes[0] if len(axes) == 1 else axes)


def order(layout: Layout) -> Callable | None:
    """The order in which the sequence is cut; None for its own."""
    if layout.attention not in ("striped", "zigzag"):
        return None
    from shardwise import context

    return {"striped": context.striped, "zigzag": context.zigzag}.get(layout.attention)
