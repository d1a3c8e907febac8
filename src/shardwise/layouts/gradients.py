"""The mean and gradient of a loss under a layout: by hand, by the compiler, in stages."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import fsdp, objective, pipeline, rules
from shardwise import tree as trees
from shardwise.fsdp.arrays import ArrayLayout, laid_out, without
from shardwise.fsdp.gathering import How, all_gather, cast, scatter
from shardwise.fsdp.using import Use, reads, use_of
from shardwise.layouts import exact
from shardwise.layouts.layout import Layout, check_given
from shardwise.layouts.meanings import marked, meanings, order
from shardwise.layouts.placing import array_layouts, expert_rule, parameter_rule
from shardwise.objective.parts import Division, check_cut
from shardwise.pipeline.program import Whole
from shardwise.rules.rule import specs


def mean_and_grad(layout: Layout, loss, has_aux, aux, who, backward=True) -> Callable:
    """The mean and gradient under a layout: a function of `(params, batch, *args, key=None)`.

    It is jitted, but for exact layouts. Without `backward` the gradient may be None.
    """
    check_given(who, layout)
    if layout.exact:
        return exact.mean_and_grad(layout, loss, has_aux, aux, who, backward)
    if layout.by_hand and not layout.stage:
        return _by_hand(layout, loss, has_aux, aux, who)
    loss = loss if layout.by_hand else marked(layout, loss)
    rule, mesh = parameter_rule(layout), layout.auto

    def run(params, batch, *args, key=None):
        batch = batch if layout.by_hand else _laid(layout, batch, who)
        if layout.stage:
            mean = _pipelined(layout, loss, has_aux, aux, who, backward, params)
        else:
            mean = objective.value_and_grad(loss, layout.microbatches, has_aux, aux)
        value, grads = mean(params, batch, *args, key=key)
        if grads is not None and (layout.tensor or not layout.by_hand):
            grads = rules.constrain_tree(grads, rule, mesh)
        return value, grads

    return laid_out(jax.jit(run), rule, mesh, who) if layout.by_hand else jax.jit(run)


def _by_hand(layout, loss, has_aux, aux, who):
    """The `fsdp.value_and_grad` of the loss, with the layout's meanings of marks."""
    return fsdp.value_and_grad(
        loss,
        layout.auto,
        parameter_rule(layout),
        replicate=[name for name in layout.rows if name not in layout.fsdp],
        columns=layout.context,
        order=order(layout),
        zero=layout.zero,
        microbatches=layout.microbatches,
        dtype=layout.dtype,
        reduce_dtype=layout.reduce_dtype,
        has_aux=has_aux,
        aux=aux,
        apart=expert_rule(layout),
        meanings=meanings(layout),
        who=who,
    )


def _laid(layout, batch, who):
    """The batch, cut in rows and, where it has two axes or more, along the sequence."""
    cuts = (layout.rows, layout.microbatches, "rows"), (layout.context, 1, "sequence")
    found = []
    for path, x in trees.leaves(batch):
        shape = jnp.shape(x)
        for size, (axes, times, what) in zip(shape, cuts, strict=False):
            told, parts = f"{path or 'the batch'} of shape {shape}", layout.parts(axes) * times
            check_cut(who, told, size, parts, f"along its {what}")
        spec = P(*(axes or None for axes, *_ in cuts[: len(shape)]))
        found.append(jax.lax.with_sharding_constraint(x, NamedSharding(layout.auto, spec)))
    return jax.tree.unflatten(jax.tree.structure(batch), found)


def program(layout: Layout, loss: Callable, has_aux: bool, params: Any, batch: Any) -> Any:
    """The `pipeline.Program` of a loss for arrays of these shapes."""
    function = _pipelined(layout, loss, has_aux, "sum", "layouts.predict", True, params)
    return function.program(params, batch)


def _pipelined(layout, loss, has_aux, aux, who, backward, params):
    """The `pipeline.value_and_grad` of the loss; without `backward` the gradient is None.

    In its shard_map are all axes by hand, with `Shares` of parameters; those that devices have
    copies of are summed once a step.
    """
    mesh, within = layout.auto, {}
    if layout.by_hand:
        within = dict(
            division=Division(layout.rows, layout.context, mesh=mesh, order=order(layout)),
            by_hand=layout.manual,
            meanings=meanings(layout),
            shares=functools.partial(shares, layout, array_layouts(layout, params, layout.stage)),
        )
    others = {*mesh.axis_names} - {*layout.manual}
    return pipeline.value_and_grad(
        loss,
        mesh,
        layout.schedule,
        layout.microbatches,
        layout.stage[0],
        lambda params: [without(s, others) for s in specs(parameter_rule(layout), params, mesh)],
        **within,
        has_aux=has_aux,
        aux=aux,
        who=who,
        backward=backward,
    )


