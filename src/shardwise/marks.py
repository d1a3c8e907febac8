"""Identities that model code may carry; other modules give them a meaning for one trace.

A model says *what* a value is; where it lives is decided elsewhere. Unbound, each mark returns
its argument, or does what one device does. A module that acts on them binds a function for the
time of a trace:

    with marks.bind(constrain=lambda x, name: ...):
        jaxpr = jax.make_jaxpr(loss)(params, batch)

Bindings belong to one thread (a coroutine does not hold one across an await) and nest. They act
while Python traces, and are part of the key under which JAX keeps what it traced: a scanned body, a
rematerialised layer or a jitted block is traced again under other meanings, and under equal ones it
is not. Two meanings that compare equal must therefore do the same; one that records its calls has
to be a new object in each `bind`. Only what is no Python any more, such as a jaxpr or an exported
program, keeps its marks to itself.
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
    "local", "places", "seen", "stage_boundary", "total", "use",
]  # fmt: skip

_BOUND = jax.make_user_context(frozenset())  # {(mark, key of its meaning)}, for JAX's caches too
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
    """`x`, an activation known as `name`: a place where a layout may be pinned."""
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
    """`x`, where one pipeline stage ends and the next begins: k marks make k+1 stages."""
    return _meaning("stage_boundary")(x)


def index(axis: str, size: int) -> jax.Array:
    """The numbers int32 [size], in the whole batch, of a part's entries along `axis`.

    `axis` is "rows", or "sequence". Unbound, the part is the whole: 0 to size - 1. A draw that
    depends on its key and on these numbers alone is the same however the batch is divided.
    """
    return _meaning("index", lambda axis, size: jnp.arange(size, dtype=jnp.int32))(axis, size)


def total(x: Any, axes: tuple[str, ...] = ("rows", "sequence")) -> Any:
    """The sum of `x`, statistics of a part, over all parts into which these axes are divided.

    Unbound, the part is the whole. No gradient flows through it: each part would add its own of a
    sum that all of them see.
    """
    return _meaning("total")(jax.lax.stop_gradient(x), axes)


def local(x: Any) -> Any:
    """`x`, a pytree, made of rows of one part of the batch alone, where that is meant.

    So are a part's own statistics, or comparisons of its own rows. Without this mark, a loss whose
    rows look at each other is an error where they are divided.
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
    from shardwise.experts import on_one_device  # here, since that room knows marks

    meaning = _meaning("experts", on_one_device)
    return meaning(x, chosen, weights, apply, stacked, experts, capacity, index)


class Places(NamedTuple):
    """The places of tokens, each int32 [b, s]; whatever cuts or reorders tokens does so to these.

    positions: in the token's own document, what rotary angles grow with;
    documents: the number of the document, of those packed into one row; none sees another;
    index: in the whole sequence, by which causal order goes, whatever the order in memory.
    """

    positions: jax.Array
    documents: jax.Array
    index: jax.Array


def causal(query: Places, key: Places) -> jax.Array:
    """The default mask of attention: a token sees its own document, up to itself."""
    return (key.index <= query.index) & (key.documents == query.documents)


def places(batch: Mapping[str, Any] | None, rows: int, size: int) -> Places:
    """The `Places` of a batch's tokens [rows, size], as its "positions", "documents" and "index".

    What it does not have is that of rows which are one document each; "index" is what
    `marks.index` says.

    Raises:
      ValueError: one of the three is of another shape.
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
    """Attention [b, s, h, d] of q [b, s, h, d] to k and v [b, t, kv_heads, d], softmax in float32.

    A kv head serves h / kv_heads query heads. `mask(query, key)`, a function of two `Places` whose
    fields are [b, s, 1] and [b, 1, t], tells what is seen, as booleans that broadcast to
    [b, s, t]. Every query must see a key: one that sees none yields NaN.

    A meaning receives the same; where it cuts the sequence, `places` are of its own tokens.
    """
    return _meaning("attend", _attend)(q, k, v, places, mask)


def seen(query: Places, key: Places, mask: Callable) -> jax.Array:
    """`mask`, bool [b, s, t], of the places of queries [b, s] and of keys [b, t]."""
    query, key = (Places(*(jnp.expand_dims(x, a) for x in p)) for p, a in ((query, 2), (key, 1)))
    return mask(query, key)


def _attend(q, k, v, places, mask):
    b, s, h, d = q.shape
    q = q.reshape(b, s, k.shape[2], h // k.shape[2], d)
    scores = jnp.einsum("bskgd,btkd->bkgst", q, k).astype(jnp.float32) * d**-0.5
    visible = seen(places, places, mask)[:, None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("bkgst,btkd->bskgd", weights, v).reshape(b, s, h, d)


# What a compiled program does not tell `measure`: turns of loops, FLOPs of kernels. Each is a named
# scope, which changes nothing; a program carries the names of its scopes.
_TURNS = re.compile(r"\bturns ([\d,]+) of (\d+)\)*/while$")
_KERNELS = re.compile(r".*\bkernels((?: \w+=\d+)+)")


def turns(times: int | Sequence[int], of: int = 1) -> AbstractContextManager:
    """The scope of a loop whose body runs `times` in `of` runs of the loop.

    So does a task of a pipeline of 22 ticks that runs 8 times on the first device, and never on the
    second:

        with marks.turns([8, 0], of=22):
            carry = jax.lax.fori_loop(0, is_now.astype(int), body, carry)

    Of devices that differ (in one order in all scopes of a program), the one that does most counts.
    """
    each = [times] if isinstance(times, int) else times
    return jax.named_scope(f"turns {','.join(str(int(n)) for n in each)} of {of}")


def turns_said(name: str) -> tuple[Fraction, ...] | None:
    """The turns of a loop per run, on each device, by its operation's name; None if not said."""
    said = _TURNS.search(name)
    return tuple(Fraction(int(n), int(said[2])) for n in said[1].split(",")) if said else None


def kernels(**flops: int) -> AbstractContextManager:
    """The scope of Pallas kernels that do not state their FLOPs, `{a part of its name: FLOPs}`.

    Of one run on one device, as `pl.CostEstimate` says it for a kernel that one writes oneself.
    """
    return jax.named_scope(" ".join(["kernels", *(f"{k}={n}" for k, n in flops.items())]))


def kernel_said(name: str) -> int | None:
    """The FLOPs of a kernel by its operation's name; None if not said."""
    said = _KERNELS.match(name)
    told = re.findall(r"(\w+)=(\d+)", said[1]) if said else []
    return next((int(flops) for part, flops in told if part in name[said.end() :]), None)
