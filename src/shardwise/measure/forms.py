"""What was made of the collectives that were written, and how the chips exchange."""

from typing import NamedTuple

from .counts import Collectives, Op


class Form(NamedTuple):
    """How a collective runs; see `Op` for each."""

    kind: str
    written: tuple[str, ...]
    strategy: str
    asynchronous: bool
    notes: tuple[str, ...]


def by_form(found: Collectives) -> dict[Form, Collectives]:
    """{form: the `Collectives` of it}, in the order in which the forms are met.

    Of a program for TPUs: what does the work of what (`written`), by which of the compiler's
    strategies, and whether other work may stand between start and end.
    """
    parts: dict[Form, list[Op]] = {}
    for op in found.ops:
        form = Form(op.kind, op.written, op.strategy, op.asynchronous, op.notes)
        parts.setdefault(form, []).append(op)
    return {form: Collectives(ops) for form, ops in parts.items()}
