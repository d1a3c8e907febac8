"""How answers are judged: run on devices, beside one device, and what a checker then says."""

import dataclasses
import functools
import html
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardwise import measure


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a checker found: true if the puzzle is solved, and a sentence to show.

    `solved` is None for a stub that nobody has edited yet.
    """

    solved: bool | None
    text: str

    def __bool__(self) -> bool:
        return self.solved is True

    @property
    def _head(self):
        return {True: "Solved", False: "Not yet", None: "Not solved yet"}[self.solved]

    def __repr__(self) -> str:
        return f"{self._head}: {self.text}"

    def _repr_html_(self) -> str:
        text = re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(self.text, quote=False))
        return f"<p><strong>{self._head}:</strong> {text}</p>"


class Wrong(Exception):
    """An answer is wrong; the message says how, with numbers."""


class NotYet(Exception):
    """An answer is still the stub."""


def puzzle(todo: str) -> Callable:
    """Make `check(answer)`, which returns the praise or raises `Wrong`, a checker of answers.

    `todo` is said to an unedited stub: None or ... as the answer, or as what it returns. What the
    answer raises is told, not raised. `check` is annotated with what the checker returns.
    """

    def decorate(check):
        @functools.wraps(check)
        def checker(answer):
            try:
                return Verdict(True, check(_filled(answer)))
            except NotYet:
                return Verdict(None, todo)
            except Wrong as wrong:
                return Verdict(False, str(wrong))
            except Exception as error:  # the reader's own, or what JAX says to an answer
                said = " ".join(str(error).split())
                said = said[:300] + " …" * (len(said) > 300)
                return Verdict(False, f"it raises {type(error).__name__}: {said}")

        return checker

    return decorate


def _filled(answer: Any) -> Any:
    """`answer`, raising `NotYet` where it is open: at once, or in what a call of it returns."""
    if callable(answer):
        return lambda *args: _given(answer(*args))
    return _given(answer)


def _given(answer):
    if isinstance(answer, P):  # on some releases of JAX a tuple
        return answer
    named = isinstance(answer, dict)
    parts = answer.values() if named else answer if isinstance(answer, list | tuple) else [answer]
    dots = any(x is ... or (isinstance(x, str) and x.strip() == "...") for x in parts)
    if dots or (not named and all(x is None for x in parts)):
        raise NotYet
    return answer


QUICK = {"xla_backend_optimization_level": 0}  # each program runs once or twice
in_one = functools.partial(jax.jit, compiler_options=QUICK)


def whole_numbers(seed: int, *shape: int) -> np.ndarray:
    """Small whole numbers in float32, whose sums are exact in any order."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def normal(seed: int, *shape: int) -> np.ndarray:
    """Standard normal draws in float32."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def compiled(function: Callable, *args: Any, **options: Any) -> jax.stages.Compiled:
    """`function` compiled for these arguments; right, and slow to run."""
    return in_one(function, **options).lower(*args).compile()


def on_each(
    function: Callable, mesh: Mesh, *args: Any, in_specs: Any = P("x"), out_specs: Any = P("x"),
    check: bool = True,
) -> jax.stages.Compiled:  # fmt: skip
    """`function` of one device's blocks, compiled for all devices of the mesh."""
    specs = dict(in_specs=in_specs, out_specs=out_specs, check_vma=check)
    return compiled(jax.shard_map(function, mesh=mesh, **specs), *args)


def require_equal(found: Any, expected: Any, where: str = "") -> None:
    """Raise `Wrong` where arrays differ at all, or in shape."""
    found, expected = _alike(found, expected, where)
    wrong = np.flatnonzero((found != expected).ravel())
    if wrong.size:
        at = tuple(int(i) for i in np.unravel_index(wrong[0], expected.shape))
        raise Wrong(
            f"{wrong.size:,} of {expected.size:,} numbers are wrong{where}; the first, at {at}, is "
            f"{found[at]:g} and should be {expected[at]:g}."
        )


def require_close(found: Any, expected: Any, what: str, tolerance: float = 1e-4) -> None:
    """Raise `Wrong` where arrays of a tree differ by `tolerance` of their largest entry."""
    if jax.tree.structure(found) != jax.tree.structure(expected):
        raise Wrong(f"{what} is to be a tree like {jax.tree.structure(expected)}.")
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        ours, theirs = _alike(ours, theirs, f" in {what}")
        off = np.abs(ours - theirs).max() / np.abs(theirs).max()
        if not off <= tolerance:
            ratio = np.vdot(ours, theirs) / np.vdot(theirs, theirs)
            raise Wrong(f"{what} is {ratio:.3g} times what it should be, off by up to {off:.0%}.")


def _alike(found, expected, where):
    """Both as arrays of NumPy; raise `Wrong` where they have different shapes."""
    found, expected = np.asarray(found), np.asarray(expected)
    if found.shape != expected.shape:
        here = f"over all devices{where}"
        raise Wrong(f"the shape is {found.shape} {here}, expected {expected.shape}.")
    return found, expected


def require_at_most(number: float, enough: float, what: str) -> None:
    """Raise `Wrong` where `number` is more than `enough`; the values are right by then."""
    if number > enough:
        raise Wrong(f"right values, {number:,.0f} {what}; {enough:,.0f} are enough.")


def require_sent(program: jax.stages.Compiled, enough: float, what: str = "ring bytes") -> float:
    """What a device sends in a ring; raise `Wrong` where it is more than `enough` bytes."""
    sent = measure.collectives(program).ring_bytes
    require_at_most(sent, enough, what)
    return sent
