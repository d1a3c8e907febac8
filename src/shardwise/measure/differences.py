"""Differences in bytes, by name: what a compiler made of the collectives that were written."""

import dataclasses
import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax

from . import hlo
from .communication import collectives
from .counts import Op, Shown, number, parted
from .hlo import Array

_BY_HAND = {  # what is written, and what it may be compiled to
    "all_gather": ("all-gather", "all-reduce"),
    "reduce_scatter": ("reduce-scatter", "all-reduce"),
    "psum": ("all-reduce", "reduce-scatter"),
    "ppermute": ("collective-permute",),
    "all_to_all": ("all-to-all",),
}
_SUMS = ("reduce-scatter", "all-gather")  # what an all-reduce may do the work of


class Difference(NamedTuple):
    """The compiled program's instructions, `static`, and a device's ring bytes in all trips."""

    static: int
    written: float
    compiled: float

    @property
    def more(self) -> float:
        """Bytes that the compiled program sends beyond those written."""
        return self.compiled - self.written


class Differences(Shown, dict[str, Difference]):
    """A dict from the names that occur to the `Difference` of each, which is shown as a table."""

    _columns = ("what became of it", "in program", "ring bytes written", "compiled", "more")

    def _rows(self):
        return [(name, *map(number, (*found, found.more))) for name, found in self.items()]


def differences(lowered: Any, compiled: Any, also: Iterable[Op] = ()) -> Differences:
    """The `Differences`: what became in `compiled` of each collective written in `lowered`.

    Both are what `collectives` takes, of one program. `also` holds an `Op` for each collective that
    the compiler is to insert; these count as written. `tensor.collectives` makes those of tensor
    parallelism. One of 8 devices in 12 trips, with `Array` from `shardwise.measure.hlo`:

        Op("all-gather", "", (Array("bf16", (16, 512)),), 8, trips=12, notes=("expected",))

    A collective is recognised by its kind, its elements and how many devices take part; one in a
    loop once for each trip, one of several arrays by each. Names:

    - "as written"; "combined": several arrays in one; "narrowed" or "widened": to another dtype;
    - "padded": so that all shares are alike, and what trims them again;
    - "all-reduce": instead of a gather or scatter, over several axes of a torus at once;
    - "divided": of arrays written whole that the compiler cuts along axes left to it;
    - "of equal rows": of which the compiler sends one;
    - "dropped": written several times or in a loop, and done fewer times; or in `also`, and absent;
    - "repeated": done more often than written;
    - "windowed": shares of a product's operand, which the compiler passes on beside the product;
    - "inserted": along axes left to the compiler, or outside of `jax.shard_map`;
    - "left over": none of these.

    `sum(d.written for d in found.values())` is what `lowered` and `also` send, and the same sum of
    `d.compiled` what `compiled` sends, both for the device that sends the most in `lowered`. Raises
    what `collectives` does (nothing by hand is no error here), and nothing for unlike programs.
    """
    if isinstance(lowered, jax.stages.Lowered):
        lowered = hlo.lowered(lowered)  # read here, since nothing in it need be written by hand
    written, sums = collectives(lowered), Differences()
    met = pairs((*written.ops, *also), collectives(compiled, written.device).ops)
    found = parted(met, lambda pair: pair[0])
    for name in filter(found.get, _NAMES):
        _, ops, *sizes = zip(*found[name], strict=True)
        sums[name] = Difference(len({*ops} - {""}), *map(sum, sizes))
    return sums


