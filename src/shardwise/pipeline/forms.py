"""The form of a stage whose collectives are the compiler's: its shardings and functions."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import cut
from shardwise.objective import wide

Shape = jax.ShapeDtypeStruct


class Form(NamedTuple):
    """A stage and its `cut.Halves` as functions of whole arrays, and where these lie.

    `laid` has the shardings of "inputs", "carry", "outputs", of the "cotangents" of these last,
    and of those that go "back", of the carry. `own` are those of parameters and gradients.
    `gather` makes of the parameters of the numbers `gathered` what tasks find; `held` tells what
    tasks find of all. Tasks add gradients to arrays like `sums`, of which `total`, once a step,
    makes arrays like the parameters.
    """

    stage: cut.Stage
    halves: cut.Halves
    mesh: Mesh
    laid: dict[str, list[NamedSharding]]
    own: list[NamedSharding]
    held: list[Shape]
    gathered: list[int]
    gather: Callable[[list], list]
    sums: list[Shape]
    total: Callable[[list], list]


def by_compiler(
    stage: cut.Stage, halves: cut.Halves, mesh: Mesh, specs: list[P], rows: P, gather: str
) -> Form:
    """The `Form` of a stage whose parameters lie on `mesh` as `specs` say, and rows as `rows`."""
    own = [NamedSharding(mesh, spec) for spec in specs]
    laid = {name: _laid(stage, name, mesh, rows) for name in ("inputs", "carry", "outputs")}
    laid["cotangents"] = [laid["outputs"][i] for i in cut.differentiable(stage)]
    pairs = zip(laid["carry"], stage.carry, strict=True)
    laid["back"] = [s for s, x in pairs if jnp.issubdtype(x.dtype, jnp.inexact)]
    along = {name for entry in rows for name in names_of(entry)} if gather == "step" else set()
    held = [NamedSharding(mesh, without(spec, along)) for spec in specs]
    return Form(
        stage=stage,
        halves=halves,
        mesh=mesh,
        laid=laid,
        own=own,
        held=[shaped(x, s) for x, s in zip(stage.params, held, strict=True)],
        gathered=[i for i, (a, b) in enumerate(zip(own, held, strict=True)) if a != b],
        gather=lambda arrays: arrays,
        sums=[shaped(x, s, wide(x.dtype)) for x, s in zip(stage.params, own, strict=True)],
        total=lambda sums: sums,
    )


def shaped(x: Any, sharding: NamedSharding, dtype: Any = None) -> Shape:
    """The shape and dtype of `x`, or another dtype, in this sharding."""
    return Shape(x.shape, dtype or x.dtype, sharding=sharding)


def names_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes in one entry of a PartitionSpec."""
    return entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else ()


def without(spec: P, names: Any) -> P:
    """`spec` with these mesh axes taken out of every entry."""
    if not any(name in names for entry in spec for name in names_of(entry)):
        return spec
    kept = (tuple(name for name in names_of(entry) if name not in names) for entry in spec)
    return P(*(entry or None for entry in kept))


def _laid(stage, name, mesh, rows):
    shapes = getattr(stage, name)
    axes = stage.axes.get(name, [None] * len(shapes))
    pairs = zip(shapes, axes, strict=True)
    return [NamedSharding(mesh, _spec(x, axis, mesh, rows)) for x, axis in pairs]


def _spec(x, axis, mesh, rows):
    """The spec `rows`, from the axis of the batch's rows on; P() if devices do not divide it."""
    if axis is None:
        return P()
    spec = P(*[None] * axis, *tuple(rows)[: x.ndim - axis])
    devices = [math.prod(mesh.shape[name] for name in names_of(entry)) for entry in spec]
    divide = all(size % count == 0 for size, count in zip(x.shape, devices, strict=False))
    return spec if divide else P()
