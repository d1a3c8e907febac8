"""Collectives by hand within a stage: its programs are shard_maps over its own mesh.

The loss is traced as one device of a rank runs it, on its rows, its part of the sequence and its
shares of the parameters, where the rank's axes have names: that program is cut, not one with a
shard_map around it. `by_hand` wraps each piece in a shard_map again.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import marks, objective
from shardwise.pipeline.forms import names_of, without
from shardwise.pipeline.placing import Pipelined, stage_meshes
from shardwise.pipeline.tracing import Asked, Traced, abstract, traced_parts

SUMMED = {"sum", "mean", "max"}  # auxiliary outputs that are the same on every device


@dataclasses.dataclass(frozen=True)
class Manual:
    """The layout by hand within a stage, as `value_and_grad` is told.

    Args:
      rows: mesh axes over which rows are cut.
      columns: those over which the sequence is.
      free: those that are left to the compiler.
      divide: `divide(batch, microbatches) -> (batch, numbers, (specs, specs))`, the batch in the
        order in which it is cut, its rows' numbers (`objective.numbers`), and their PartitionSpecs.
      meanings: `meanings(mesh) -> {mark: meaning}`.
      shares: `shares(params, mesh, loss, batch, args, options)`, called where the axes have names,
        of the loss of one device's part: what is done with its shares of the parameters, an object
        like `layouts.shares.Shares`.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    free: tuple[str, ...]
    divide: Callable
    meanings: Callable[[Mesh], Mapping[str, Callable]]
    shares: Callable

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which the parts' sums are added up."""
        return (*self.columns, *self.rows)

    def within(self, mesh: Mesh, function: Callable[[], Any]) -> Any:
        """The result of `function()`, called in a trace where the axes by hand have names."""
        found: list = []

        def inside():
            found.append(function())
            return jnp.zeros(())

        jax.eval_shape(self.mapped(inside, mesh, (), P()))
        return found[0]

    def mapped(self, function: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
        """`jax.shard_map` over all axes of `mesh`, those of size 1 too, but for the free ones."""
        names = set(mesh.axis_names) - set(self.free)
        specs = dict(in_specs=in_specs, out_specs=out_specs, axis_names=names)
        return jax.shard_map(function, mesh=mesh, check_vma=False, **specs)

    def by_hand(self, spec: P) -> P:
        """The spec without the axes left to the compiler."""
        return without(spec, self.free)

    def together(self, x: Any) -> Any:
        """The sum of `x` over the rank's devices."""
        return jax.lax.psum(x, self.axes)

    def along(self, x: Any) -> Any:
        """The sum of `x` over the devices that have parts of the same rows."""
        return jax.lax.psum(x, self.columns) if self.columns else x

    def fold(self, key: Any) -> Any:
        """The key of this device, made of the batch's."""
        for name in self.axes if key is not None else ():
            key = jax.random.fold_in(key, jax.lax.axis_index(name))
        return key


class Local(NamedTuple):
    """The layout in a trace by hand: the shares of parameters, and the PartitionSpecs of the leaves
    of a microbatch, of its row numbers, of the arguments and the key.
    """

    shares: Any
    specs: list[P]


def trace_by_hand(asked: Asked, params: Pipelined, batch: Any, args: tuple, key: Any) -> Traced:
    """The loss as one device of a rank has it, for arguments of these shapes.

    Raises:
      ValueError, TypeError: as `value_and_grad`.
    """
    manual, m = asked.manual, asked.microbatches
    tree, batch, args, key = abstract((params.abstract(), batch, args, key))
    batch, numbers, specs = _divided(manual, batch, m)
    rank = stage_meshes(asked.mesh, asked.axis, [0])[0]
    leaves, structure = jax.tree.flatten((batch, numbers))
    local = [_local(x, spec, rank, m) for x, spec in zip(leaves, specs, strict=True)]
    given = *jax.tree.unflatten(structure, local), args, key
    bound = manual.meanings(rank)

    def traced():
        options = {} if key is None else {"key": key}
        with marks.bind(**bound):
            shares = manual.shares(params, rank, asked.loss, given[0], args, options)

        def loss(*arguments, **options):
            with marks.bind(use=shares.use):
                return asked.loss(*arguments, **options)

        whole = jax.tree.unflatten(jax.tree.structure(tree), shares.shapes)
        total = objective.Totals(m, manual.together, manual.along)
        options = dict(fold=manual.fold, relocate=functools.partial(_relocated, rank))
        with marks.bind(**bound):
            return traced_parts(asked, loss, (whole, *given), True, total, **options), shares

    found, shares = manual.within(rank, traced)
    _check(asked.who, manual, found, params)
    further = [P()] * len(jax.tree.leaves((args, key)))
    return found._replace(local=Local(shares, [*specs, *further]))


def _divided(manual, batch, m):
    """(batch, numbers, the specs of the leaves of both), of an abstract batch."""
    specs = []

    def divide(batch):
        *trees, found = manual.divide(batch, m)
        for spec, tree in zip(found, trees, strict=True):
            spread = jax.tree.map(lambda s, t: [s] * len(jax.tree.leaves(t)), spec, tree)
            specs.extend(jax.tree.leaves(spread))
        return trees

    return *jax.eval_shape(divide, batch), specs


def _local(x, spec, mesh, m):
    """The shape of one device's part of a microbatch of `x`."""
    sizes = [x.shape[0] // m, *x.shape[1:]] if x.shape else []
    for i, entry in enumerate(spec):
        sizes[i] //= math.prod(mesh.shape[name] for name in names_of(entry))
    return jax.ShapeDtypeStruct(tuple(sizes), x.dtype)


def _relocated(rank, sharding):
    """The sharding of a constraint of the loss, on the mesh that all stages see."""
    here = jax.sharding.get_abstract_mesh() if jax.__version_info__ >= (0, 8) else None
    return NamedSharding(here or rank.abstract_mesh, sharding.spec)


def _check(who, manual, traced, params):
    """Check that one device's program reads what the whole rank's does, and that aux fits it."""
    for i, piece in enumerate(params.layout):
        homes = tuple((s.index, s.rows[i]) for s in traced.stages if i in s.rows)
        if homes != piece.homes:
            raise ValueError(
                f"{who}: {piece.path} is read by other stages, or in other rows, "
                f"where a device has its share of it ({homes}) than where it is whole "
                f"({piece.homes}). What the loss does before marks.use must not depend on shapes."
            )
    if manual.columns and not SUMMED.issuperset(traced.ways):
        raise ValueError(
            f"{who}: aux 'concatenate' joins rows, and of each row a device has "
            f"a part of the sequence alone, over {manual.columns}. Return sums over tokens, or lay "
            f"the sequence out by the compiler."
        )
