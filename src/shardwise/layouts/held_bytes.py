"""What a device holds between steps, by formula: its shares of parameters and state, its rows."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from shardwise import fsdp, rules
from shardwise.fsdp.optimizing import state_layout
from shardwise.layouts import by_compiler, by_hand
from shardwise.layouts.layout import Layout
from shardwise.layouts.placing import parameter_rule, stored


def arrays(layout: Layout, shapes: Any) -> tuple[fsdp.Stored, ...]:
    """How parameters of these shapes are kept; by the compiler, with every ZeRO in shares.

    With ZeRO 1 and 2 by the compiler, only gradients and state are.
    """
    if layout.by_hand:
        return by_hand.plan(layout, shapes)
    laid = _shardings(layout, parameter_rule(layout, zero=1), shapes)
    return stored(layout, shapes, [sharding.spec for sharding in laid], layout.mesh)


def held(layout: Layout, shapes: Any, batch: Any, tx: Any = None) -> dict[str, int]:
    """{what: bytes of one device}: parameters, the batch, and of `tx` its state."""
    of = _by_hand if layout.by_hand else _by_compiler
    state = None if tx is None else jax.eval_shape(tx.init, shapes)
    parameters, of_state = of(layout, shapes, state)
    found = {"parameters": parameters, "batch": _of_batch(layout, batch)}
    return found if tx is None else found | {"state": of_state}


def elements(layout: Layout, s: fsdp.Stored) -> int:
    """Those of one device's share."""
    whole = math.prod(s.shape)
    if s.cut is not None:
        whole = whole // s.shape[s.cut] * s.padded
    return whole // math.prod(layout.mesh.shape[a] for e in s.spec(layout.fsdp) for a in _names(e))


def _by_hand(layout, shapes, state):
    found = by_hand.plan(layout, shapes)
    sharded = fsdp.Sharded(shapes, found, layout.mesh, layout.fsdp)
    kept = state_layout(state, sharded) if state is not None else ()
    trees = (found, shapes), (kept, state)
    return [
        sum(
            elements(layout, s) * x.dtype.itemsize
            for s, x in zip(stored, jax.tree.leaves(tree), strict=True)
        )
        for stored, tree in trees
    ]


def _by_compiler(layout, shapes, state):
    trees = (parameter_rule(layout), shapes), (by_compiler.state_rule(layout, shapes), state)
    return [
        sum(
            math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for sharding, x in zip(
                _shardings(layout, rule, tree), jax.tree.leaves(tree), strict=True
            )
        )
        for rule, tree in trees
    ]


def _shardings(layout, rule, tree):
    return jax.tree.leaves(rules.shardings(rule, tree, layout.mesh))


def _of_batch(layout, batch):
    total = 0
    for x in jax.tree.leaves(batch):
        columns = layout.size("context") if jnp.ndim(x) > 1 else 1
        parts = math.prod(layout.mesh.shape[name] for name in layout.rows) * columns
        total += math.prod(jnp.shape(x)) * jnp.result_type(x).itemsize // parts
    return total


def _names(entry):
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()
