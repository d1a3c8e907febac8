"""Collectives of a compiled program beside those written, each pair with the name of a reason."""

import collections
import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .counts import Op
from .program import Array

NAMES = (
    "as written",
    "combined",
    "narrowed",
    "widened",
    "padded",
    "all-reduce",
    "divided",
    "of equal rows",
    "dropped",
    "repeated",
    "windowed",
    "inserted",
    "left over",
)
_BY_HAND = ("all_gather", "reduce_scatter", "psum", "psum_invariant", "ppermute", "all_to_all")
_SUMS = ("reduce-scatter", "all-gather")  # what an all-reduce may do the work of


class Pair(NamedTuple):
    """The reason's name, the compiled op's name ("" if there is none), ring bytes of both."""

    name: str
    op: str
    written: float
    compiled: float


@dataclasses.dataclass
class _Piece:
    """One array of a collective, of `times` runs; `bytes` are what one sends."""

    op: Op
    array: Array
    times: int

    @property
    def key(self):
        """The key by which a piece is known: kind, elements of the whole, how many take part."""
        return self.of(self.op.kind)

    def of(self, kind):
        """The key that the piece would have as one of another kind."""
        whole = self.op.group_size if self.op.kind == "all-gather" else 1
        return kind, self.array.elements * whole, self.op.group_size

    @property
    def bytes(self):
        whole = sum(Array(*a).bytes for a in self.op.arrays)
        return self.op.ring_bytes / self.op.trips * (self.array.bytes / whole if whole else 0)

    @property
    def width(self):
        """Bytes of an element."""
        return self.array.bytes / max(self.array.elements, 1)

    @property
    def is_by_hand(self):
        source = self.op.source
        return "shard_map" in source and source.rsplit("/", 1)[-1].startswith(_BY_HAND)

    @property
    def may_be_by_hand(self):
        """Whether it may be by hand, also if the compiler tells no origin, or another array's."""
        source = self.op.source
        return "shard_map" in source or not source or "combined" in self.op.notes

    def differs_in_one(self, other):
        """Whether all sizes of the arrays are alike but one, which may be 1 in one of them."""
        both = self.array.dims, other.array.dims
        return _differ_in_one(*both) or _differ_in_one(*([d for d in x if d > 1] for x in both))


def _differ_in_one(mine, theirs):
    pairs = zip(mine, theirs, strict=False)
    return len(mine) == len(theirs) and sum(a != b for a, b in pairs) == 1


def pairs(written: Iterable[Op], compiled: Iterable[Op]) -> Iterator[Pair]:
    """Each collective written beside what it became; what has no fellow is beside nothing."""
    pool = collections.defaultdict(list)
    for piece in _pieces(written):
        pool[piece.key].append(piece)
    met, padded = set(), []
    made = sorted(_pieces(compiled), key=lambda piece: not piece.is_by_hand)
    for rule in (_alike, _of_other_width, _for_all_reduce, _padded, _divided, _of_equal_rows):
        for piece in made:
            while piece.times and (fellow := rule(piece, pool)):
                times = min(piece.times, fellow.times)
                piece.times, fellow.times = piece.times - times, fellow.times - times
                met.add(fellow.key)
                name = _name(rule, piece, fellow)
                padded += [piece] if name == "padded" else []
                yield Pair(name, piece.op.name, fellow.bytes * times, piece.bytes * times)
    windows = [piece for piece in made if "windowed" in piece.op.notes]
    for piece in (piece for piece in made if piece.times):
        name = _of_nobody(piece, met, padded)
        yield Pair(name, piece.op.name, 0, piece.bytes * piece.times)
    for fellow in (fellow for found in pool.values() for fellow in found if fellow.times):
        yield Pair(_of_none(fellow, met, windows), "", fellow.bytes * fellow.times, 0)


