"""The devices that take part in a collective together, from any form in which HLO writes it."""

import math
import re

import numpy as np

from .program import Instruction

Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_ORDER = re.compile(r"\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)")
_MESH_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def replicas(op: Instruction, devices: int) -> Groups:
    """The groups of numbers below `devices` in the `replica_groups` of an instruction.

    Raises:
      ValueError: a form that is not known here.
    """
    text = op.attributes.get("replica_groups", "{}")
    if text == "{}":
        return (tuple(range(devices)),)
    if iota := _IOTA.fullmatch(text):
        return _listed(_arranged(iota[2], iota[3]).reshape(_numbers(iota[1])))
    if text.startswith("mesh["):
        # The axes stand after the mesh, or after the order of its devices where that is given.
        order = op.attributes.get("device_ids", "")
        if axes := re.search(r"\{([^{}]*)\}$", order or text):
            return _of_mesh(text, order, axes[1])
    groups = re.findall(r"\{([\d, ]+)\}", text)
    if not groups:
        raise ValueError(
            f"measure.collectives: cannot read the replica groups of {op.name}: {text}; expected "
            f"{{{{0,1}},{{2,3}}}}, [2,2]<=[4] or mesh['a'=2,'b'=2] {{'a'}}."
        )
    return tuple(tuple(_numbers(group)) for group in groups)


def pairs(op: Instruction) -> Groups:
    """The (source, target) pairs of a collective-permute.

    Raises:
      ValueError: it sends slices.
    """
    if "slice_sizes" in op.attributes:
        raise ValueError(f"measure.collectives: {op.name} sends slices, which are not known here.")
    found = re.findall(r"\{(\d+),(\d+)\}", op.attributes["source_target_pairs"])
    return tuple((int(source), int(target)) for source, target in found)


def _of_mesh(text, order, axes):
    """Groups along some axes of a mesh, whole or a part of one: `'a':(before)size`."""
    sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", text)}
    iota = _ORDER.match(order)
    ids = _arranged(*iota.groups()) if iota else np.arange(math.prod(sizes.values()))
    grid = ids.reshape(list(sizes.values()))
    along, shape = [], []
    used = {name: (before, size) for name, before, size in _MESH_AXIS.findall(axes)}
    for name, whole in sizes.items():
        before, size = used.get(name, ("", "1"))
        inner = int(size) if size else whole
        outer = int(before) if before else 1
        along.append(len(shape) + 1)
        shape += [outer, inner, whole // outer // inner]
    grid = np.moveaxis(grid.reshape(shape), along, range(-len(along), 0))
    return _listed(grid.reshape(-1, math.prod(shape[i] for i in along)))


def _arranged(shape, transposed):
    """The numbers of `[shape]T(transposed)`, in their order."""
    sizes = _numbers(shape)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose(_numbers(transposed)).ravel() if transposed else ids.ravel()


def _numbers(text):
    return [int(number) for number in text.split(",")]


def _listed(rows):
    return tuple(tuple(int(i) for i in row) for row in rows)
