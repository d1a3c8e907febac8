"""Meanings of marks under a layout."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import context, experts, marks, tensor
from shardwise import mesh as meshes
from shardwise.layouts.layout import Layout
from shardwise.mesh import entry_of
from shardwise.objective.parts import check_cut


@dataclasses.dataclass(frozen=True)
class Pins:
    """The meaning of `marks.constrain`: activations laid out by name.

    A name that `specs` lacks is that of an activation [rows, sequence, features], laid out as
    `others`; one of other axes is left alone.
    """

    mesh: Mesh
    by_hand: bool
    specs: tuple[tuple[str, P], ...]
    others: P

    def __call__(self, x: jax.Array, name: str) -> jax.Array:
        """`x` pinned, if there is a spec for it; ValueError where that does not divide it."""
        spec = dict(self.specs).get(name, self.others if x.ndim == 3 else None)
        if spec is None:
            return x
        if x.ndim == 3:
            axes, length = jax.tree.leaves(list(spec)[1:2]), x.shape[1]
            parts, where = meshes.parts(self.mesh, axes), f"over {axes}, at {name!r}"
            # A compiler would pad it in silence.
            check_cut("layouts", f"a sequence of {length}", length, parts, where)
        mesh = meshes.within(self.mesh) if self.by_hand else self.mesh
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def pins(layout: Layout) -> Pins:
    """The `Pins` of a layout; what a shard_map around the loss cuts by hand is left out."""
    hand = layout.by_hand
    cut = ((), (), ()) if hand else (layout.rows, layout.context, layout.expert)
    axis, rows, columns, expert = (axes or None for axes in (layout.tensor, *cut))
    specs = tensor.activations(axis, rows, columns, layout.sequence)
    specs |= dict.fromkeys(("attended", "mlp_hidden"), P(rows, columns, axis))  # between products
    specs["expert_inputs"] = P(expert)  # [experts, tokens, features]
    inside = hand or bool(layout.stage)  # of a shard_map
    return Pins(layout.auto, inside, tuple(sorted(specs.items())), specs["mlp_output"])


ENTERS = "layer_input"
_ENTERING_TO_HOST = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[ENTERS],
    offload_src="device",
    offload_dst="pinned_host",
)


def offload(primitive: Any, *given: Any, **params: Any) -> Any:
    """A policy for `Layout(remat=layouts.offload)`, which JAX calls.

    What enters layers waits on the host, and all else is computed again.
    """
    return _ENTERING_TO_HOST(primitive, *given, **params)


@dataclasses.dataclass(frozen=True)
class Remat:
    """The meaning of `marks.layer`: what it keeps for its backward pass, a policy says.

    What enters a layer, its first argument, has the name `ENTERS`. Without a policy by names it is
    kept where it is, on the device. `staged`: forward and backward passes are two programs.
    """

    policy: Any
    staged: bool = False

    def __call__(self, body: Callable) -> Callable:
        def named(x, *rest, **more):
            return body(checkpoint_name(x, ENTERS), *rest, **more)

        return jax.checkpoint(named, policy=self._here if self.staged else self.policy)

    def _here(self, *given, **params):
        found = self.policy(*given, **params)
        if hasattr(found, "dst"):  # neither "save" nor "recompute"
            raise ValueError(
                "layouts: remat= offloads to the host, and with stages a forward and a backward "
                "pass are two programs, between which nothing waits there. Take a policy that "
                "saves, such as jax.checkpoint_policies.nothing_saveable, or no stages."
            )
        return found


def meanings(layout: Layout) -> Mapping[str, Callable]:
    """{mark: meaning} of the marks that the layout gives one, beside `use`."""
    found: dict[str, Callable] = {}
    if layout.remat is not None:
        found["layer"] = Remat(layout.remat, bool(layout.stage) and not layout.exact)
    if layout.exact:  # a block is a program of one device, which has whole rows
        return found | ({"attend": layout.kernel} if layout.kernel else {})
    if layout.tensor or not layout.by_hand:
        found["constrain"] = pins(layout)
    if layout.context and layout.by_hand:
        found["attend"] = attention(layout)
    elif layout.kernel:
        found["attend"] = _kernel(layout)
    if layout.by_hand and layout.expert:
        form = experts.FORMS.get(layout.dispatch, layout.dispatch)
        found["experts"] = form(layout.expert[0], sequence=entry_of(layout.context))
    elif layout.by_hand and layout.context:
        found["experts"] = experts.Exchange("local", None, entry_of(layout.context))
    return found


def marked(layout: Layout, loss: Callable) -> Callable:
    """The loss with the layout's meanings of marks, of weights in the dtype of use."""

    def cast(x):
        floating = layout.dtype is not None and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(layout.dtype) if floating else x

    def of_cast(params, *args, **options):
        with marks.bind(**meanings(layout)):
            return loss(jax.tree.map(cast, params), *args, **options)

    return of_cast


def attention(layout: Layout) -> Callable:
    """The form of attention by hand over the context axes."""
    form, _ = context.FORMS.get(layout.attention, (layout.attention, None))
    given = {"local": _kernel(layout)} if layout.kernel else {}
    if layout.stage and form is context.ring:
        given["apart"] = True
    return form(entry_of(layout.context), **given)


def _kernel(layout):
    """The layout's kernel, in a shard_map over rows and heads where these are the compiler's."""
    rows = () if layout.by_hand else layout.rows
    if not rows and not layout.tensor:
        return layout.kernel
    return context.within(layout.auto, (), layout.kernel, rows, layout.tensor)


def order(layout: Layout) -> Callable | None:
    """The order in which the sequence is cut; None for its own."""
    return context.FORMS.get(layout.attention, (None, None))[1]
