"""Bytes of activations that layers send, by formula: attention by hand, and Megatron's sums."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from shardwise import tensor
from shardwise import tree as trees
from shardwise.layouts.layout import Layout
from shardwise.layouts.meanings import attention


def add(
    layout: Layout,
    shapes: Any,
    batch: Any,
    again: bool,
    sent: dict[tuple[str, ...], float],
    ends: tuple[bool, bool] = (True, True),
) -> None:
    """Add what a device sends in a step to `sent`, {mesh axes: bytes}; `again` with remat.

    `ends` tells whether it has the embedding, and the head.
    """
    if layout.context:
        _attention(layout, shapes, batch, again, sent)
    if layout.tensor:
        _tensor(layout, shapes, batch, sent, *ends)


def _attention(layout, shapes, batch, again, sent):
    """Add what attention by hand sends in all layers: a ring, a gather or an exchange."""
    found = _heads(shapes)
    if found is None:
        raise ValueError(
            "layouts.predict: what attention sends depends on heads, kv_heads and head_dim, and no "
            "parameter carries these logical axes."
        )
    layers, heads, kv_heads, size, dtype = found
    rows, length = _tokens(batch)
    rows //= math.prod(layout.auto.shape[name] for name in layout.rows) * layout.microbatches
    t, dtype = layout.size("tensor"), layout.dtype or dtype
    q = jax.ShapeDtypeStruct((rows, length, heads // t, size), dtype)
    k = jax.ShapeDtypeStruct((rows, length, kv_heads // t, size), dtype)
    n = layout.size("context")
    one = attention(layout).bytes_sent(n, q, k)
    total = layers * (one.forward * (2 if again else 1) + one.backward)
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


def _tensor(layout, shapes, batch, sent, first, last):
    """Add Megatron's sums, for models whose parameters name the axes that these depend on."""
    embed = [
        x.shape[x.ndim - len(axes) + axes.index("embed")]
        for _, x, box in trees.walk(shapes)
        if "embed" in (axes := trees.axis_names(box) or ())
    ]
    found = _heads(shapes)
    if not embed or found is None:
        return
    rows, length = _tokens(batch)
    parts = math.prod(layout.auto.shape[name] for name in layout.rows)
    length //= layout.size("context")
    n, itemsize = layout.size("tensor"), jnp.dtype(layout.dtype or found[-1]).itemsize
    given = n, rows // parts, length, embed[0], found[0], itemsize, layout.sequence
    scales, cut = _scales(layout, shapes)
    told = tensor.bytes_sent(*given, scales=scales, normed_heads=cut / found[0])
    of_ends = first * told.embedding + last * (told.head + told.loss)
    _add(sent, layout.tensor, told.layers + told.norms + of_ends)


def _scales(layout, shapes):
    """(bytes of norms' scales that the tensor axis leaves whole, None where none is named so; the
    number of norms in all layers whose width it cuts).
    """
    whole, cut = 0, 0
    for keys, x, box in trees.walk(shapes):
        axes = trees.axis_names(box) or ()
        if str(keys[-1]) == "scale" and {*layout.cut} & {*axes}:
            cut += math.prod(x.shape[: x.ndim - len(axes)])
        elif str(keys[-1]) == "scale":
            whole += x.size * x.dtype.itemsize
    return whole or None, cut


def _tokens(batch):
    """(rows, sequence) of the batch."""
    return next(jnp.shape(x)[:2] for x in jax.tree.leaves(batch) if jnp.ndim(x) > 1)


def _add(sent, axes, size):
    if size:
        sent[tuple(axes)] = sent.get(tuple(axes), 0) + size
