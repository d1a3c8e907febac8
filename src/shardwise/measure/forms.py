"""Forms of collectives: what was made of those written, and how the chips exchange."""

from typing import NamedTuple

from . import tables
from .counts import Collectives, Op


class Form(NamedTuple):
    """The way in which a collective runs; see `Op` for each field."""

    kind: str
    written: tuple[str, ...]
    strategy: str
    asynchronous: bool
    notes: tuple[str, ...]


_COLUMNS = (
    "collective",
    "written as",
    "strategy",
    "in program",
    "times run",
    "ring bytes",
    "notes",
)


class Forms(dict[Form, Collectives]):
    """{form: the `Collectives` of it} of the forms that occur; shown as a table."""

    def _rows(self) -> list[tuple[str, ...]]:
        rows = []
        for form, found in self.items():
            notes = ["asynchronous"] * form.asynchronous + list(form.notes)
            written, numbers = ", ".join(form.written), (found.static, found.dynamic)
            sizes = [tables.number(n) for n in (*numbers, found.ring_bytes)]
            rows.append((form.kind, written, form.strategy, *sizes, ", ".join(notes)))
        return rows

    def __repr__(self) -> str:
        return tables.plain(_COLUMNS, self._rows()) if self else "no collectives"

    def _repr_html_(self) -> str:
        return tables.page(_COLUMNS, self._rows()) if self else "<p>no collectives</p>"


def by_form(found: Collectives) -> Forms:
    """{form: the `Collectives` of it}, in the order in which the forms are met.

    Of a program for TPUs: what does the work of what (`written`), by which of the compiler's
    strategies, and whether other work may stand between start and end.
    """
    parts: dict[Form, list[Op]] = {}
    for op in found.ops:
        form = Form(op.kind, op.written, op.strategy, op.asynchronous, op.notes)
        parts.setdefault(form, []).append(op)
    return Forms({form: Collectives(ops) for form, ops in parts.items()})
