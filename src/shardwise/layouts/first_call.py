"""The first call of a layout's function with real arrays: its loss is judged, then divided."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax

from shardwise.layouts.layout import Layout
from shardwise.objective import beforehand


class Judging:
    """A function of `(params, ..., batch, *args, key=None)` that judges its loss when first called.

    All else that it has, such as `lower`, is the function's own: what is lowered is not judged.
    """

    def __init__(
        self, run: Callable, layout: Layout, loss: Callable, has_aux: bool, aux: Any, who: str
    ):
        self._run, self._waits, self._who = run, True, who
        self._judge = functools.partial(judge, layout, loss, has_aux=has_aux, aux=aux)
        self._batch = 2 if who == "layouts.step" else 1

    def __call__(self, params, *args, key=None):
        batch, *further = args[self._batch - 1 :]
        reason = None
        if self._waits:
            self._waits = False
            reason = self._judge(params, batch, tuple(further), key)
        out = self._run(params, *args, key=key)  # which raises what is wrong with the loss itself
        if reason is not None:
            warn(reason, self._who)
        return out

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._run, name)


def judge(
    layout: Layout,
    loss: Callable,
    params: Any,
    batch: Any,
    args: tuple = (),
    key: Any = None,
    has_aux: bool = False,
    aux: Any = "sum",
) -> str | None:
    """The reason why a loss was not judged; None where it divides as the layout divides its batch.

    Raises:
      Indivisible: it does not.
    """
    ways = ways_of(layout)
    leaves = jax.tree.leaves((params, batch, args, key))
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        return "within a trace of the caller's there are no numbers" if ways else None
    parts = layout.exact or layout.size_of_rows() * layout.microbatches
    rows = beforehand.unit_of(batch) // parts
    if not ways or not rows or any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        return None
    case = beforehand.Case(loss, params, batch, args, key, has_aux, aux, mesh=layout.auto)
    return beforehand.judge(case, ways, rows)


def ways_of(layout: Layout) -> tuple[str, ...]:
    """The ways in which a layout divides batches; none where the compiler sees whole arrays."""
    if layout.exact:
        return ("microbatches",) if layout.exact > 1 else ()
    ways = []
    if layout.by_hand and layout.size_of_rows() > 1:
        ways.append("devices")
    if layout.microbatches > 1:
        ways.append("microbatches")
    if layout.by_hand and layout.size("context") > 1:
        ways.append("sequence")
    return tuple(ways)


def warn(reason: str, who: str) -> None:
    """Say that a loss was not judged, and what its author can do."""
    warnings.warn(
        f"{who}: whether the loss is the same function where its batch is divided was not judged: "
        f"{reason}. Run objective.check(loss, params, batch) once, or say check=False.",
        stacklevel=3,
    )
