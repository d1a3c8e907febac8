"""Marks in model code: functions that do what one device does, until others stand in for them.

A model says *what* a value is; where it lives is decided elsewhere. Unbound, a mark returns its
argument, or does what one device does. A *meaning* is a function that stands in for a mark during
one trace; it gets the mark's arguments, and may talk to other devices:

    with marks.bind(constrain=lambda x, name: ...):
        jaxpr = jax.make_jaxpr(loss)(params, batch)

A *part* is the share of a batch that one device computes at a time: rows, of a microbatch perhaps,
and some of the sequence where that is cut. Unbound, the part is the whole batch.

Bindings belong to one thread (a coroutine does not hold one across an await) and nest. They act
while Python traces, and are part of the key under which JAX keeps what it traced: a scanned body, a
rematerialised layer or a jitted block is traced again under other meanings, and under equal ones it
is not. Two meanings that compare equal must therefore do the same; one that records its calls has
to be a new object in each `bind`. In what is no Python any more, such as a jaxpr or an exported
program, marks cannot be bound.
"""

import contextlib
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

__all__ = [
    "Places", "attend", "bind", "causal", "constrain", "experts", "index", "kernels", "layer",
    "local", "places", "seen", "stage_boundary", "total", "turns", "use",
]  # fmt: skip

_BOUND = jax.make_user_context(frozenset())  # {(mark, key of its meaning)}, for JAX's caches too
KNOWN = {"attend", "constrain", "experts", "index", "layer", "local", "stage_boundary"}
KNOWN |= {"total", "use"}


@contextlib.contextmanager
def bind(**meanings: Callable) -> Iterator[None]:
    """A context manager that gives marks a meaning: `bind(use=gather)`; the others keep theirs.

    A meaning gets all arguments of its mark by position, defaults filled in. It replaces the one
    before, and stays bound while it runs: one that calls its own mark is a RecursionError.

    Raises:
      ValueError: a keyword is no mark that takes a meaning. Those are attend, constrain, experts,
        index, layer, local, stage_boundary, total and use.
      TypeError: a meaning has no hash, by which JAX's caches tell it from another.
    """
    if unknown := set(meanings) - KNOWN:
        raise ValueError(f"marks.bind: no such mark {sorted(unknown)}; there are {sorted(KNOWN)}.")
    bound = _meanings() | meanings  # held here, since keys do not
    try:
        value = frozenset((mark, _key(meaning)) for mark, meaning in bound.items())
    except TypeError as error:
        raise TypeError(
            f"marks.bind: a meaning of {sorted(meanings)} has no hash ({error}), and JAX's caches "
            f"need one; give a function, or a frozen dataclass of hashable fields."
        ) from error
    with _BOUND(value):
        yield


def _key(meaning):
    # JAX's caches keep keys alive, and a function may hold arrays of a trace that is over.
    by_identity = type(meaning).__eq__ is object.__eq__
    return weakref.ref(meaning) if by_identity else meaning


def _meanings():
    return {mark: x() if isinstance(x, weakref.ref) else x for mark, x in _BOUND.value}


def _meaning(mark, unbound=lambda x, *_: x):
    return _meanings().get(mark, unbound)


def constrain(x: Any, name: str) -> Any:
    """`x`, an array, the activation known as `name`: a place where a layout may be pinned."""
    return _meaning("constrain")(x, name)


def use(weights: Any) -> Any:
    """`weights`, a pytree, at the place where one layer's weights are used.

    A scanned stack calls it on its body's slice, inside what is rematerialised: FSDP gathers there.
    """
    return _meaning("use")(weights)


def layer(body: Callable) -> Callable:
    """`body`, the function of one layer: where a layout decides what is kept for its backward pass.

    A stack calls it on what its scan runs, and `use` is called inside. The body's first argument is
    what enters the layer, the carry of a scan.
    """
    return _meaning("layer")(body)


def stage_boundary(x: Any) -> Any:
    """`x`, a pytree, where one pipeline stage ends and the next begins: k marks make k+1 stages.

    What is computed from `x` is the next stage's. Its arrays, one at least, may have any shapes, of
    their own at each mark. Parameters and batch may be read in every stage, and what else a later
    stage reads of an earlier one travels with `x`. A mark in a loop is a ValueError of the
    pipeline: each stage has a scan of its own.
    """
    return _meaning("stage_boundary")(x)


