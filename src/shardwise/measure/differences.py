"""Differences in bytes, by name: what a compiler made of the collectives that were written."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from . import pairing, tables
from .communication import collectives
from .counts import Op

_COLUMNS = ("what became of it", "in program", "ring bytes written", "compiled", "more")


class Difference(NamedTuple):
    """Collectives of the compiled program, and ring bytes of a device: `written`, `compiled`."""

    static: int
    written: float
    compiled: float

    @property
    def more(self) -> float:
        """Bytes that the compiled program sends beyond those written."""
        return self.compiled - self.written


class Differences(dict[str, Difference]):
    """{name: the `Difference`} of those that occur; shown as a table."""

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (name, str(d.static), *(tables.number(n) for n in (d.written, d.compiled, d.more)))
            for name, d in self.items()
        ]

    def __repr__(self) -> str:
        return tables.plain(_COLUMNS, self._rows()) if self else "no collectives"

    def _repr_html_(self) -> str:
        return tables.page(_COLUMNS, self._rows()) if self else "<p>no collectives</p>"


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
    found: dict[str, list[pairing.Pair]] = {}
    for pair in pairing.pairs(written, made):
        found.setdefault(pair.name, []).append(pair)
    return Differences({name: _sum(found[name]) for name in pairing.NAMES if name in found})


def _sum(found):
    names = {pair.op for pair in found if pair.op}
    written, compiled = (sum(pair[i] for pair in found) for i in (2, 3))
    return Difference(len(names), written, compiled)