def _pieces(ops):
    for op in ops:
        arrays = [Array(*a) for a in op.arrays]
        if op.kind == "all-to-all":  # of each device's part an array, or of all one
            arrays = [Array(arrays[0].dtype, (sum(a.elements for a in arrays),))]
        for array in arrays:
            yield _Piece(op, array, op.trips)


def _left(pool, key, piece):
    """Pieces written, of this key, that `piece` may be: by hand, or expected of the compiler."""
    found = (fellow for fellow in pool.get(key, ()) if fellow.times)
    return (f for f in found if piece.may_be_by_hand or "expected" in f.op.notes)


def _alike(piece, pool):
    fellows = _left(pool, piece.key, piece)
    return next((fellow for fellow in fellows if fellow.width == piece.width), None)


def _of_other_width(piece, pool):
    return next(_left(pool, piece.key, piece), None)


def _for_all_reduce(piece, pool):
    if piece.op.kind != "all-reduce":
        return None
    return next((fellow for kind in _SUMS for fellow in _left(pool, piece.of(kind), piece)), None)


def _padded(piece, pool):
    """A piece written, whose arrays the compiler made larger, to cut them evenly."""
    kinds = _SUMS if piece.op.kind == "all-reduce" else (piece.op.kind,)
    if "padded" not in piece.op.notes:
        return None
    smaller = (f for f in _but_one(piece, pool, kinds) if f.key[1] < piece.key[1])
    return max(smaller, key=lambda fellow: fellow.key[1], default=None)


def _divided(piece, pool):
    """A piece written over whole arrays, which the compiler cut along an axis left to it."""
    if not piece.is_by_hand:
        return None
    larger = (f for f in _but_one(piece, pool, (piece.op.kind,)) if f.key[1] % piece.key[1] == 0)
    return min(larger, key=lambda fellow: fellow.key[1], default=None)


def _of_equal_rows(piece, pool):
    """A piece written of rows that are all alike, as the compiler finds, and sends the first."""
    if not piece.is_by_hand:
        return None
    mine = [d for d in piece.array.dims if d > 1]
    for fellow in (fellow for found in pool.values() for fellow in found if fellow.times):
        among = fellow.op.kind == piece.op.kind and fellow.op.group_size == piece.op.group_size
        alike = among and mine and fellow.array.dtype == piece.array.dtype
        if alike and [d for d in fellow.array.dims if d > 1][1:] == mine:
            return fellow
    return None


def _but_one(piece, pool, kinds):
    """Pieces written, among as many devices, whose sizes are those of `piece` but for one."""
    for fellow in (fellow for found in pool.values() for fellow in found if fellow.times):
        among = fellow.op.kind in kinds and fellow.op.group_size == piece.op.group_size
        if among and piece.differs_in_one(fellow):
            yield fellow


def _name(rule, piece, fellow):
    if rule is _of_other_width:
        return "narrowed" if piece.width < fellow.width else "widened"
    if rule is not _alike:
        return _REASONS[rule]
    return "combined" if "combined" in piece.op.notes else "as written"


_REASONS = {
    _for_all_reduce: "all-reduce",
    _padded: "padded",
    _divided: "divided",
    _of_equal_rows: "of equal rows",
}


def _of_nobody(piece, met, padded):
    """The name for a collective that is written nowhere, or not so often."""
    if "windowed" in piece.op.notes:
        return "windowed"
    is_permute = piece.op.kind == "collective-permute"
    if is_permute and any(piece.differs_in_one(other) for other in padded):
        return "padded"
    if not piece.is_by_hand:
        return "inserted"
    return "repeated" if piece.key in met else "left over"


def _of_none(fellow, met, windows):
    """The name for what is written, and not found; a window passes on a share, or a part of one."""
    if fellow.op.kind in _SUMS:
        share = fellow.key[1] // fellow.op.group_size
        if any(share % window.array.elements == 0 for window in windows):
            return "windowed"
    is_known = fellow.key in met or "expected" in fellow.op.notes
    return "dropped" if is_known else "left over"
