"""Where each stage's arrays live, and the way there and back."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import rules
from shardwise import tree as trees


class Piece(NamedTuple):
    """Where one array lives: `homes` has (stage, rows), rows (a, b) or None for all of it.

    An array in rows has each row on one stage; one that several stages read is whole on each.
    """

    path: str
    shape: tuple
    dtype: Any
    homes: tuple
    spec: P

    @property
    def in_rows(self):
        """Whether it is cut among stages."""
        return self.homes[0][1] is not None

    @property
    def owners(self):
        """The homes that count it: for an array that is whole on several stages, the first."""
        return self.homes if self.in_rows else self.homes[:1]

    def rows(self, stage):
        return dict(self.homes)[stage]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pipelined:
    """A pytree whose arrays live on their stages' devices: `tree[path][stage]` is an array.

    `layout` has a `Piece` for each array of the original tree, `structure` is that tree's, and
    `meshes[stage]` the devices of a stage.
    """

    tree: dict
    layout: tuple = dataclasses.field(metadata=dict(static=True))
    structure: Any = dataclasses.field(metadata=dict(static=True))
    meshes: tuple = dataclasses.field(metadata=dict(static=True))

    def abstract(self):
        """The original tree, of shapes and dtypes."""
        leaves = [jax.ShapeDtypeStruct(piece.shape, piece.dtype) for piece in self.layout]
        return jax.tree.unflatten(self.structure, leaves)


def split(tree, like, batch=None, *args, rule=P()):
    """`tree` as `Pipelined`: each array, or its rows, on the devices of the stages that read it.

    `like` is what `value_and_grad` returned, and `batch` (with `args`) what it will be called
    with, of which only shapes count; or `like` is a `Pipelined` of parameters, and `tree` an
    optimizer's state for them. `rule`, any rule of `shardwise.rules`, lays the arrays out among
    the devices of one stage, by their whole shapes.

    Raises:
      ValueError: two arrays of one path, an optimizer's array that belongs to no parameter and is
        no scalar, or what the rule raises.
    """
    if isinstance(like, Pipelined):
        layout, meshes = state_layout(tree, like), like.meshes
    else:
        homes, meshes = like.homes(tree, batch, *args)
        layout = _layout(tree, homes, rule, meshes)
    # Memory of its own, since an update takes over that of the state before.
    return place(jax.tree.leaves(tree), layout, jax.tree.structure(tree), meshes, own=True)


def merge(pipelined):
    """The original tree, of whole NumPy arrays (and typed keys), bitwise what the stages hold."""
    leaves = []
    for piece in pipelined.layout:
        parts = [_on_host(pipelined.tree[piece.path][stage]) for stage in _in_order(piece)]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if jnp.issubdtype(piece.dtype, jax.dtypes.prng_key):
            impl = jax.random.key_impl(pipelined.tree[piece.path][_in_order(piece)[0]])
            whole = jax.random.wrap_key_data(whole, impl=impl)
        leaves.append(whole)
    return jax.tree.unflatten(pipelined.structure, leaves)


def _in_order(piece):
    """The stages that together have all of it, in the order of their rows."""
    homes = sorted(piece.homes, key=lambda home: home[1]) if piece.in_rows else piece.homes[:1]
    return [stage for stage, _ in homes]


def _on_host(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def place(leaves, layout, structure, meshes, own=False):
    """`Pipelined` of whole arrays; with `own`, none shares its memory with what it came from."""
    tree = {}
    for x, piece in zip(leaves, layout, strict=True):
        parts = ((stage, x if rows is None else x[slice(*rows)]) for stage, rows in piece.homes)
        tree[piece.path] = {
            stage: jax.device_put(
                part, NamedSharding(meshes[stage], piece.spec), may_alias=False if own else None
            )
            for stage, part in parts
        }
    return Pipelined(tree, tuple(layout), structure, tuple(meshes))


def stage_meshes(mesh, axis, device_of):
    """For each stage the devices of its place along `axis`, as a mesh with the same axes."""
    position = mesh.axis_names.index(axis)
    ranks = [np.take(mesh.devices, [i], axis=position) for i in range(mesh.shape[axis])]
    meshes = [Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types) for devices in ranks]
    return tuple(meshes[device] for device in device_of)


def state_layout(state: Any, params: Pipelined) -> tuple[Piece, ...]:
    """Pieces of an optimizer's state: what belongs to a parameter lives where that does.

    Whatever has no parameter, or one element alone, is whole on every stage; of a scalar the first
    has it. Of an array in rows, what has its rows lies in rows too.
    """
    owners = trees.owners(state, params.abstract())
    found = zip(trees.leaves(state), owners, strict=True)
    return _distinct(_state_piece(path, x, owner, params) for (path, x), owner in found)


def _state_piece(path, x, owner, params):
    everywhere = tuple((stage, None) for stage in range(len(params.meshes)))
    piece = Piece(path, tuple(jnp.shape(x)), jnp.result_type(x), everywhere, P())
    if owner is None or math.prod(piece.shape) == 1:
        return piece if piece.shape else piece._replace(homes=everywhere[:1])
    parameter = params.layout[owner.index]
    homes = parameter.homes if parameter.homes == everywhere else parameter.owners
    if len(homes) > 1 and parameter.in_rows and (owner.axes or (None,))[0] != 0:
        raise ValueError(
            f"pipeline: of the optimizer's {path} of shape {piece.shape}, the parameter "
            f"{parameter.path} of shape {parameter.shape} lies in rows on {len(homes)} stages, "
            f"and has no such array. Keep that parameter as an array for each stage, or leave "
            f"it out of the transformation with optax.masked."
        )
    if not owner.axes or owner.axes[0] != 0:
        homes = tuple((stage, None) for stage, _ in homes)
    entries = [*parameter.spec, *[None] * (len(parameter.shape) - len(parameter.spec))]
    spec = P(*(None if i is None else entries[i] for i in owner.axes)) if owner.axes else P()
    spec = parameter.spec if piece.shape == parameter.shape else spec
    return piece._replace(homes=homes, spec=spec)


def _layout(tree, homes, rule, meshes):
    shardings = jax.tree.leaves(rules.shardings(rule, tree, meshes[0]))
    found = zip(rules.named_leaves(tree), homes, shardings, strict=True)
    return _distinct(
        Piece(path, tuple(jnp.shape(x)), jnp.result_type(x), home, sharding.spec)
        for (path, x), home, sharding in found
    )


def _distinct(layout):
    layout, seen = tuple(layout), set()
    for piece in layout:
        if piece.path in seen:
            raise ValueError(
                f"pipeline.split: two arrays have the path {piece.path!r}; rename one."
            )
        seen.add(piece.path)
    return layout
