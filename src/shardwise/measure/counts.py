"""The result of counting collectives: a mapping by kind, a list, and a table to show."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from . import tables

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
BETWEEN_SLICES = " between slices"  # after a kind: of TPUs, over the data centre's network
_COLUMNS = ("collective", "in program", "times run", "payload bytes", "ring bytes per device")


@dataclass(frozen=True)
class Op:
    """One collective instruction; its bytes are those of all its trips together.

    `group_size` is the number of devices that take part together (None for a collective-permute),
    `arrays` what each device puts in, as (dtype, dims), `source` the operation that JAX named,
    `groups` the numbers of the devices that take part together, or each (source, target).

    Of a TPU's program: `strategy` is the compiler's name for how the chips exchange, `written` the
    kind whose work an all-reduce does, of each array (empty if sums), `asynchronous` whether other
    work may stand between its start and its end, and `notes` are of "padded" (the arrays are larger
    than those written), "windowed" (it passes on the shares of a product), "combined" (several
    arrays in one) and "bound" (at most so many bytes). "expected" is one that no program has, but a
    formula.
    """

    kind: str
    name: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    group_size: int | None
    trips: int
    payload_bytes: int
    ring_bytes: int | float
    source: str
    groups: tuple[tuple[int, ...], ...] = ()
    strategy: str = ""
    written: tuple[str, ...] = ()
    asynchronous: bool = False
    notes: tuple[str, ...] = ()

    @property
    def dtype(self) -> str:
        return "+".join(dict.fromkeys(dtype for dtype, _ in self.arrays))

    def repeated(self, times: int) -> "Op":
        """The `Op` for so many runs of its program."""
        return replace(
            self,
            trips=self.trips * times,
            payload_bytes=self.payload_bytes * times,
            ring_bytes=self.ring_bytes * times,
        )


@dataclass(frozen=True)
class Count:
    """The times that a kind of collective occurs (`static`) and runs (`dynamic`), and its bytes."""

    static: int
    dynamic: int
    payload_bytes: int
    ring_bytes: int | float


class Collectives(Mapping[str, Count]):
    """{kind of collective: its `Count`} of the kinds that occur; `.ops` holds every instruction.

    All bytes are per device and for all trips. `payload_bytes` is the size of the full tensor B:
    what an all-gather yields, what enters a reduce-scatter, an all-reduce, an all-to-all (on one
    device) or a collective-permute. `ring_bytes` is what one device sends when n devices pass it
    on in a ring: B(n-1)/n, twice that for an all-reduce, and B itself for a collective-permute
    (of a device that sends: those at the end of an open chain send nothing). An all-to-all's
    B(n-1)/n is what a device sends of its own, as over a switch: one way round a ring, where blocks
    are passed on, it would be B(n-1)/2.
    """

    def __init__(self, ops: Iterable[Op]):
        self.ops: tuple[Op, ...] = tuple(ops)
        self._counts = {
            kind: _sum([op for op in self.ops if op.kind == kind])
            for kind in (*KINDS, *(kind + BETWEEN_SLICES for kind in KINDS))
            if any(op.kind == kind for op in self.ops)
        }

    @property
    def static(self) -> int:
        return sum(count.static for count in self.values())

    @property
    def dynamic(self) -> int:
        return sum(count.dynamic for count in self.values())

    @property
    def payload_bytes(self) -> int:
        return sum(count.payload_bytes for count in self.values())

    @property
    def ring_bytes(self) -> int | float:
        return sum(count.ring_bytes for count in self.values())

    def __getitem__(self, kind: str) -> Count:
        return self._counts[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)

    def _rows(self) -> list[tuple[str, ...]]:
        counts = {**self, "total": self} if len(self) > 1 else self
        rows = [
            (kind, c.static, c.dynamic, c.payload_bytes, c.ring_bytes) for kind, c in counts.items()
        ]
        return [(kind, *map(tables.number, values)) for kind, *values in rows]

    def __repr__(self) -> str:
        return tables.plain(_COLUMNS, self._rows()) if self else "no collectives"

    def _repr_html_(self) -> str:
        return tables.page(_COLUMNS, self._rows()) if self else "<p>no collectives</p>"


def _sum(ops: list[Op]) -> Count:
    return Count(
        static=len({op.name for op in ops}),
        dynamic=sum(op.trips for op in ops),
        payload_bytes=sum(op.payload_bytes for op in ops),
        ring_bytes=sum(op.ring_bytes for op in ops),
    )
