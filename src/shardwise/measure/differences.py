"""Differences in bytes, by name: what a compiler made of the collectives that were written."""

import collections
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .communication import collectives
from .counts import Op, Shown, number
from .program import Array

_BY_HAND = ("all_gather", "reduce_scatter", "psum", "psum_invariant", "ppermute", "all_to_all")
_SUMS = ("reduce-scatter", "all-gather")  # what an all-reduce may do the work of


class Difference(NamedTuple):
    """Collectives of the compiled program, and ring bytes of a device: `written`, `compiled`."""

    static: int
    written: float
    compiled: float

    @property
    def more(self) -> float:
        """Bytes that the compiled program sends beyond those written."""
        return self.compiled - self.written


class Differences(Shown, dict[str, Difference]):
    """{name: the `Difference`} of those that occur; shown as a table."""

    _columns = ("what became of it", "in program", "ring bytes written", "compiled", "more")

    def _rows(self):
        return [(name, *map(number, (*found, found.more))) for name, found in self.items()]


def differences(lowered: Any, compiled: Any, also: Iterable[Op] = ()) -> Differences:
    """The `Differences`: what became in `compiled` of each collective written in `lowered`.

    Both are what `collectives` takes, of one program; `also` are collectives that the compiler is
    expected to insert, and count as written. A collective is known again by its kind, its
    elements and how many devices take part; one in a loop once for each trip, and one of several
    arrays by each. The names:

    - as written; combined, several arrays in one;
    - narrowed, or widened, to another dtype;
    - padded, so that all shares are alike, and what trims them again;
    - all-reduce, in the place of a gather or scatter, over several axes of a torus at once;
    - divided, where arrays are written whole that the compiler cuts along axes that are left to it;
    - of equal rows, of which the compiler sends one;
    - dropped, where it is written several times or in a loop, and done fewer times; or where it is
      expected, and the compiler does without;
    - repeated, where it is done more often than written;
    - windowed, the shares of a product's operand passed on beside it, by the compiler;
    - inserted, along axes that are left to the compiler, or outside of `jax.shard_map`;
    - left over: none of these.

    `written` of all names together is what `lowered` and `also` send, `compiled` what `compiled`
    sends.
    """
    return became(collectives(lowered).ops + tuple(also), collectives(compiled).ops)


def became(written: Iterable[Op], made: Iterable[Op]) -> Differences:
    """The `Differences` of collectives that are counted already."""
    found: dict[str, list[Pair]] = {name: [] for name in _NAMES}
    for pair in pairs(written, made):
        found[pair.name].append(pair)
    return Differences({name: _sum(of) for name, of in found.items() if of})


def _sum(found):
    names = {pair.op for pair in found if pair.op}
    return Difference(len(names), sum(p.written for p in found), sum(p.compiled for p in found))


class Pair(NamedTuple):
    """The reason's name, the compiled op's name ("" if there is none), ring bytes of both."""

    name: str
    op: str
    written: float
    compiled: float


@dataclasses.dataclass
class _Piece:
    """One array of a collective, of `times` runs."""

    op: Op
    array: Array
    times: int | float

    @property
    def kind(self):
        return self.op.kind

    @property
    def whole(self):
        """Elements of the whole that the devices of a group have together, or each."""
        return self.array.elements * (self.op.group_size if self.kind == "all-gather" else 1)

    @property
    def key(self):
        """What one is known by: written and compiled ones of one key are alike but in width."""
        return self.kind, self.whole, self.op.group_size

    @property
    def bytes(self):
        """The bytes that one run sends."""
        whole = sum(array.bytes for array in self.op.arrays)
        return self.op.ring_bytes / self.op.trips * (self.array.bytes / whole if whole else 0)

    @property
    def width(self):
        """Bytes of an element."""
        return self.array.bytes / max(self.array.elements, 1)

    @property
    def dims(self):
        return [d for d in self.array.dims if d > 1]

    @property
    def is_by_hand(self):
        source = self.op.source
        return "shard_map" in source and source.rsplit("/", 1)[-1].startswith(_BY_HAND)

    def may_be(self, written):
        """Whether it may be one that is written by hand, or is expected of the compiler.

        By hand is also what the compiler tells no origin of, or another array's.
        """
        told, notes = self.op.source, self.op.notes
        by_hand = "shard_map" in told or not told or "combined" in notes
        return by_hand or "expected" in written.op.notes

    def differs_in_one(self, other):
        """Whether all sizes of the arrays are alike but one, which may be 1 in one of them."""
        both = (self.array.dims, other.array.dims), (self.dims, other.dims)
        return any(
            len(a) == len(b) and sum(x != y for x, y in zip(a, b, strict=True)) == 1
            for a, b in both
        )


