"""The placement of arrays on stages, and the way there and back."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import rules
from shardwise import tree as trees
from shardwise.mesh import outside


class Piece(NamedTuple):
    """The place of one array: `homes` has (stage, rows), rows (a, b) or None for all of it.

    An array in rows has each row on one stage; one that several stages read is whole on each.
    """

    path: str
    shape: tuple
    dtype: Any
    homes: tuple
    spec: P

    @property
    def in_rows(self):
        """Whether the array is cut among stages."""
        return self.homes[0][1] is not None

    @property
    def owners(self):
        """The homes that own the array; of one that is whole on several stages, the first alone."""
        return self.homes if self.in_rows else self.homes[:1]

    def rows(self, stage: int) -> tuple[int, int] | None:
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

    def abstract(self) -> Any:
        """The original tree, of shapes and dtypes."""
        leaves = [jax.ShapeDtypeStruct(piece.shape, piece.dtype) for piece in self.layout]
        return jax.tree.unflatten(self.structure, leaves)

    def to_checkpoint(self, abstract: bool) -> Any:
        """The original tree, of whole arrays on the host (`abstract`: of what they are)."""
        if not abstract:
            return whole(self)
        zeros = [np.broadcast_to(np.zeros((), p.dtype), p.shape) for p in self.layout]
        return jax.tree.unflatten(self.structure, zeros)

    def from_checkpoint(self, arrays: list[np.ndarray]) -> "Pipelined":
        """`Pipelined` in this layout, of whole arrays on the host, each laid out by itself."""
        return laid(arrays, self.layout, self.structure, self.meshes)


def place(
    tree: Any, like: Any, batch: Any = None, *args: Any, key: Any = None, rule: Any = P()
) -> Pipelined:
    """`tree` as `Pipelined`: each array, or its rows, on the devices of the stages that read it.

    `like` is what `value_and_grad` returned, and `batch` (with `args` and `key`) what it will be
    called with, of which only shapes count; or `like` is a `Pipelined` of parameters, and `tree`
    an optimizer's state for them. `rule`, any rule of `shardwise.rules`, lays the arrays out among
    the devices of one stage, by the shapes that live there: of an array in rows, rows that divide
    those of every stage.

    Raises:
      ValueError: two arrays of one path, an optimizer's array that belongs to no parameter and is
        no scalar, or what the rule raises.
    """
    if isinstance(like, Pipelined):
        layout, meshes = state_layout(tree, like), like.meshes
    else:
        layout, meshes = located(tree, like, batch, *args, key=key, rule=rule)
    with outside():
        return laid(jax.tree.leaves(tree), layout, jax.tree.structure(tree), meshes)


def located(
    tree: Any, like: Any, batch: Any, *args: Any, key: Any = None, rule: Any = P()
) -> tuple[tuple[Piece, ...], tuple[Mesh, ...]]:
    """(the pieces of a tree of arrays or shapes, the meshes of the stages); see `place`."""
    homes, meshes = like.homes(tree, batch, *args, key=key)
    with outside():
        return _layout(tree, homes, rule, meshes), meshes


def whole(pipelined: Pipelined) -> Any:
    """The original tree, of whole NumPy arrays (typed keys: of keys), bitwise what stages hold."""
    leaves = []
    for piece in pipelined.layout:
        parts = pipelined.tree[piece.path]
        ordered = sorted(piece.homes, key=lambda home: home[1]) if piece.in_rows else piece.owners
        leaves.append(_whole([parts[stage] for stage, _ in ordered]))
    return jax.tree.unflatten(pipelined.structure, leaves)


def _whole(parts):
    if jnp.issubdtype(parts[0].dtype, jax.dtypes.prng_key):
        data = [np.asarray(jax.random.key_data(part)) for part in parts]
        return jax.random.wrap_key_data(_joined(data), impl=jax.random.key_impl(parts[0]))
    return _joined([np.asarray(part) for part in parts])


def _joined(arrays):
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def laid(leaves, layout, structure, meshes):
    """`Pipelined` of whole arrays: copies, so that donating one leaves the others alone."""
    tree = {}
    for x, piece in zip(map(plain, leaves), layout, strict=True):
        parts = ((stage, x if rows is None else x[slice(*rows)]) for stage, rows in piece.homes)
        tree[piece.path] = {
            stage: jax.device_put(part, NamedSharding(meshes[stage], piece.spec), may_alias=False)
            for stage, part in parts
        }
    return Pipelined(tree, tuple(layout), structure, tuple(meshes))


def stage_meshes(mesh, axis, device_of):
    """The mesh of each stage: the devices of its place along `axis`, with the same axes."""
    if isinstance(mesh, AbstractMesh):  # all places are alike
        sizes = tuple((mesh.shape | {axis: 1}).values())
        types = (AxisType.Auto,) * len(sizes)
        return (AbstractMesh(sizes, mesh.axis_names, axis_types=types),) * len(device_of)
    position = mesh.axis_names.index(axis)
    ranks = [np.take(mesh.devices, [i], axis=position) for i in range(mesh.shape[axis])]
    # Auto, also of an Explicit mesh: within a rank the compiler lays out what no rule has.
    types = (AxisType.Auto,) * len(mesh.axis_names)
    meshes = [Mesh(devices, mesh.axis_names, axis_types=types) for devices in ranks]
    return tuple(meshes[device] for device in device_of)


def plain(x: Any) -> Any:
    """The array `x`, moved from Explicit axes of a mesh to Auto ones, where rows can be taken."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(x, jax.Array) or not isinstance(sharding, NamedSharding):
        return x
    mesh = sharding.mesh
    if all(kind == AxisType.Auto for kind in mesh.axis_types):
        return x
    auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
    return jax.device_put(x, NamedSharding(auto, sharding.spec))


def state_layout(state: Any, params: Pipelined) -> tuple[Piece, ...]:
    """The pieces of an optimizer's state: what belongs to a parameter lives where that does.

    Whatever has no parameter, or one element alone, is whole on every stage; a scalar is on the
    first. An array that has the rows of a parameter in rows lies in rows too.
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
    leaves, structure = jax.tree.flatten(tree)
    placed = jax.tree.unflatten(structure, list(map(_placed, leaves, homes)))
    shardings = jax.tree.leaves(rules.shardings(rule, placed, meshes[0]))
    found = zip(rules.named_leaves(tree), homes, shardings, strict=True)
    return _distinct(
        Piece(path, tuple(jnp.shape(x)), jnp.result_type(x), home, sharding.spec)
        for (path, x), home, sharding in found
    )


def _placed(x, home):
    """The shape of an array's part on a stage; of unequal rows, a number that divides them all."""
    shape = jnp.shape(x)
    if home[0][1] is not None:
        shape = (math.gcd(*(last - first for _, (first, last) in home)), *shape[1:])
    return jax.ShapeDtypeStruct(shape, jnp.result_type(x))


def _distinct(layout):
    layout, seen = tuple(layout), set()
    for piece in layout:
        if piece.path in seen:
            raise ValueError(
                f"pipeline.place: two arrays have the path {piece.path!r}; rename one."
            )
        seen.add(piece.path)
    return layout