def index(axis: str, size: int) -> jax.Array:
    """The indices int32 [size] in the whole batch of the `size` entries of this part along `axis`.

    `axis` is "rows" or "sequence". Unbound they are 0 to size - 1. A random draw that depends on
    its key and on these indices alone is the same however the batch is divided; under `jax.vmap`
    over them, from a threefry key only ("rbg" draws all from its first key: use `jax.lax.map`).
    """
    return _meaning("index", lambda axis, size: jnp.arange(size, dtype=jnp.int32))(axis, size)


def total(x: Any, axes: tuple[str, ...] = ("rows", "sequence")) -> Any:
    """The sum of `x`, statistics of a part, over the parts into which `axes` cut the batch.

    Unbound it is `x`, a pytree; `axes` are "rows", "sequence" or both. No gradient flows through
    it: each part would add its gradient of the one sum. Over "rows" in several microbatches, none
    of which sees the others, it is a ValueError while the loss is traced.
    """
    return _meaning("total")(jax.lax.stop_gradient(x), axes)


def local(x: Any) -> Any:
    """`x`, a pytree, declared to depend on the rows of one part of the batch only, on purpose.

    A part's own statistics are such, as in batch norm by device, or comparisons among its own rows.
    Without this mark, `objective.check` refuses a loss in which rows depend on each other.
    """
    return _meaning("local")(x)


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

    A token makes k choices. `chosen` int [b, s, k] are the experts' numbers, below `experts`, and
    those of one token differ; `weights` [b, s, k] are their factors in the sum y. `stacked` is a
    pytree with a leading axis of experts. `apply` has to take two kinds of calls, of which a trace
    makes one: `apply(stacked, xs)` with a buffer of c slots for each expert, xs [experts, c, e], or
    `apply(stacked, xs, sizes)` with xs [rows, e] sorted into groups of sizes [experts], as
    `jax.lax.ragged_dot` takes them. It returns a row for every row of xs. Unbound, it gets buffers
    if there is a capacity, and groups if there is none.

    With a `capacity` an expert has capacity·s·k/experts slots (rounded up, at most s) for each row
    of the batch, filled in the order of tokens (of `index` [b, s], where memory has another). A
    choice without a slot is dropped: it adds nothing to y, and is False in `kept`. None drops
    nothing. What is dropped depends on the row alone, whatever the mesh and the microbatches.

    In a meaning, `stacked` has the experts of one device.

    Raises:
      ValueError: shapes that do not fit each other, or a capacity that is not positive.
    """
    from shardwise.experts import on_one_device  # here, since that room knows marks

    meaning = _meaning("experts", on_one_device)
    return meaning(x, chosen, weights, apply, stacked, experts, capacity, index)


class Places(NamedTuple):
    """The places of tokens, arrays int32 [b, s]; whatever reorders tokens reorders these too.

    Fields:
      positions: the token's place in its own document, with which rotary angles grow.
      documents: the number of its document, of those packed into one row; none sees another.
      index: its place in the whole sequence, which causal order follows whatever memory's is.
    """

    positions: jax.Array
    documents: jax.Array
    index: jax.Array


def causal(query: Places, key: Places) -> jax.Array:
    """The default mask of `attend`, by which a token sees its own document, up to itself."""
    return (key.index <= query.index) & (key.documents == query.documents)


def places(batch: Mapping[str, Any] | None, rows: int, size: int) -> Places:
    """The `Places` of tokens [rows, size], from a batch's "positions", "documents" and "index".

    `batch` is a dict or None. What it lacks is filled in as if each row were one document; an
    "index" that it lacks is `marks.index("sequence", size)`.

    Raises:
      ValueError: one of the three is not [rows, size].
    """
    given = {name: jnp.asarray(batch[name]) for name in Places._fields if batch and name in batch}
    if "index" not in given:
        given["index"] = jnp.broadcast_to(index("sequence", size)[None], (rows, size))
    whole = given["index"]
    found = {"positions": whole, "documents": jnp.zeros_like(whole)} | given
    for name, x in found.items():
        if x.shape != (rows, size):
            raise ValueError(
                f"marks.places: {name!r} of the batch is {list(x.shape)}; expected one number for "
                f"each token, {[rows, size]}."
            )
    return Places(**found)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, places: Places, mask: Callable = causal
) -> jax.Array:
    """Attention [b, s, h, v] of q [b, s, h, d] to k [b, t, kv_heads, d] and v [b, t, kv_heads, v].

    Softmax is in float32. A kv head serves h / kv_heads query heads. `mask(query, key)`, a function
    of two `Places` whose fields are [b, s, 1] and [b, 1, t], tells what is seen, as booleans that
    broadcast to [b, s, t]. Scores are divided by √d. A query that sees no key yields NaN.

    `places` [b, s] are of the tokens of q, and unbound those of k and v too (t = s). A meaning that
    cuts the sequence gets the q, k, v and places of its part.
    """
    return _meaning("attend", _attend)(q, k, v, places, mask)


def seen(query: Places, key: Places, mask: Callable) -> jax.Array:
    """Booleans that broadcast to [b, s, t]: what `mask`, as in `attend`, tells of `query`, whose
    fields are [b, s], and `key`, whose are [b, t].
    """
    query, key = (Places(*(jnp.expand_dims(x, a) for x in p)) for p, a in ((query, 2), (key, 1)))
    return mask(query, key)


def _attend(q, k, v, places, mask):
    b, s, h, d = q.shape
    q = q.reshape(b, s, k.shape[2], h // k.shape[2], d)
    scores = jnp.einsum("bskgd,btkd->bkgst", q, k).astype(jnp.float32) * d**-0.5
    visible = seen(places, places, mask)[:, None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("bkgst,btkd->bskgd", weights, v).reshape(b, s, h, v.shape[-1])


# What a compiled program does not tell `measure`: turns of loops, FLOPs of kernels. Each is a named
# scope, which changes nothing; a program carries the names of its scopes.
_TURNS = re.compile(r"\bturns ([\d,]+) of (\d+)\)*/while$")
_KERNELS = re.compile(r".*\bkernels((?: \w+=\d+)+)")


def turns(times: int | Sequence[int], of: int = 1) -> AbstractContextManager:
    """The context of a loop that a program enters `of` times, with `times` runs of its body in all.

    Programs do not tell the trips of a loop that depend on data, and `measure` reads them here: one
    number, or one for each device along the mesh axis where they differ. A task of a pipeline of 22
    ticks may run 8 times on the devices of the first stage, and never on those of the second:

        with marks.turns([8, 0], of=22):
            carry = jax.lax.fori_loop(0, is_now.astype(int), body, carry)

    All sequences of a program have one length (or `measure` raises a ValueError) and devices in one
    order; `measure` counts for the one that does most.
    """
    each = [times] if isinstance(times, int) else times
    return jax.named_scope(f"turns {','.join(str(int(n)) for n in each)} of {of}")


def turns_said(name: str) -> tuple[Fraction, ...] | None:
    """The turns of a loop per run, on each device, by its operation's name; None if not said."""
    said = _TURNS.search(name)
    return tuple(Fraction(int(n), int(said[2])) for n in said[1].split(",")) if said else None


def kernels(**flops: float) -> AbstractContextManager:
    """The context of Pallas kernels for TPUs that do not state their FLOPs by `pl.CostEstimate`.

    `with marks.kernels(flash=1e9):` stands around the kernel's call, in the function that JAX
    traces. Of the compiled program, `measure.flops` then counts 1e9 for each run, on one device, of
    a kernel whose name contains "flash".
    """
    return jax.named_scope(" ".join(["kernels", *(f"{k}={int(n)}" for k, n in flops.items())]))


def kernel_said(name: str) -> int | None:
    """The FLOPs of a kernel by its operation's name; None if not said."""
    said = _KERNELS.match(name)
    told = re.findall(r"(\w+)=(\d+)", said[1]) if said else []
    return next((int(flops) for part, flops in told if part in name[said.end() :]), None)
