"""Which devices take part in a collective together, from any form in which HLO writes it."""

import math
import re
from collections.abc import Mapping

import numpy as np

from .program import Instruction

Groups = tuple[tuple[int, ...], ...]  # places in the order of the mesh that the program runs on

_MESH_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def read(op: Instruction, devices: int) -> Groups:
    """The groups of an instruction in a program for so many devices; of a permute, the pairs that
    move something.

    Raises:
      ValueError: a form that is not known here.
    """
    if "source_target_pairs" in op.attributes:
        pairs = re.findall(r"\{(\d+),(\d+)\}", op.attributes["source_target_pairs"])
        return tuple((int(a), int(b)) for a, b in pairs if a != b)
    text = op.attributes.get("replica_groups", "{}")
    if text == "{}":
        return (tuple(range(devices)),)
    iota = re.match(r"(\[\d+,\d+\])<=(.*)", text)
    if iota:
        return _tuples(_iota(iota[2]).reshape(_numbers(iota[1])))
    if text.startswith("mesh["):
        found = _of_a_mesh(text, op.attributes.get("device_ids", ""))
        if found is not None:
            return found
    groups = re.findall(r"\{([\d, ]+)\}", text)
    if not groups:
        raise ValueError(
            f"measure.collectives: cannot read the replica groups of {op.name}: {text}; expected "
            f"{{{{0,1}},{{2,3}}}}, [2,2]<=[4] or mesh['a'=2,'b'=2] {{'a'}}."
        )
    return tuple(tuple(_numbers(group)) for group in groups)


def axes(groups: Groups, shape: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a mesh of this shape along which the devices of a group differ."""
    differ = set()
    for group in groups:
        places = np.array(np.unravel_index(group, tuple(shape.values())))
        differ |= set(np.flatnonzero((places != places[:, :1]).any(axis=1)))
    return tuple(name for i, name in enumerate(shape) if i in differ)


def _of_a_mesh(text, ids):
    """The groups along some axes, or parts of axes, of a mesh that the program names."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", text)}
    # The axes stand after the mesh, or after the order of its devices where that is given.
    used = re.search(r"\{([^{}]*)\}$", ids or text)
    if used is None:
        return None
    order = re.match(r"\(?([^{]*?)\)? ?\{", ids)
    order = _iota(order[1]) if order else np.arange(math.prod(sizes.values()))
    # Each axis is cut in three, before, within and after the part of it that is meant.
    parts = {name: (1, size, 1) for name, size in sizes.items()}
    meant = []
    for name, before, part in _MESH_AXIS.findall(used[1]):
        meant.append(name)
        if part:
            rest = sizes[name] // (int(before) * int(part))
            parts[name] = int(before), int(part), rest
    grid = order.reshape([size for name in sizes for size in parts[name]])
    within = [3 * list(sizes).index(name) + 1 for name in meant]
    others = [i for i in range(grid.ndim) if i not in within]
    n = math.prod(grid.shape[i] for i in within)
    return _tuples(grid.transpose(*others, *within).reshape(-1, n))


def _iota(text):
    """All numbers in the order that `[2,4]T(1,0)` describes."""
    shape, _, permutation = text.partition("T")
    found = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return found.transpose(_numbers(permutation)) if permutation else found


def _numbers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


def _tuples(array):
    return tuple(tuple(map(int, group)) for group in array)
