"""What a checker says, and what becomes of stubs, errors and wrong answers."""

import dataclasses
import functools
import html
import re
from collections.abc import Callable
from typing import Any

from jax.sharding import PartitionSpec


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
    def head(self) -> str:
        return {True: "Solved:", False: "Not yet:", None: "Not solved yet:"}[self.solved]

    def __repr__(self) -> str:
        return f"{self.head} {self.text}"

    def _repr_html_(self) -> str:
        text = re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(self.text, quote=False))
        return f"<p><strong>{self.head}</strong> {text}</p>"


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
                return Verdict(True, check(_asked(answer)))
            except NotYet:
                return Verdict(None, todo)
            except Wrong as wrong:
                return Verdict(False, str(wrong))
            except Exception as error:  # the reader's own, or what JAX says to an answer
                said = " ".join(str(error).split())
                said = said if len(said) <= 300 else said[:300] + " …"
                return Verdict(False, f"it raises {type(error).__name__}: {said}")

        return checker

    return decorate


def _asked(answer: Any) -> Any:
    """`answer`, raising `NotYet` where it is open: at once, or when it is called."""
    if _is_open(answer):
        raise NotYet
    if not callable(answer):
        return answer

    def asked(*args):
        out = answer(*args)
        if _is_open(out):
            raise NotYet
        return out

    return asked


def _is_open(answer):
    if isinstance(answer, PartitionSpec):  # on some releases of JAX a tuple
        return False
    if isinstance(answer, dict):
        return any(map(_is_dots, answer.values()))
    if isinstance(answer, list | tuple):
        return any(map(_is_dots, answer)) or all(x is None for x in answer)
    return answer is None or _is_dots(answer)


def _is_dots(x):
    return x is ... or (isinstance(x, str) and x.strip() == "...")
