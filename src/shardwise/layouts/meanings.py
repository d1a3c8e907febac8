"""What marks mean under a layout."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import context, experts
from shardwise.layouts.layout import Layout

LOGITS, EXPERTS = "logits", "expert_inputs"


@dataclasses.dataclass(frozen=True)
class Pins:
    """The meaning of `marks.constrain`: [rows, sequence, features] is cut over these mesh axes.

    `features` are those of the activation named "logits" alone, the vocabulary; "expert_inputs"
    [experts, tokens, features] are cut over `expert`. `between` cuts the
    sequence further where no product is. Of `rows` and `sequence`, what a shard_map around cuts by
    hand is left out.
    """

    mesh: Mesh
    by_hand: bool
    rows: tuple[str, ...]
    sequence: tuple[str, ...]
    features: tuple[str, ...]
    between: tuple[str, ...]
    expert: tuple[str, ...] = ()

    def __call__(self, x: jax.Array, name: str) -> jax.Array:
        """`x` pinned, if it has these three axes."""
        logits = name == LOGITS
        columns = self.sequence if logits else (*self.sequence, *self.between)
        axes = (self.rows, columns, self.features * logits)
        if name == EXPERTS:  # [experts, tokens, features]
            axes = (self.expert, (), ())
        entries = [entry or None for entry in axes]
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
        own = () if layout.by_hand else layout.expert
        given = rows, columns, layout.tensor, between, own
        found["constrain"] = Pins(layout.mesh, layout.by_hand, *given)
    if layout.context and layout.by_hand:
        found["attend"] = attention(layout)
    if layout.by_hand and layout.expert:
        form = {"gather": experts.gather}.get(layout.dispatch, experts.all_to_all)
        found["experts"] = form(layout.expert[0], sequence=_one(layout.context))
    elif layout.by_hand and layout.context:
        found["experts"] = experts.local(_one(layout.context))
    if layout.remat is not None:
        found["layer"] = Remat(layout.remat)
    return found


def attention(layout: Layout) -> Callable:
    """The form of attention by hand over the context axes."""
    forms = {"all_gather": context.all_gather, "ulysses": context.ulysses}
    return forms.get(layout.attention, context.ring)(_one(layout.context))


def order(layout: Layout) -> Callable | None:
    """The order in which the sequence is cut; None for its own."""
    return {"striped": context.striped, "zigzag": context.zigzag}.get(layout.attention)


def _one(axes):
    """One axis by its name, several as a tuple, None for none."""
    return axes[0] if len(axes) == 1 else axes or None
