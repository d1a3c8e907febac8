"""What a layout holds and sends, by formula, before anything is compiled."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardwise.fsdp.optimizing import state_layout
from shardwise.fsdp.planning import Stored
from shardwise.fsdp.storage import Sharded
from shardwise.layouts import activation_bytes, by_hand, stage_bytes
from shardwise.layouts.layout import Layout
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
    layout: Layout,
    params: Any,
    batch: Any,
    tx: Any = None,
    remat: bool | None = None,
    loss: Callable | None = None,
    has_aux: bool = False,
    stage: int = 0,
) -> Prediction:
    """The `Prediction` for parameters and a batch, of which shapes count; `tx` adds its state.

    Of a layout by hand. What runs along axes by hand is exact in the lowered program, and in the
    compiled one for CPU: parameters, their gradients, attention; a mixture's dispatch is left out,
    since it depends on what a router chooses (`experts.bytes_sent`). Along the tensor axis it is
    Megatron's formula, and a compiler does what it does (`tensor.bytes_sent`). Attention's sizes
    are read from the parameters' logical axes, heads, kv_heads and head_dim. `remat` says whether
    layers are rematerialised, by default whether the layout does it.

    With stages, the `loss` (and `has_aux`) tells which stage reads what, and a device of the stage
    of number `stage` is predicted: what is held of it, but for the batch, and what its tasks send;
    along the stage axis, to the stages beside it. A parameter that the loss gives to `marks.use`
    counts as used once in a stage.

    Raises:
      ValueError: a layout by the compiler, whose bytes its programs tell; stages, and no loss.
    """
    if not layout.by_hand:
        raise ValueError(
            "layouts.predict: formulas are for layouts by hand, whose collectives are written out; "
            "lower and compile this one's step, and count with measure.collectives."
        )
    again = (layout.remat is not None) if remat is None else remat
    if layout.stage:
        return _of_stage(layout, params, batch, tx, again, (loss, has_aux, stage))
    shapes = _abstract(params)
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
    activation_bytes.add(layout, shapes, batch, again, sent)
    return Prediction(held, sent)


def _of_stage(layout, params, batch, tx, again, told):
    if told[0] is None:
        raise ValueError(
            "layouts.predict: with stages, which stage reads what the loss tells: give loss=."
        )
    found = stage_bytes.of_stage(layout, _abstract(params), batch, tx, *told)
    sent = dict(found.sent)
    activation_bytes.add(layout, found.shapes, batch, again, sent)
    return Prediction(found.held, sent)


def _abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


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


def _share(layout, axes):
    n = math.prod(layout.mesh.shape[name] for name in axes)
    return (n - 1) / n


def _add(sent, axes, size):
    if size:
        sent[tuple(axes)] = sent.get(tuple(axes), 0) + size


def _names(entry):
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()
