"""The marks, and their meanings: bound for the time of a trace, part of what JAX's caches go by."""

import contextlib
import contextvars
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

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


def constrain(x: Any, name: str) -> Any:
    """`x`, an activation known as `name`: a place where a layout may be pinned."""
    return _apply("constrain", x, name)


def use(weights: Any) -> Any:
    """`weights`, a pytree, at the place where one layer's weights are used.

    A scanned stack calls it on the slice that its body receives, inside the rematerialised part:
    the place where FSDP gathers a layer.
    """
    return _apply("use", weights)


def layer(body: Callable) -> Callable:
    """`body`, the function of one layer: where a layout decides what is kept for its backward pass.

    A stack calls it on what its scan runs, and `use` is called inside. The body's first argument is
    what enters the layer, the carry of a scan.
    """
    return _apply("layer", body)


def stage_boundary(x: Any) -> Any:
    """`x`, where one pipeline stage ends and the next begins: k marks make k+1 stages."""
    return _apply("stage_boundary", x)


def index(axis: str, size: int) -> jax.Array:
    """The numbers int32 [size], in the whole batch, of a part's entries along `axis`.

    `axis` is "rows", or "sequence". Unbound, the part is the whole: 0 to size - 1. A draw that
    depends on its key and on these numbers alone is the same however the batch is divided.
    """
    meaning = meaning_of("index")
    return jnp.arange(size, dtype=jnp.int32) if meaning is None else meaning(axis, size)


def total(x: Any, axes: tuple[str, ...] = ("rows", "sequence")) -> Any:
    """The sum of `x`, statistics of a part, over all parts into which these axes are divided.

    Unbound, the part is the whole. No gradient flows through it: each part would add its own of a
    sum that all of them see.
    """
    return _apply("total", jax.lax.stop_gradient(x), axes)


def local(x: Any) -> Any:
    """`x`, a pytree, made of rows of one part of the batch alone, where that is meant.

    So are a part's own statistics, or comparisons of its own rows. Without this mark, a loss whose
    rows look at each other is an error where they are divided; what `x` makes of the batch is then
    taken for the part's own.
    """
    return _apply("local", x)


def experts(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    apply: Callable,
    stacked: Any,
    experts: int,
    capacity: float | None = None,
    index: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(y [b, s, e], kept bool [b, s, k]): tokens x [b, s, e] through the experts that they chose.

    `chosen` int [b, s, k] are numbers below `experts`, no two of a token alike (buffers have room
    for no more), `weights` [b, s, k] those of the sum over a token's choices; `stacked` is a pytree
    with a leading axis of experts. `apply(stacked, xs)` is called with xs [experts, c, e], and
    `apply(stacked, xs, sizes)` with xs [rows, e] in groups of sizes [experts], as
    `jax.lax.ragged_dot` takes them; each returns what it makes of every row.

    With a `capacity` an expert has capacity·s·k/experts slots for each row of the batch, in the
    order of tokens (of `index` [b, s], where memory has another); a choice without a slot adds
    nothing to y, and `kept` says so. None drops nothing. Who is dropped depends on the row alone:
    it is the same on every mesh, and in every microbatch.

    A meaning receives the same, with the experts' weights that one device has.
    """
    meaning = meaning_of("experts")
    if meaning is None:
        # Imported here: that room knows marks, and these know of it no more than this.
        from shardwise.experts import on_one_device as meaning
    return meaning(x, chosen, weights, apply, stacked, experts, capacity, index)
