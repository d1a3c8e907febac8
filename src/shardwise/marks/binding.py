"""Meanings of marks, bound for the time of a trace, and part of what JAX's caches go by."""

import contextlib
import contextvars
import types
import weakref
from collections.abc import Callable, Iterator

import jax

_MEANINGS = contextvars.ContextVar("shardwise_marks", default=types.MappingProxyType({}))
_TRACED_UNDER = jax.make_user_context(None)  # the same, hashable, for JAX's caches
KNOWN = {"attend", "constrain", "experts", "index", "layer", "local", "stage_boundary"}
KNOWN |= {"total", "use"}


@contextlib.contextmanager
def bind(**meanings: Callable) -> Iterator[None]:
    """Give marks a meaning within the block: `bind(use=gather)`; the others keep theirs.

    Raises:
      ValueError: a keyword that is no mark.
      TypeError: a meaning without a hash, by which JAX's caches could not tell it from another.
    """
    if unknown := set(meanings) - KNOWN:
        raise ValueError(f"marks.bind: no such mark {sorted(unknown)}; there are {sorted(KNOWN)}.")
    bound = {**_MEANINGS.get(), **meanings}
    try:
        value = frozenset((mark, _key(meaning)) for mark, meaning in bound.items())
    except TypeError as error:
        raise TypeError(
            f"marks.bind: a meaning of {sorted(meanings)} has no hash ({error}), and JAX's caches "
            f"need one; give a function, or a frozen dataclass of hashable fields."
        ) from error
    token = _MEANINGS.set(bound)
    try:
        with _TRACED_UNDER(value or None):
            yield
    finally:
        _MEANINGS.reset(token)


def meaning_of(mark: str) -> Callable | None:
    """The meaning that is bound to `mark` here; None where nothing is."""
    return _MEANINGS.get().get(mark)


def _key(meaning):
    """The key of a meaning in JAX's caches, which keep no function alive that is told by its
    identity alone: it may hold arrays of a trace that is over.
    """
    by_identity = type(meaning).__eq__ is object.__eq__
    return weakref.ref(meaning) if by_identity else meaning


def _apply(mark, x, *args):
    meaning = meaning_of(mark)
    return x if meaning is None else meaning(x, *args)