class _Piece:
    """One array of a collective, of `times` runs, each of which sends `bytes`.

    `whole` are the elements that a group's devices have together, or each. Written and compiled
    ones of one `key` are alike but in `width`, the bytes of an element.
    """

    def __init__(self, op: Op, array: Array):
        self.op, self.array, self.kind, self.times = op, array, op.kind, op.trips
        self.dims = [d for d in array.dims if d > 1]
        self.width = array.bytes / max(array.elements, 1)
        self.whole = array.elements * (op.group_size if op.kind == "all-gather" else 1)
        self.key = op.kind, self.whole, op.group_size
        self.bytes = dataclasses.replace(op, arrays=(array,), trips=1).ring_bytes
        self.is_combined = "combined" in op.notes
        self.does = _SUMS if op.kind == "all-reduce" else (op.kind,)
        *within, name = op.source.split("/")
        made = (op.kind in kinds for written, kinds in _BY_HAND.items() if name.startswith(written))
        self.is_by_hand = "shard_map" in within and any(made)

    def may_be(self, written):
        """Whether it may be by hand, as what the compiler tells no origin of, or is expected."""
        by_hand = "shard_map" in self.op.source or not self.op.source or self.is_combined
        return by_hand or "expected" in written.op.notes

    def is_like(self, written):
        """Whether it may be the same in another dtype."""
        return self.key == written.key and self.may_be(written)

    def differs_in_one(self, other):
        """Whether all sizes but one are alike, which may be 1 in one of them."""
        both = (self.array.dims, other.array.dims), (self.dims, other.dims)
        return any(len(a) == len(b) and sum(map(operator.ne, a, b)) == 1 for a, b in both)


# By what a compiled piece (m) is one that was written (w), the best reason first.
_RULES = {
    "as written": lambda m, w: m.is_like(w) and m.width == w.width and not m.is_combined,
    "combined": lambda m, w: m.is_like(w) and m.width == w.width,
    "narrowed": lambda m, w: m.is_like(w) and m.width < w.width,
    "widened": lambda m, w: m.is_like(w),
    "all-reduce": lambda m, w: w.kind in m.does and m.whole == w.whole and m.may_be(w),
    "padded": lambda m, w: (
        "padded" in m.op.notes and w.kind in m.does and w.whole < m.whole and m.differs_in_one(w)
    ),
    "divided": lambda m, w: (
        (m.is_by_hand or m.is_combined)
        and m.kind == w.kind
        and w.whole % m.whole == 0
        and m.differs_in_one(w)
    ),
    "of equal rows": lambda m, w: (
        m.is_by_hand
        and (m.kind, m.array.dtype) == (w.kind, w.array.dtype)
        and [] != m.dims == w.dims[1:]
    ),
}
# Which of several written ones comes first.
_ORDER = {
    "all-reduce": lambda w: _SUMS.index(w.kind),
    "padded": lambda w: -w.whole,
    "divided": lambda w: w.whole,
}
_NAMES = (*_RULES, "dropped", "repeated", "windowed", "inserted", "left over")


def pairs(written: Iterable[Op], compiled: Iterable[Op]) -> Iterator[tuple[str, str, float, float]]:
    """(reason's name, name of the op compiled or "", ring bytes written, compiled) of each written
    collective beside what it became; what has no fellow is beside nothing.
    """
    pool = parted(_pieces(written), lambda piece: piece.op.group_size)
    met, padded = set(), []
    made = sorted(_pieces(compiled), key=lambda piece: not piece.is_by_hand)
    for name, rule in _RULES.items():
        for piece in (piece for piece in made if piece.times):
            left = (f for f in pool.get(piece.op.group_size, ()) if f.times and rule(piece, f))
            for fellow in sorted(left, key=_ORDER.get(name, lambda w: 0)):
                if not (times := min(piece.times, fellow.times)):
                    break
                piece.times, fellow.times = piece.times - times, fellow.times - times
                met.add(fellow.key)
                padded += [piece] if name == "padded" else []
                yield name, piece.op.name, fellow.bytes * times, piece.bytes * times
    windows = [piece for piece in made if "windowed" in piece.op.notes]
    for piece in (piece for piece in made if piece.times):
        yield _of_nobody(piece, met, padded), piece.op.name, 0, piece.bytes * piece.times
    for fellow in (fellow for found in pool.values() for fellow in found if fellow.times):
        yield _of_none(fellow, met, windows), "", fellow.bytes * fellow.times, 0


def _pieces(ops):
    for op in ops:
        arrays = op.arrays
        if op.kind == "all-to-all":  # of each device's part an array, or of all one
            arrays = [Array(arrays[0].dtype, (sum(a.elements for a in arrays),))]
        yield from (_Piece(op, array) for array in arrays)


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
    parts = {window.array.elements for window in windows if fellow.kind in _SUMS}
    if any(fellow.whole // fellow.op.group_size % part == 0 for part in parts):
        return "windowed"
    is_known = fellow.key in met or "expected" in fellow.op.notes
    return "dropped" if is_known else "left over"
