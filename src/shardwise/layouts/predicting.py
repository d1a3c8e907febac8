"""Bytes that a layout holds and sends, by formula, before anything is compiled."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from shardwise import rules
from shardwise.fsdp import ArrayLayout
from shardwise.layouts import activation_bytes, stage_bytes
from shardwise.layouts.layout import Layout
from shardwise.layouts.placing import (
    abstract,
    array_layouts,
    naming,
    parameter_rule,
    shardings,
)
from shardwise.objective import wide

Axes = tuple[str, ...]
TOO_MUCH = 0.05  # of the parameters' bytes, to stay whole for want of an axis that divides


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Bytes of one device: `held` between steps, by what; `sent` in a step, along which axes.

    Ring bytes: a reduction over several axes at once counts once, for these axes together, which
    stand in the mesh's order, as in `measure.by_axis`. `whole` has by path what it costs that no
    axis of an array divides along fsdp, so that it stays whole.
    """

    held: dict[str, int]
    sent: dict[Axes, float]
    whole: dict[str, int] = dataclasses.field(default_factory=dict)

    def __str__(self):
        held = [f"  held  {what:12} {size:14,.0f} bytes" for what, size in self.held.items()]
        sent = [f"  sent  {' × '.join(a):12} {size:14,.0f} bytes" for a, size in self.sent.items()]
        whole = [
            f"  whole {path}: {size:,} bytes more than a share" for path, size in self.whole.items()
        ]
        return "\n".join(["On each device:", *held, *sent, *whole])


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

    What runs along axes by hand is exact in the lowered program, and in the compiled one for CPU:
    parameters, their gradients, attention; a mixture's dispatch is left out, since it depends on
    what a router chooses (`experts.bytes_sent`). Along the tensor axis it is Megatron's formula,
    and a compiler does what it does (`tensor.bytes_sent`). Attention's sizes are read from the
    parameters' logical axes, heads, kv_heads and head_dim. `remat` says whether layers are
    rematerialised, by default whether the layout does it.

    By the compiler, `held` is exact, and `sent` what the layout asks for, not what is inserted: the
    bytes of the same roles by hand, with keys and values gathered along context. No equality is
    promised; a compiler may sum where a scatter would do, repeat a gather, or lay out anew what
    lies otherwise. What it inserted, `measure.collectives` counts in the compiled program.

    An exact layout sends, once a step, what makes parameters and state whole on each device, in one
    program by the compiler, and a sum over all devices; its layers send nothing. With stages, the
    `loss` (and `has_aux`) tells which stage reads what, and a device at the place
    `stage` along their axis is predicted, with all stages that it has. What it sends there is exact
    for each tick's activation and cotangent, and for parameters that lie elsewhere than they are
    read. A parameter that the loss gives to `marks.use` counts as used once in a task. The loss is
    traced as by hand, and has the marks for it.

    Raises:
      ValueError: stages, and no loss; context, and parameters without these logical axes; what
        `place` says of arrays, and tracing by hand of a loss.
    """
    again = (layout.remat is not None) if remat is None else remat
    with naming("layouts.predict"):
        arrays = array_layouts(layout, params)
    asked, shapes = _asked(layout), abstract(params)
    whole = _whole(layout, arrays, shapes, "layouts.predict")
    if layout.exact:
        sent = _of_exact(layout, shapes, tx)
        return Prediction(_held(layout, shapes, batch, tx), _in_mesh_order(layout, sent), whole)
    if layout.stage:
        sent = _of_stage(asked, shapes, batch, again, loss, has_aux, stage)
        return Prediction(_held(layout, shapes, batch, tx), _in_mesh_order(layout, sent), whole)
    sent: dict[Axes, float] = {}
    for s, x in zip(arrays, jax.tree.leaves(shapes), strict=True):
        _parameter(asked, s, x, again, sent)
    every = (*layout.context, *layout.rows)
    _add(sent, every, 2 * 8 * _share(layout, every))  # the total and the count, in float32
    activation_bytes.add(asked, shapes, batch, again, sent)
    return Prediction(_held(layout, shapes, batch, tx), _in_mesh_order(layout, sent), whole)


def describe(layout: Layout, params: Any) -> Any:
    """A table of how each parameter lies: path, shape, spec, bytes on each device, why whole."""
    _whole(layout, array_layouts(layout, params), abstract(params), "layouts.describe")
    return rules.describe(parameter_rule(layout), params, layout.auto)


def _held(layout, shapes, batch, tx):
    """{what: bytes of one device}: parameters, the batch, and of `tx` its state."""
    found = {"parameters": _bytes(shapes, shardings(layout, shapes, None, "layouts.predict"))}
    found["batch"] = _of_batch(layout, batch)
    if tx is not None:
        state = jax.eval_shape(tx.init, shapes)
        found["state"] = _bytes(state, shardings(layout, shapes, tx, "layouts.predict")[1])
    return found


def _bytes(shapes, shardings):
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    return sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in pairs)


def _of_batch(layout, batch):
    total = 0
    for x in jax.tree.leaves(batch):
        columns = layout.size("context") if jnp.ndim(x) > 1 else 1
        parts = layout.auto.size if layout.exact else layout.size_of_rows() * columns
        total += math.prod(jnp.shape(x)) * jnp.result_type(x).itemsize // parts
    return total


def _whole(layout, arrays, shapes, who):
    """{path: bytes beyond a share} of arrays that fsdp would cut, and of which no axis divides."""
    n, found, total = layout.size("fsdp"), {}, 0
    for array, x in zip(arrays, jax.tree.leaves(shapes), strict=True):
        size = math.prod(NamedSharding(layout.auto, array.spec).shard_shape(array.shape))
        elements, axes = math.prod(array.shape), jax.tree.leaves(tuple(array.spec))
        total += elements * x.dtype.itemsize
        open_to = elements > 1 and elements >= layout.min_size and set(axes).isdisjoint(layout.fsdp)
        if n > 1 and open_to:
            found[array.path] = round(size * x.dtype.itemsize * (1 - 1 / n))
    costs = sum(found.values())
    if costs > TOO_MUCH * total:
        largest = max(found, key=found.get)
        warnings.warn(
            f"{who}: {len(found)} of {len(arrays)} arrays stay whole on all {n} devices along "
            f"{' × '.join(layout.fsdp)}, since no axis of theirs divides: {costs:,} bytes more on "
            f"each, {costs / total:.0%} of all parameters; the largest is {largest}. Choose sizes "
            f"that divide, or raise min_size= if that is meant.",
            stacklevel=3,
        )
    return found


def _asked(layout):
    """The layout by hand that sends what this one asks for."""
    if layout.by == "hand":
        return layout
    return dataclasses.replace(layout, by="hand", attention="all_gather", kernel=None)


def _of_stage(asked, shapes, batch, again, loss, has_aux, place):
    if loss is None:
        raise ValueError(
            "layouts.predict: with stages, which stage reads what the loss tells: give loss=."
        )
    sent, here, ends = stage_bytes.of_stage(asked, shapes, batch, loss, has_aux, place)
    activation_bytes.add(asked, here, batch, again, sent, ends)
    return sent


def _of_exact(layout, shapes, tx):
    """Gathers of all that is cut, and the sum over all devices of gradients, total and count."""
    sent, n = {}, layout.auto.size
    found = shardings(layout, shapes, tx, "layouts.predict")
    tree = shapes if tx is None else (shapes, jax.eval_shape(tx.init, shapes))
    for x, to in zip(jax.tree.leaves(tree), jax.tree.leaves(found), strict=True):
        size = math.prod(to.shard_shape(x.shape)) * x.dtype.itemsize
        for entry in reversed(to.spec):  # the last axis of an array first, as the compiler does it
            axes = jax.tree.leaves(entry)
            size *= math.prod(layout.auto.shape[name] for name in axes)
            _add(sent, axes, size * _share(layout, axes))
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    for x in [scalar, scalar, *jax.tree.leaves(shapes)]:  # each padded to a part for each device
        part = -(-math.prod(x.shape) // n) * wide(x.dtype).itemsize
        _add(sent, layout.auto.axis_names, 2 * (n - 1) * part)
    return sent


def _in_mesh_order(layout, sent):
    """`sent`, its keys and the axes of each in the order of the mesh."""
    place, found = list(layout.mesh.shape).index, {}
    for axes, size in sent.items():
        _add(found, sorted(axes, key=place), size)
    return {axes: found[axes] for axes in sorted(found, key=lambda axes: [*map(place, axes)])}


def _parameter(layout, s: ArrayLayout, x, again, sent):
    """Add the bytes of a parameter's gathers, and of the reduction of its gradient, to `sent`."""
    held = math.prod(NamedSharding(layout.auto, s.spec).shard_shape(s.shape))
    used = layout.dtype or x.dtype
    over = [name for name in (*layout.context, *layout.rows) if name not in s.apart_axes]
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
    n = math.prod(layout.auto.shape[name] for name in axes)
    return (n - 1) / n


def _add(sent, axes, size):
    if size:
        sent[tuple(axes)] = sent.get(tuple(axes), 0) + size
