"""Identities that model code may carry; other modules give them a meaning for one trace.

A model says *what* a value is; where it lives is decided elsewhere. Unbound, each mark returns
its argument, or does what one device does. A module that acts on them binds a function for the
time of a trace:

    with marks.bind(constrain=lambda x, name: ...):
        jaxpr = jax.make_jaxpr(loss)(params, batch)

Bindings belong to one thread and nest. They act while Python traces, and are part of the key under
which JAX keeps what it traced: a scanned body, a rematerialised layer or a jitted block that was
traced under other meanings is traced again, under equal ones it is not. Two meanings that compare
equal must therefore do the same; one that records its calls has to be a new object in each `bind`.
Only what is no Python any more, such as a jaxpr or an exported program, keeps its marks to itself.
"""

from shardwise.marks.attention import Places, attend, causal, places, seen
from shardwise.marks.binding import _apply as _apply  # shown by a chapter
from shardwise.marks.binding import (
    bind,
    constrain,
    experts,
    index,
    layer,
    local,
    stage_boundary,
    total,
    use,
)
from shardwise.marks.counting import kernels, turns

__all__ = [
    "Places",
    "attend",
    "bind",
    "causal",
    "constrain",
    "experts",
    "index",
    "kernels",
    "layer",
    "local",
    "places",
    "seen",
    "stage_boundary",
    "total",
    "turns",
    "use",
]
