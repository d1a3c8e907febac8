"""Programs lowered for chips that are not here, and their text."""

import re
from collections.abc import Callable
from typing import Any

import jax

from shardwise import jaxprs

_PLACED = "annotate_device_placement"  # what XLA knows a memory by


def lower(fn: Callable, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    """A jitted function, lowered for TPUs with abstract arguments; nothing is allocated.

    `fn` is made by `jax.jit` or `rules.jit`, with shardings of `ChipMesh.abstract`. Of arguments
    only shapes, dtypes and shardings count, as in `jax.ShapeDtypeStruct`; the compiler lays out
    those that have no sharding, and at least one has to have one. Whether a loss divides is not
    judged here, where there are no numbers: `objective.check` tells, on any device.

    Raises:
      TypeError: `fn` is not jitted.
      NotImplementedError: it moves arrays to the host, and this JAX loses that here.
    """
    if not hasattr(fn, "trace"):
        raise TypeError(
            f"topology.lower takes a function made by jax.jit or rules.jit, and got "
            f"{type(fn).__name__}; jit it first."
        )
    traced = fn.trace(*args, **kwargs)
    found = traced.lower(lowering_platforms=("tpu",))
    # 0.7.2 does where there is no device to ask.
    if to_host(traced.jaxpr.jaxpr) and _PLACED not in found.as_text():
        raise NotImplementedError(
            f"topology.lower: the program moves arrays to the host, and jax {jax.__version__} "
            f"leaves that out for chips that are not here: its memory would be wrong. Take a later "
            f"one, or a program that does not offload."
        )
    return found


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
            f"topology.lower(jitted, *abstract_arguments)."
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
