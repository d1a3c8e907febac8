"""Counts of collectives: a mapping by kind, a list, parts by mesh axis, shown as tables."""

import html
import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .hlo import Array

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
BETWEEN_SLICES = " between slices"  # after a kind: of TPUs, over the data centre's network


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: Container[str]) -> list[str]:
    """The lines of a table as text: columns named in `left` to the left, others to the right."""
    aligned = []
    for column in zip(columns, *rows, strict=True):
        pad = str.ljust if column[0] in left else str.rjust
        aligned.append([pad(cell, max(map(len, column))) for cell in column])
    return ["  ".join(line).rstrip() for line in zip(*aligned, strict=True)]


def number(value: int | float) -> str:
    """A number with commas; with one decimal where it is no int."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


class Shown:
    """A mapping that is shown as a table, by its `_columns` and `_rows()`, as text and as HTML."""

    def __repr__(self) -> str:
        lines = table(self._columns, self._rows(), self._columns[:1])
        return "\n".join(lines) if self else "no collectives"

    def _repr_html_(self) -> str:
        if not self:
            return "<p>no collectives</p>"
        head = "".join(f'<th scope="col">{html.escape(title)}</th>' for title in self._columns)
        cell = '<td style="text-align:right">{}</td>'.format
        body = ""
        for first, *cells in (map(html.escape, row) for row in self._rows()):
            body += f'<tr><th scope="row">{first}</th>{"".join(map(cell, cells))}</tr>'
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


@dataclass(frozen=True)
class Op:
    """One collective instruction, which runs `trips` times.

    `kind` is HLO's, as "all-gather", and `name` the instruction's. `arrays` are what each device
    puts in, an `Array` each, `source` is the operation that JAX named, `groups` the numbers of the
    devices that take part together, of `group_size`; or each (source, target) of a
    collective-permute, whose size is None.

    Of a TPU's program: `strategy` is the compiler's name for how the chips exchange, `asynchronous`
    whether other work may stand between start and end. `notes` are of "padded" (the arrays are
    larger than those written), "windowed" (it passes on the shares of a product), "combined"
    (several arrays), "bound" (at most so many bytes) and "expected" (of a formula, no program).
    """

    kind: str
    name: str
    arrays: tuple[Array, ...]
    group_size: int | None
    trips: int | float = 1
    source: str = ""
    groups: tuple[tuple[int, ...], ...] = ()
    strategy: str = ""
    asynchronous: bool = False
    notes: tuple[str, ...] = ()

    @property
    def dtype(self) -> str:
        return "+".join(dict.fromkeys(dtype for dtype, _ in self.arrays))

    @property
    def payload_bytes(self) -> int | float:
        """The bytes of the full tensor, of all trips together, as `Collectives` says."""
        gathered = self.group_size if self.kind.startswith("all-gather") else 1
        return sum(array.bytes for array in self.arrays) * gathered * self.trips

    @property
    def ring_bytes(self) -> int | float:
        """The bytes that a device sends in a ring, in all trips, as `Collectives` says."""
        n, size = self.group_size, self.payload_bytes
        if n is None:  # of places on other slices no numbers are told
            away = self.kind.endswith(BETWEEN_SLICES) or any(a != b for a, b in self.groups)
            return size if away else 0
        if "bound" in self.notes:  # as if no row stayed
            return size if n > 1 else 0
        passed = size * (n - 1) * (2 if self.kind.startswith("all-reduce") else 1)
        return passed / n if passed % n else passed // n


class Count(NamedTuple):
    """The times that a kind of collective occurs (`static`) and runs (`dynamic`), and its bytes."""

    static: int
    dynamic: int | float
    payload_bytes: int | float
    ring_bytes: int | float


class Collectives(Shown, dict[str, Count]):
    """A dict from the kinds of collectives in a program, such as "all-gather", to the `Count` of
    each, shown as a table. `.ops` has an `Op` of each instruction, in an order they may run in.

    A `Count` has `static`, the instructions in the program, and, for one device in all trips of
    loops, `dynamic`, the times that they run, `payload_bytes` and `ring_bytes`. The attributes of
    these names are sums over all kinds. `payload_bytes` is the size of the full tensor B: what an
    all-gather yields, what enters another collective on one device. `ring_bytes` is what one device
    sends when n devices pass it on in a ring: B(n-1)/n, twice that for an all-reduce, and B itself
    for a collective-permute (at the end of an open chain, nothing). An all-to-all's B(n-1)/n is
    what a device sends of its own, as over a switch: one way round a ring, where blocks are passed
    on, it would be B(n-1)/2.
    """

    _columns = ("collective", "in program", "times run", "payload bytes", "ring bytes per device")

    def __init__(self, ops: Iterable[Op], device: int = 0):
        self.ops: tuple[Op, ...] = tuple(ops)
        self.device = device
        found = parted(self.ops, lambda op: op.kind)
        kinds = (*KINDS, *(kind + BETWEEN_SLICES for kind in KINDS))
        super().__init__({kind: _sum(found[kind]) for kind in kinds if kind in found})
        self.static, self.dynamic, self.payload_bytes, self.ring_bytes = _sum(self.ops)

    def _rows(self):
        total = {"total": _sum(self.ops)} if len(self) > 1 else {}
        return [(kind, *map(number, count)) for kind, count in {**self, **total}.items()]


def _sum(ops: Sequence[Op]) -> Count:
    sums = (sum(getattr(op, key) for op in ops) for key in ("trips", *Count._fields[2:]))
    return Count(len({op.name for op in ops}), *sums)


def parted(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """{key: the items that have it}, in the order in which the keys are met."""
    parts: dict[Any, list[Any]] = {}
    for item in items:
        parts.setdefault(key(item), []).append(item)
    return parts


def by_axis(found: Collectives, mesh: Any) -> dict[tuple[str, ...], Collectives]:
    """A dict from tuples of mesh axes to the `Collectives` of `found` along exactly these.

    Keys, and the axes in each, are in the order of `mesh`, the program's, a `topology.ChipMesh` or
    one of JAX's. An axis is in a key if devices that take part together differ in their place along
    it, as in `("data", "model")` for a sum over both. What moves nothing is left out.

    Raises:
      ValueError: a collective among other devices than those of the mesh, or, between slices of
        TPUs, among devices whose numbers are not told.
    """
    shape = tuple(mesh.shape.values())

    def axes(op):
        if not op.groups:
            raise ValueError(
                f"measure.by_axis: {op.name}, a {op.kind}, tells who takes part by places on the "
                f"chips, not by numbers; leave it out."
            )
        if (last := max(map(max, op.groups))) >= math.prod(shape):
            raise ValueError(
                f"measure.by_axis: {op.name} runs among devices up to number {last}, and the mesh "
                f"{dict(mesh.shape)} has {math.prod(shape)}; give the mesh that it was written for."
            )
        places = [np.stack(np.unravel_index(group, shape)) for group in op.groups]
        differ = np.any([np.ptp(place, axis=1) > 0 for place in places], axis=0)
        return tuple(name for name, along in zip(mesh.shape, differ, strict=True) if along)

    parts, place = parted(found.ops, axes), list(mesh.shape).index
    ordered = sorted(filter(None, parts), key=lambda axes: [*map(place, axes)])
    return {axes: Collectives(parts[axes]) for axes in ordered}