@dataclasses.dataclass(frozen=True)
class Shares(Whole):
    """The operations of tasks on shares of parameters, which go by their numbers.

    With ZeRO 3 a task gathers what it reads, and scatters its gradients: those that the loss gives
    to `marks.use` there, the others where it begins and ends. With 2 they are gathered once a step;
    with 1 gradients too are scattered once.
    """

    layout: Layout
    arrays: tuple[ArrayLayout, ...]
    hows: tuple[How | None, ...]
    use: Use

    def received(self, tree: Any) -> Any:
        """The parameters as the loss receives them, one device's."""
        mesh, (leaves, structure) = self.layout.auto, jax.tree.flatten(tree)
        return structure.unflatten(
            jax.ShapeDtypeStruct(array.local_shape(mesh), x.dtype)
            if late
            else jax.ShapeDtypeStruct(array.inside(mesh), self.layout.dtype or x.dtype)
            for late, array, x in zip(self.use.deferred, self.arrays, leaves, strict=True)
        )

    def rows(self, i: int) -> int | None:
        how = self.hows[i]
        return how.size if how is not None and how.cut == 0 else None

    def alike(self, i: int) -> Any:
        return self.hows[i], self.use.deferred[i], self.copied(i)

    def gather(self, i: int, x: jax.Array) -> jax.Array:
        return x if self.layout.zero == 3 else all_gather([x], [self.hows[i]])[0]

    def enter(self, numbers: Sequence[int], arrays: list, reads: Sequence[int]) -> list:
        read = {numbers[place] for place in reads}
        hows = [self.hows[i] if i in read and self._at_ends(i) else None for i in numbers]
        pairs = zip(numbers, all_gather(arrays, hows), strict=True)
        return [x if self.use.deferred[i] else cast(x, self.layout.dtype) for i, x in pairs]

    def leave(self, numbers: Sequence[int], grads: list) -> list:
        now = [i for i in numbers if self._at_ends(i) or self.layout.zero == 2]
        hows = [self.hows[i] if i in now else None for i in numbers]
        return scatter(_at_once(grads) if any(hows) else grads, hows)

    def scatter(self, i: int, g: jax.Array) -> jax.Array:
        return scatter([g], [self.hows[i]])[0] if self.layout.zero == 1 else g

    def total(self, i: int, g: jax.Array) -> jax.Array:
        return jax.lax.psum(g, self.copied(i))

    def copied(self, i: int) -> tuple[str, ...]:
        """The mesh axes along which devices have copies of a parameter, or of its share."""
        return self.arrays[i].copied(self.layout.divided)

    def _at_ends(self, i):
        """Whether a task gathers the parameter where it begins."""
        return self.layout.zero == 3 and not self.use.deferred[i]


def _at_once(arrays):
    """The same numbers, on CPU none before all are computed.

    XLA:CPU begins a collective while a loop before it still runs, unless it takes data of the loop,
    and tells those of a `shard_map` apart by nothing but their order: a scatter would be summed
    with one of the loop's, of another shape (seen with jaxlib 0.10.1).
    """

    def tied(arrays):
        some = [x.ravel()[0].real.astype(jnp.float32) for x in arrays if x.size]
        zero = sum(jnp.where(jnp.isfinite(x), 0 * x, 0) for x in some)
        return [x + zero.astype(x.dtype) for x in arrays]

    return jax.lax.platform_dependent(list(arrays), cpu=tied, default=lambda arrays: arrays)


def shares(layout: Layout, arrays: tuple, tree, loss, batch, args: tuple, options: dict) -> Shares:
    """The `Shares` of a loss of one device's part; called where the axes by hand have names."""
    mesh, dtypes = layout.auto, (layout.dtype, layout.reduce_dtype)
    hows = tuple(How.of(array, mesh, *dtypes, layout.manual) for array in arrays)
    at_use = hows if layout.zero == 3 else [None] * len(hows)
    found = reads(loss, tree, arrays, mesh, at_use, layout.dtype, batch, args, options)
    return Shares(layout, arrays, hows, use_of(found, arrays, mesh, at_use))
