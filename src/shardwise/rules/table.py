"""A layout as a table, to be printed before anything runs."""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from shardwise import tree as trees
from shardwise.mesh import parts, sizes
from shardwise.rules.rule import as_rule, short

_HEAD = ("path", "shape", "spec", "bytes/device", "replicated because")


@dataclasses.dataclass(frozen=True)
class Row:
    """One array's row: `bytes` on each device, and if every device holds it whole, why."""

    path: str
    shape: tuple
    spec: PartitionSpec
    bytes: int
    why: str


@dataclasses.dataclass(frozen=True)
class Description:
    """The layout of a tree; prints as a table, and in a notebook is shown as one."""

    rows: list
    whole_bytes: int
    mesh: str

    @property
    def bytes_per_device(self):
        return sum(row.bytes for row in self.rows)

    @property
    def replicated(self):
        """A dict from path to the reason, of each array that every device holds whole."""
        return {row.path: row.why for row in self.rows if row.why}

    def __str__(self):
        lines = [_HEAD, *self._cells()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        sides = zip("<<<><", widths, strict=True)
        line = "  ".join(f"{{:{side}{width}}}" for side, width in sides)
        return "\n".join([*(line.format(*cells).rstrip() for cells in lines), self._total()])

    __repr__ = __str__

    def _repr_markdown_(self):
        code = [(f"`{c[0]}`", c[1], f"`{c[2]}`", *c[3:]) for c in self._cells()]
        lines = [_HEAD, ("---", "---", "---", "---:", "---"), *code]
        table = [f"| {' | '.join(cells)} |" for cells in lines]
        return "\n".join([*table, "", self._total()])

    def _cells(self):
        for row in self.rows:
            shape = "×".join(map(str, row.shape)) or "scalar"
            yield row.path, shape, short(row.spec), f"{row.bytes:,}", row.why

    def _total(self):
        whole = sum(row.bytes for row in self.rows if row.why)
        return (
            f"{self.bytes_per_device:,} bytes on each device of ({self.mesh}), of "
            f"{self.whole_bytes:,} in all; {len(self.replicated)} of {len(self.rows)} arrays, "
            f"{whole:,} bytes, are whole on every device."
        )


def describe(rule: Any, tree: Any, mesh: Mesh) -> str:
    """The layout that `rule` gives `tree`: path, shape, spec and bytes per device of each array.

    Says the total too, and of what stays whole on every device why. Takes abstract arrays: no
    array need exist.
    """
    found = as_rule(rule).choices(tree, mesh)
    rows, total = [], 0
    shapes = jax.eval_shape(lambda tree: tree, tree)  # as JAX keeps them: no float64, by default
    for (path, x), (spec, why) in zip(trees.leaves(shapes), found, strict=True):
        size = math.prod(x.shape) * x.dtype.itemsize
        cut = math.prod(parts(mesh, entry) for entry in spec)
        total += size
        why = (why or "the rule says so") if cut == 1 else ""
        rows.append(Row(path, x.shape, spec, size // cut, why))
    return Description(rows, total, sizes(mesh))