def _is_alike(made, written):
    return _is_of_other_width(made, written) and made.width == written.width


def _is_of_other_width(made, written):
    return made.key == written.key and made.may_be(written)


def _is_for_all_reduce(made, written):
    """An all-reduce in the place of a gather or a scatter of the same whole."""
    kinds = made.kind == "all-reduce" and written.kind in _SUMS
    return kinds and made.whole == written.whole and made.may_be(written)


def _is_padded(made, written):
    """Arrays that the compiler made larger, to cut them evenly."""
    kinds = _SUMS if made.kind == "all-reduce" else (made.kind,)
    larger = "padded" in made.op.notes and written.kind in kinds and written.whole < made.whole
    return larger and made.differs_in_one(written)


def _is_divided(made, written):
    """Arrays that are written whole, and that the compiler cut along an axis left to it."""
    part = made.is_by_hand and made.kind == written.kind and written.whole % made.whole == 0
    return part and made.differs_in_one(written)


def _is_of_equal_rows(made, written):
    """Rows that are all alike, as the compiler finds, which sends the first."""
    alike = made.is_by_hand and made.kind == written.kind
    alike = alike and made.array.dtype == written.array.dtype
    return bool(alike and made.dims and made.dims == written.dims[1:])


# Each rule with the name of what it pairs, and which of several fellows comes first.
_RULES = {
    _is_alike: ("as written", lambda written: 0),
    _is_of_other_width: ("narrowed", lambda written: 0),
    _is_for_all_reduce: ("all-reduce", lambda written: _SUMS.index(written.kind)),
    _is_padded: ("padded", lambda written: -written.whole),
    _is_divided: ("divided", lambda written: written.whole),
    _is_of_equal_rows: ("of equal rows", lambda written: 0),
}
_NAMES = ("as written", "combined", "narrowed", "widened", "padded", "all-reduce", "divided",
          "of equal rows", "dropped", "repeated", "windowed", "inserted", "left over")  # fmt: skip


def pairs(written: Iterable[Op], compiled: Iterable[Op]) -> Iterator[Pair]:
    """Each collective written beside what it became; what has no fellow is beside nothing."""
    pool = collections.defaultdict(list)
    for piece in _pieces(written):
        pool[piece.op.group_size].append(piece)
    met, padded = set(), []
    made = sorted(_pieces(compiled), key=lambda piece: not piece.is_by_hand)
    for rule, (name, order) in _RULES.items():
        for piece in made:
            fellows = (f for f in pool[piece.op.group_size] if f.times and rule(piece, f))
            for fellow in sorted(fellows, key=order) if piece.times else ():
                times = min(piece.times, fellow.times)
                if not times:
                    break
                piece.times, fellow.times = piece.times - times, fellow.times - times
                met.add(fellow.key)
                padded += [piece] if name == "padded" else []
                told = _told(name, piece, fellow)
                yield Pair(told, piece.op.name, fellow.bytes * times, piece.bytes * times)
    windows = [piece for piece in made if "windowed" in piece.op.notes]
    for piece in (piece for piece in made if piece.times):
        name = _of_nobody(piece, met, padded)
        yield Pair(name, piece.op.name, 0, piece.bytes * piece.times)
    for fellow in (fellow for found in pool.values() for fellow in found if fellow.times):
        yield Pair(_of_none(fellow, met, windows), "", fellow.bytes * fellow.times, 0)


def _pieces(ops):
    for op in ops:
        arrays = op.arrays
        if op.kind == "all-to-all":  # of each device's part an array, or of all one
            arrays = [Array(arrays[0].dtype, (sum(a.elements for a in arrays),))]
        for array in arrays:
            yield _Piece(op, array, op.trips)


def _told(name, piece, fellow):
    """The name of a rule, or the other one of two that it stands for."""
    if name == "narrowed" and piece.width > fellow.width:
        return "widened"
    return "combined" if name == "as written" and "combined" in piece.op.notes else name


def _of_nobody(piece, met, padded):
    """The name for a collective that is written nowhere, or not so often."""
    if "windowed" in piece.op.notes:
        return "windowed"
    if piece.kind == "collective-permute" and any(map(piece.differs_in_one, padded)):
        return "padded"
    if not piece.is_by_hand:
        return "inserted"
    return "repeated" if piece.key in met else "left over"


def _of_none(fellow, met, windows):
    """The name for what is written, and not found; a window passes on a share, or a part of one."""
    if fellow.kind in _SUMS:
        share = fellow.whole // fellow.op.group_size
        if any(share % window.array.elements == 0 for window in windows):
            return "windowed"
    is_known = fellow.key in met or "expected" in fellow.op.notes
    return "dropped" if is_known else "left over"
