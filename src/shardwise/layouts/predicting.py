"""What a layout holds and sends, by formula, before anything is compiled."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from shardwise import tensor
from shardwise import tree as trees
from shardwise.fsdp.optimizing import state_layout
from shardwise.fsdp.planning import Stored
from shardwise.fsdp.storage import Sharded
from shardwise.layouts import by_hand
from shardwise.layouts.layout import Layout
from shardwise.layouts.meanings import attention
from shardwise.objective import wide

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Bytes of one device: `held` between steps, by what; `sent` in a step, along which axes.

    Ring bytes: a reduction over several axes at once counts once, for these axes together.
    """

    held: dict[str, int]
    sent: dict[Axes, float]

    def __str__(self):
        held = [f"  held  {what:12} {size:14,.0f} bytes" for what, size in self.held.items()]
        sent = [f"  sent  {' × '.join(a):12} {size:14,.0f} bytes" for a, size in self.sent.items()]
        return "\n".join(["On each device:", *held, *sent])


def predict(
    layout: Layout, params: Any, batch: Any, tx: Any = None, remat: bool | None = None
) -> Prediction:
    """The `Prediction` for parameters and a batch, of which shapes count; `tx` adds its state.

    Of a layout by hand. What runs along axes by hand is exact in the lowered program, and in the
    compiled one for CPU: parameters, their gradients, attention; a mixture's dispatch is left out,
    since it depends on what a router chooses (`experts.bytes_sent`). Along the tensor axis it is
    Megatron's formula, and a compiler does what it does (`tensor.bytes_sent`). Attention's sizes
    are read from the parameters' logical axes, heads, kv_heads and head_dim. `remat` says whether
    layers are rematerialised, by default whether the layout does it.

    Raises:
      ValueError: a layout by the compiler or with stages, whose bytes its programs tell.
    """
    if layout.stage or not layout.by_hand:
        raise ValueError(
            "layouts.predict: formulas are for layouts by hand, whose collectives are written out; "
            "lower and compile this one's step, and count with measure.collectives."
        )
    again = (layout.remat is not None) if remat is None else remat
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)
    stored = by_hand.plan(layout, shapes)
    sharded = Sharded(shapes, stored, layout.mesh, layout.fsdp)
    arrays = list(zip(stored, jax.tree.leaves(shapes), strict=True))
    held = {"parameters": _held(layout, arrays), "batch": _batch_held(layout, batch)}
    if tx is not None:
        state = jax.eval_shape(tx.init, shapes)
        kept = zip(state_layout(state, sharded), jax.tree.leaves(state), strict=True)
        held["state"] = _held(layout, kept)
    sent: dict[Axes, float] = {}
    for s, x in arrays:
        _parameter(layout, s, x, again, sent)
    every = (*layout.context, *layout.rows)
    _add(sent, every, 2 * 8 * _share(layout, every))  # the total and the count, in float32
    if layout.context:
        _attention(layout, shapes, batch, again, sent)
    if layout.tensor:
        _tensor(layout, shapes, batch, sent)
    return Prediction(held, sent)


def _held(layout, arrays):
    """Bytes of one device's shares of these arrays."""
    return sum(_elements(layout, s) * x.dtype.itemsize for s, x in arrays)


def _elements(layout, s: Stored):
    """Those of one device's share."""
    whole = math.prod(s.shape)
    if s.cut is not None:
        whole = whole // s.shape[s.cut] * s.padded
    return whole // math.prod(layout.mesh.shape[a] for e in s.spec(layout.fsdp) for a in _names(e))


def _batch_held(layout, batch):
    total = 0
    for x in jax.tree.leaves(batch):
        columns = layout.size("context") if jnp.ndim(x) > 1 else 1
        parts = math.prod(layout.mesh.shape[name] for name in layout.rows) * columns
        total += math.prod(jnp.shape(x)) * jnp.result_type(x).itemsize // parts
    return total


