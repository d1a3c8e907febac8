"""The mesh axes along which collectives run."""

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from .counts import Collectives, Op


def by_axis(found: Collectives, mesh: Mesh | AbstractMesh) -> dict[tuple[str, ...], Collectives]:
    """{mesh axes: the `Collectives` along them}, keys and the axes of each in the mesh's order.

    An axis counts if devices that take part together differ in their place along it: a sum over all
    devices of a mesh of two axes runs along both, and stands under both names. `mesh` is that of
    the program, whose devices have numbers in its order. What moves nothing is left out.

    Raises:
      ValueError: a collective among other devices than those of the mesh, or, between slices of
        TPUs, among devices whose numbers are not told.
    """
    shape = tuple(mesh.shape.values())
    for op in found.ops:
        if not op.groups:
            raise ValueError(
                f"measure.by_axis: {op.name}, a {op.kind}, tells who takes part by places on the "
                f"chips, not by numbers; leave it out."
            )
    parts: dict[tuple[str, ...], list[Op]] = {}
    for op in found.ops:
        parts.setdefault(_axes(op, tuple(mesh.shape), shape), []).append(op)
    order = sorted(filter(None, parts), key=lambda axes: [*map(list(mesh.shape).index, axes)])
    return {axes: Collectives(parts[axes]) for axes in order}


def _axes(op: Op, names: tuple[str, ...], shape: tuple[int, ...]) -> tuple[str, ...]:
    if max(map(max, op.groups)) >= np.prod(shape):
        raise ValueError(
            f"measure.by_axis: {op.name} runs among devices up to number "
            f"{max(map(max, op.groups))}, and the mesh {dict(zip(names, shape, strict=True))} has "
            f"{np.prod(shape)}; give the mesh that the program was written for."
        )
    places = [np.stack(np.unravel_index(group, shape)) for group in op.groups]
    along = [any(np.ptp(place[i]) for place in places) for i in range(len(names))]
    return tuple(name for name, differs in zip(names, along, strict=True) if differs)
