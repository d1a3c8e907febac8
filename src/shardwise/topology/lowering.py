"""Programs lowered for chips that are not here, and their text."""

import re
import weakref
from collections.abc import Callable
from typing import Any

import jax

from shardwise import jaxprs

_PLACED = "annotate_device_placement"  # what XLA knows a memory by
_PLATFORMS: Any = weakref.WeakKeyDictionary()  # {program: for which platform it was lowered}


def lower(fn: Callable[..., Any], platform: str, args: Any, kwargs: Any) -> jax.stages.Lowered:
    """A jitted function, lowered for "tpu" or "cuda"; see `ChipMesh.lower`."""
    if not hasattr(fn, "trace"):
        raise TypeError(
            f"topology: mesh.lower takes a function made by jax.jit or rules.jit, and got "
            f"{type(fn).__name__}; jit it first."
        )
    traced = fn.trace(*args, **kwargs)
    if not isinstance(traced, jax.stages.Traced):  # nnx.jit's has no program to look at
        raise TypeError(
            f"topology: mesh.lower takes a function made by jax.jit or rules.jit, and this one is "
            f"made by {type(fn).__module__}; split a module's state off, and jit a function of it."
        )
    found = traced.lower(lowering_platforms=(platform,))
    # 0.7.2 does where there is no device to ask.
    if to_host(traced.jaxpr.jaxpr) and _PLACED not in found.as_text():
        raise NotImplementedError(
            f"topology: the program moves arrays to the host, and jax {jax.__version__} leaves "
            f"that out for chips that are not here: its memory would be wrong. Take a later one, "
            f"or a program that does not offload."
        )
    _PLATFORMS[found] = platform
    return found


def platform_of(lowered: jax.stages.Lowered) -> str | None:
    """The platform for which `lower` lowered a program; None where another function did."""
    return _PLATFORMS.get(lowered)


def to_host(jaxpr: Any) -> bool:
    """Whether a traced program moves arrays to the host's memory."""
    return any(
        eqn.primitive.name == "device_put" and "Host" in str(eqn.params["devices"])
        for eqn in jaxprs.every(jaxpr)
    )


def program_text(lowered: jax.stages.Lowered) -> str:
    """The text of the program, with the names of operations, but not who wrote and who called."""
    if not isinstance(lowered, jax.stages.Lowered):
        raise TypeError(
            f"topology.compile takes a lowered program, and got {type(lowered).__name__}; pass "
            f"mesh.lower(jitted, *abstract_arguments)."
        )
    text = lowered.as_text(debug_info=True)
    places = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, flags=re.M))
    body = "\n".join(line for line in text.splitlines() if not line.startswith("#loc"))
    return re.sub(r"#loc\d*", lambda m: _named(places, m[0]) or "unknown", body)


def _named(places, alias):
    """The name that a place gives to an operation, without the calls that lead there."""
    found = re.fullmatch(r'("(?:[^"\\]|\\.)*")(?:\((#loc\d*)\))?', places[alias])
    if found is None:
        return None
    within = _named(places, found[2]) if found[2] else None
    return f"{found[1]}({within})" if within else found[1]