def _parameter(layout, s: Stored, x, again, sent):
    """Its gathers, and the reduction of its gradient."""
    held = _elements(layout, s)
    used = layout.dtype or x.dtype
    over = [name for name in (*layout.context, *layout.rows) if name not in s.apart_axes()]
    if s.cut is not None:
        whole, m = held * layout.size("fsdp"), layout.microbatches
        gathers = (2 if again and s.stacked else 1) * m if layout.zero == 3 else 1
        scatters = 1 if layout.zero == 1 else m
        share = _share(layout, layout.fsdp)
        size = gathers * jnp.dtype(used).itemsize
        size += scatters * jnp.dtype(layout.reduce_dtype or used).itemsize
        _add(sent, layout.fsdp, whole * size * share)
        over = [name for name in over if name not in layout.fsdp]
    _add(sent, tuple(over), 2 * held * wide(x.dtype).itemsize * _share(layout, over))


def _attention(layout, shapes, batch, again, sent):
    """Keys and values around the ring, or gathered, or exchanged, in each layer."""
    found = _heads(shapes)
    if found is None:
        raise ValueError(
            "layouts.predict: what attention sends depends on heads, kv_heads and head_dim, and no "
            "parameter carries these logical axes."
        )
    layers, heads, kv_heads, size, dtype = found
    rows, length = _tokens(batch)
    rows //= math.prod(layout.mesh.shape[name] for name in layout.rows) * layout.microbatches
    t, dtype = layout.size("tensor"), layout.dtype or dtype
    q = jax.ShapeDtypeStruct((rows, length, heads // t, size), dtype)
    k = jax.ShapeDtypeStruct((rows, length, kv_heads // t, size), dtype)
    n = layout.size("context")
    one = attention(layout).bytes_sent(n, q, k)
    total = layers * (one.forward * (2 if again else 1) + one.backward)
    if again:  # the places of tokens are the same in each layer: JAX takes them out of the loop
        total -= (layers - 1) * (n - 1) * 3 * 4 * rows * length // n
    _add(sent, layout.context, layout.microbatches * total)


def _heads(shapes):
    """(layers, heads, kv_heads, head_dim, dtype), by the names that parameters carry."""
    sizes: dict[str, int] = {}
    for _, x, box in trees.walk(shapes):
        axes = trees.axis_names(box) or ()
        lead = x.ndim - len(axes)
        sizes |= dict(zip(axes, x.shape[lead:], strict=True))
        if "kv_heads" in axes:
            sizes |= {"layers": math.prod(x.shape[:lead]), "dtype": x.dtype}
    wanted = ("layers", "heads", "kv_heads", "head_dim", "dtype")
    return [sizes[name] for name in wanted] if all(n in sizes for n in wanted) else None


def _tensor(layout, shapes, batch, sent):
    """Megatron's sums, for models of these layers."""
    embed = [
        x.shape[x.ndim - len(axes) + axes.index("embed")]
        for _, x, box in trees.walk(shapes)
        if "embed" in (axes := trees.axis_names(box) or ())
    ]
    found = _heads(shapes)
    if not embed or found is None:
        return
    rows, length = _tokens(batch)
    parts = math.prod(layout.mesh.shape[name] for name in layout.rows)
    length //= layout.size("context")
    n, itemsize = layout.size("tensor"), jnp.dtype(layout.dtype or found[-1]).itemsize
    given = n, rows // parts, length, embed[0], found[0], itemsize, layout.sequence
    _add(sent, layout.tensor, tensor.bytes_sent(*given).total)


def _tokens(batch):
    """(rows, sequence) of the batch."""
    return next(jnp.shape(x)[:2] for x in jax.tree.leaves(batch) if jnp.ndim(x) > 1)


def _share(layout, axes):
    n = math.prod(layout.mesh.shape[name] for name in axes)
    return (n - 1) / n


def _add(sent, axes, size):
    if size:
        sent[tuple(axes)] = sent.get(tuple(axes), 0) + size


def _names(entry):
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()
