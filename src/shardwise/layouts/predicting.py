"""Bytes that a layout holds and sends, by formula, before anything is compiled."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from shardwise import rules
from shardwise.layouts.layout import Layout, check_given
from shardwise.layouts.placing import abstract, array_layouts, parameter_rule, shardings
from shardwise.layouts.sent import LayoutLedger
from shardwise.rules.placement import Description

TOO_MUCH = 0.05  # of the parameters' bytes, to stay whole for want of an axis that divides


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What `predict` returns; prints as a table."""

    held: dict[str, int]
    sent: dict[tuple[str, ...], float]
    whole: dict[str, int] = dataclasses.field(default_factory=dict)

    def __str__(self):
        held = [f"  held  {what:12} {size:14,.0f} bytes" for what, size in self.held.items()]
        sent = [f"  sent  {' × '.join(a):12} {size:14,.0f} bytes" for a, size in self.sent.items()]
        whole = [f"  whole {path}: {n:,} bytes more than a share" for path, n in self.whole.items()]
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
    """The bytes that one device holds and sends, by formula; `params` and `batch` may be shapes.

    What comes back prints as a table. Its `.held` has the bytes between steps, as a dict of
    "parameters", "batch" and, with `tx`, "state". Its `.sent` maps tuples of mesh axes, in the
    mesh's order, to the ring bytes of a step; a reduction over several axes counts once, for these
    together, as in `measure.by_axis`. Its `.whole` maps the path (as in `tree.leaves`) of an array
    that is whole along fsdp, since no axis of it divides, to the bytes that this costs. `remat`
    says whether layers are rematerialised, by default whether the layout does it.

    What runs along axes by hand is exact in the lowered program (except for stages beside tensor,
    where the compiler cuts what fsdp sends), and in the compiled one for CPU: parameters, their
    gradients, attention, by the parameters' logical axes heads, kv_heads and head_dim. A mixture's
    dispatch depends on what a router chooses, and is left out (`experts.bytes_sent`). Along the
    tensor axis it is Megatron's formula (`tensor.bytes_sent`), with what rematerialised layers send
    again; it takes the axis embed too. A tree that lacks one of the four counts nothing there, and
    a warning says so.

    By the compiler, `held` is exact, and `sent` what the layout asks for: the bytes of the same
    roles by hand, with keys and values gathered along context. What a compiler inserted,
    `measure.collectives` counts in the compiled program.

    An exact layout gathers parameters and state whole on each device, and adds gradients up over
    all devices, once a step. With stages, the `loss` (and `has_aux`), traced as by hand, tells
    which stage reads what, and a device at the place `stage` along their axis is predicted, with
    all stages that it has. A parameter that the loss gives to `marks.use` counts as used once in a
    task.

    Raises:
      ValueError: stages, and no loss; context, and no heads, kv_heads or head_dim; tensor, and
        latent attention, or neither `over` nor a logical axis that it cuts; arrays that do not
        divide, as `place` raises it; a loss that cannot be cut into stages.
    """
    check_given("layouts.predict", layout, tx)
    again = (layout.remat is not None) if remat is None else remat
    # What a compiler is asked for, the same layout by hand would send.
    asked = {} if layout.by == "hand" else dict(by="hand", attention="all_gather", kernel=None)
    shapes, sent = abstract(params), LayoutLedger(dataclasses.replace(layout, **asked))
    lie, arrays = shardings(layout, params, tx, "layouts.predict"), array_layouts(layout, params)
    whole = _whole(layout, arrays, shapes, "layouts.predict")
    laid = _pairs(shapes, lie if tx is None else lie[0])
    held = {"parameters": _bytes(laid), "batch": _of_batch(layout, batch)}
    if tx is not None:
        state = _pairs(jax.eval_shape(tx.init, shapes), lie[1])
        held["state"] = _bytes(state)
        laid += state
    if layout.exact:
        sent.exact(shapes, laid)
    elif layout.stage:
        sent.stages(shapes, batch, again, loss, has_aux, stage)
    else:
        sent.parameters(arrays, shapes, again)
        sent.activations(shapes, batch, again)
    return Prediction(held, sent.along, whole)


def describe(layout: Layout, params: Any) -> Description:
    """How `params` lie, which may be abstract: the `Description` that `rules.describe` returns."""
    check_given("layouts.describe", layout)
    _whole(layout, array_layouts(layout, params), abstract(params), "layouts.describe")
    return rules.describe(parameter_rule(layout), params, layout.auto)


def _pairs(shapes, shardings):
    return [*zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)]


def _bytes(pairs):
    return sum(math.prod(to.shard_shape(x.shape)) * x.dtype.itemsize for x, to in pairs)


def _of_batch(layout, batch):
    total = 0
    for x in jax.tree.leaves(abstract(batch)):
        parts = layout.parts(layout.divided if x.ndim > 1 else layout.rows)
        total += x.size * x.dtype.itemsize // (layout.mesh.size if layout.exact else parts)
    return total


def _whole(layout, arrays, shapes, who):
    """{path: bytes beyond a share} of arrays that fsdp would cut, and of which no axis divides."""
    n, found, leaves = layout.size("fsdp"), {}, jax.tree.leaves(shapes)
    for array, x in zip(arrays, leaves, strict=True):
        is_cut = not set(layout.fsdp).isdisjoint(jax.tree.leaves(tuple(array.spec)))
        if n > 1 and x.size >= max(2, layout.min_size) and not is_cut:
            held = _bytes([(x, NamedSharding(layout.auto, array.spec))])
            found[array.path] = round(held * (1 - 1 / n))
    costs, total = sum(found.values()), sum(x.size * x.dtype.itemsize for x in leaves)
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
