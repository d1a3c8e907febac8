"""Identities that model code may carry; other modules give them a meaning for one trace.

A model says *what* a value is; where it lives is decided elsewhere. Unbound, each mark returns
its argument. A module that acts on them binds a function for the time of a trace:

    with marks.bind(constrain=lambda x, name: ...):
        jaxpr = jax.make_jaxpr(loss)(params, batch)

Bindings belong to one thread (a `contextvars.ContextVar`) and nest. They act while Python traces,
so a `jax.jit` cached without them does not see them: bind inside the function being traced.
"""

import contextlib
import contextvars
import types

import jax.numpy as jnp

_MEANINGS = contextvars.ContextVar("shardwise_marks", default=types.MappingProxyType({}))


def constrain(x, name):
    """`x`, an activation known as `name`: a place where a layout may be pinned."""
    return _apply("constrain", x, name)


def use(weights):
    """`weights`, a pytree, at the place where one layer's weights are used.

    A scanned stack calls it on the slice that its body receives, inside the rematerialised part:
    the place where FSDP gathers a layer.
    """
    return _apply("use", weights)


def stage_boundary(x):
    """`x`, where one pipeline stage ends and the next begins: k marks make k+1 stages."""
    return _apply("stage_boundary", x)


def index(axis, size):
    """The numbers int32 [size], in the whole batch, of a part's entries along `axis`.

    `axis` is "rows", or "sequence". Unbound, the part is the whole: 0 to size - 1. A draw that
    depends on its key and on these numbers alone is the same however the batch is divided.
    """
    meaning = _MEANINGS.get().get("index")
    return jnp.arange(size, dtype=jnp.int32) if meaning is None else meaning(axis, size)


@contextlib.contextmanager
def bind(**meanings):
    """Give marks a meaning within the block: `bind(use=gather)`; the others keep theirs.

    Raises:
      ValueError: a keyword that is no mark.
    """
    known = {"constrain", "index", "stage_boundary", "use"}
    if unknown := set(meanings) - known:
        raise ValueError(f"marks.bind: no such mark {sorted(unknown)}; there are {sorted(known)}.")
    token = _MEANINGS.set({**_MEANINGS.get(), **meanings})
    try:
        yield
    finally:
        _MEANINGS.reset(token)


def _apply(mark, x, *args):
    meaning = _MEANINGS.get().get(mark)
    return x if meaning is None else meaning(x, *args)
