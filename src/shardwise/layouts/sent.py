"""Bytes that a device sends in a step, by formula: ring bytes, along the axes of a mesh."""

import collections
import dataclasses
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from shardwise import tensor
from shardwise import tree as trees
from shardwise.costs.ledger import Ledger, passes
from shardwise.fsdp.arrays import ArrayLayout
from shardwise.layouts import gradients
from shardwise.layouts.layout import Layout
from shardwise.layouts.meanings import attention
from shardwise.layouts.placing import parameter_rule
from shardwise.objective.means import wide
from shardwise.rules.rule import specs, used_axes

TASKS = "forward", "to_input", "to_weights"
ATTENTION = "heads", "kv_heads", "head_dim"  # logical axes


class LayoutLedger(Ledger):
    """The `Ledger` of a layout by hand, in which arrays of any tree are counted."""

    def __init__(self, layout: Layout):
        super().__init__(layout.mesh.shape)
        self.layout = layout

    def parameters(self, arrays: Sequence[ArrayLayout], shapes: Any, again: bool) -> None:
        """Count gathers of parameters, of layers `again` with remat, and gradients' reductions."""
        layout = self.layout
        for array, x in zip(arrays, jax.tree.leaves(shapes), strict=True):
            held = math.prod(NamedSharding(layout.auto, array.spec).shard_shape(array.shape))
            if array.cut is not None:
                times = passes(layout.zero, layout.microbatches, again and array.stacked)
                self._gathered(held, x.dtype, times)
            self.sum("gradients", array.copied(layout.divided), held * wide(x.dtype).itemsize)
        self.loss(layout.divided, staged=False)

    def activations(self, shapes, batch, again: bool, here=None, ends=(True, True)) -> None:
        """Count what layers of these parameters send: attention by hand, and Megatron's sums.

        `here` are the shapes of what of each the device's stages read, and `ends` tells whether
        they are the first, with the embedding, and the last, with the head.
        """
        layout = self.layout
        if not layout.context and not layout.tensor:
            return
        model = _Model.of(layout, shapes, here or jax.tree.leaves(shapes))
        lacking = [name for name in (*ATTENTION, "embed") if name not in model.sizes]
        if layout.tensor and lacking:
            warnings.warn(
                f"layouts.predict: what is sent along tensor is not counted, since no parameter "
                f"carries {', '.join(lacking)} as a logical axis; measure.collectives counts it in "
                f"the compiled program.",
                stacklevel=4 if layout.stage else 3,  # the caller of `predict`
            )
        if not model.sizes.keys() >= {*ATTENTION}:
            if not layout.context:
                return
            raise ValueError(
                "layouts.predict: what attention sends depends on heads, kv_heads and head_dim, "
                "and no parameter carries these logical axes."
            )
        rows, length = next(jnp.shape(x)[:2] for x in jax.tree.leaves(batch) if jnp.ndim(x) > 1)
        rows //= layout.parts(layout.rows)
        if layout.context:
            self._attention(model, rows // layout.microbatches, length, again)
        if layout.tensor and "latent" in model.sizes:
            raise ValueError(
                "layouts.predict: what latent attention sends along a tensor axis has no formula "
                "here; measure.collectives counts it in the compiled program."
            )
        if layout.tensor and not lacking:
            self._tensor(model, rows, length // layout.size("context"), again, *ends)

    def stages(self, shapes, batch, again: bool, loss, has_aux: bool, place: int) -> None:
        """Count what a device at this place along stages sends, whose program the loss tells."""
        if loss is None:
            raise ValueError(
                "layouts.predict: with stages, which stage reads what the loss tells: give loss=."
            )
        program = gradients.program(self.layout, loss, has_aux, shapes, batch)
        device_of = program.schedule.device_of
        own = [program.stages[s] for s, device in enumerate(device_of) if device == place]
        self.pipeline(self.layout.stage, *program.sends())
        if self.layout.by_hand:
            self._shares(program, own)
        here = [_read(own, i, x) for i, x in enumerate(jax.tree.leaves(shapes))]
        # An embedding, or head, that lies whole along tensor sends nothing there.
        laid = specs(parameter_rule(self.layout), shapes, self.layout.auto)
        cut = [
            "vocab" in (leaf.axes or ()) and {*self.layout.tensor} & {*jax.tree.leaves(tuple(spec))}
            for leaf, spec in zip(trees.read(shapes), laid, strict=True)
        ]
        ends = (own[0], own[0].index == 0), (own[-1], own[-1].last)
        ends = tuple(at_end and any(cut[i] for i in stage.rows) for stage, at_end in ends)
        self.activations(shapes, batch, again, here, ends)

    def exact(self, params: Any, laid: Iterable[tuple[Any, NamedSharding]]) -> None:
        """Count gathers of all that is `laid` in parts, and sums over all devices."""
        layout = self.layout
        for x, to in laid:
            size = math.prod(to.shard_shape(x.shape)) * x.dtype.itemsize
            for entry in reversed(to.spec):  # the last axis of an array first, as the compiler does
                axes = jax.tree.leaves(entry)
                size *= layout.parts(axes)
                self.gather("weights", axes, size)
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        for x in [scalar, scalar, *jax.tree.leaves(params)]:  # padded to a part for each device
            part = -(-math.prod(x.shape) // layout.mesh.size) * wide(x.dtype).itemsize
            self.sum("gradients", layout.mesh.axis_names, part * layout.mesh.size)

    def _shares(self, program, stages):
        """Count what becomes of parameters that a stage's devices share, in these stages."""
        layout, m = self.layout, self.layout.microbatches
        kinds, of = program.kinds
        for stage in stages:
            halves = kinds[of[stage.index]]
            for at, (i, ends) in enumerate(stage.rows.items()):
                readers = sum(at in getattr(halves, task).reads for task in TASKS)
                times = m * readers if layout.zero == 3 else 0, m if layout.zero > 1 else 0
                carrier = program.carriers[program.places[stage.index][at][0]]
                if layout.zero == 2 or not program.shares.use.deferred[i]:  # as it is carried
                    ends = carrier.rows
                self._rows(program, i, ends, times)
        if layout.zero < 3:  # once, whatever the device's stages read of what is carried
            for carrier in program.carriers:
                times = carrier.places, carrier.places * (layout.zero == 1)
                self._rows(program, carrier.leaf, carrier.rows, times)
        for i, x in enumerate(program.leaves):
            parts = 1 if program.held[i] is None else program.schedule.devices
            size = math.prod(x.shape) // parts // self._cut(program, i) * wide(x.dtype).itemsize
            self.sum("gradients", program.shares.copied(i), size)
        self.loss(layout.divided, staged=True)

    def _cut(self, program, i):
        """The parts into which the compiler cuts a parameter along tensor, within a share."""
        axes = used_axes(program.shares.arrays[i].spec)
        return self.layout.parts([axis for axis in axes if axis in self.layout.tensor])

    def _gathered(self, elements, dtype, times):
        """Count `passes` of a parameter of so many elements on a device, and of its gradient."""
        layout, used = self.layout, jnp.dtype(self.layout.dtype or dtype)
        added = layout.zero == 1 and (layout.stage or layout.microbatches > 1)  # before a scatter
        own = wide(used) if added and not layout.dtype else used
        reduced = jnp.dtype(layout.reduce_dtype or own)
        whole = elements * layout.size("fsdp")
        self.weights(layout.fsdp, whole, used.itemsize, reduced.itemsize, times)

    def _rows(self, program, i, ends, times):
        """Count gathers of a parameter that stages share, or of its rows between two ends."""
        x, shares = program.leaves[i], program.shares
        if shares.hows[i] is None:
            return
        size = math.prod(x.shape) // self._cut(program, i)
        if ends is not None and shares.rows(i) is None:
            size = size // x.shape[0] * (ends[1] - ends[0])
        self._gathered(size, x.dtype, times)

    def _attention(self, model, rows, length, again):
        layout, sizes, t = self.layout, model.sizes, self.layout.size("tensor")
        depth = sizes["head_dim"]
        q, k, v = (
            jax.ShapeDtypeStruct((rows, length, sizes[heads] // t, size), model.dtype)
            for heads, size in (
                ("heads", depth),
                ("kv_heads", depth),
                ("kv_heads", sizes.get("value_dim", depth)),
            )
        )
        one = attention(layout).bytes_sent(layout.size("context"), q, k, v)
        self.attention(layout.context, one, layout.microbatches * model.layers, again)

    def _tensor(self, model, rows, length, again, first, last):
        layout, itemsize = self.layout, jnp.dtype(model.dtype).itemsize
        given = layout.size("tensor"), rows, length, model.sizes["embed"], model.layers, itemsize
        normed = (
            model.cut_norms / max(model.layers, 1) * (1 + again / 2)
        )  # forward, backward, and again
        norms = dict(scales=model.scales or None, normed_heads=normed)
        told = tensor.bytes_sent(*given, layout.sequence, again, sums_again=again, **norms)
        of_ends = (first + last) * told.embedding + last * told.loss  # which nothing does again
        self.add("activations", layout.tensor, told.layers + told.norms + of_ends)


def _read(stages, i, x):
    """The shape of what these stages read of a parameter; of none, without rows."""
    ends = [stage.rows[i] for stage in stages if i in stage.rows]
    if None in ends or not x.shape:
        return x
    return jax.ShapeDtypeStruct((sum(b - a for a, b in ends), *x.shape[1:]), x.dtype)


@dataclasses.dataclass
class _Model:
    """What formulas of layers need, by the logical axes that parameters carry.

    `scales` are bytes of norms' scales that are whole along the tensor axis, `cut_norms` is the
    number of norms whose width it cuts.
    """

    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    layers: int = 0
    dtype: Any = None
    scales: int = 0
    cut_norms: int = 0

    @classmethod
    def of(cls, layout, shapes, here):
        found, arrays = cls(), []
        for leaf, x in zip(trees.read(shapes), here, strict=True):
            axes = leaf.axes or ()
            found.sizes |= dict(zip(axes, leaf.shape, strict=False))
            layers = dict(zip(axes, x.shape, strict=False)).get(trees.LAYERS, int(x.size > 0))
            arrays.append((tuple(leaf.path.split("/")), axes, layers))
            if "kv_heads" in axes:
                found.dtype = layout.dtype or x.dtype
            if arrays[-1][0][-1] != "scale":
                continue
            if {*layout.cut} & {*axes}:
                found.cut_norms += layers
            else:
                found.scales += x.size * x.dtype.itemsize
        found.layers = _layers(arrays)
        return found


def _layers(arrays):
    """The layers of attention, of (path, axes, layers) of each array: those with kv_heads belong
    together if they lie in one part of the tree with an array that has heads.
    """
    inside = collections.defaultdict(set)
    for path, axes, _ in arrays:
        for i in range(len(path)):
            inside[path[:i]].update(axes)
    found, flat = collections.Counter(), collections.Counter()
    for path, axes, layers in (x for x in arrays if "kv_heads" in x[1]):
        above = (path[:i] for i in reversed(range(len(path))))
        of = next((x for x in above if "heads" in inside[x]), ())
        if of or trees.LAYERS in axes:
            found[of] = max(found[of], layers)
        else:  # of a tree without branches: "block_0_k", "block_1_k", ...
            flat[re.sub(r"\d+", "", path[-1])] += layers
    return found.total() + max(flat.values(), default=0)
