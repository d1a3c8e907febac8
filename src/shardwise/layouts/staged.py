"""Stages: the layers of each on devices of their own, by a schedule; the other roles within them.

By the compiler a stage's programs are jitted, and their arrays and activations pinned, as
`by_compiler` does. By hand each is a shard_map on the stage's own devices: rows, sequence, shares
of parameters and experts are cut as `by_hand` cuts them, and the tensor axis is the compiler's. A
task gathers the parameters that it reads and scatters their gradients; what devices have copies of
is summed once a step.

Either way parameters, and with them their state, are kept in shares with every ZeRO: below 3 they
are gathered once a step. The compiler sums gradients into shares in each task, with 1 as with 2.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from shardwise import marks, pipeline
from shardwise.fsdp.batches import Divided
from shardwise.layouts.layout import Layout
from shardwise.layouts.meanings import meanings, order
from shardwise.layouts.placing import cast, naming, parameter_rule
from shardwise.layouts.shares import shares


def value_and_grad(layout: Layout, loss: Callable, has_aux: bool, aux: Any, who: str) -> Callable:
    """The `pipeline.value_and_grad` of the loss, with rows and sequences cut within the stages."""
    given = layout.auto, layout.schedule, layout.microbatches
    options = dict(axis=layout.stage[0], has_aux=has_aux, aux=aux, who=who)
    if layout.by_hand:
        return pipeline.value_and_grad(loss, *given, manual=_manual(layout, who), **options)

    def marked(params, *args, **options):
        with marks.bind(**meanings(layout)):
            return loss(cast(layout, params), *args, **options)

    return pipeline.value_and_grad(
        marked,
        *given,
        rows=P(layout.rows or None, layout.context or None),
        gather="task" if layout.zero == 3 else "step",
        **options,
    )


def _manual(layout, who):
    return pipeline.Manual(
        rows=layout.rows,
        columns=layout.context,
        free=layout.tensor,
        divide=Divided(layout.auto, layout.rows, layout.context, order(layout), who),
        meanings=lambda mesh: meanings(dataclasses.replace(layout, mesh=mesh)),
        shares=functools.partial(shares, layout),
    )


def place(
    layout: Layout, tree: Any, loss: Callable, batch: Any, has_aux: bool
) -> pipeline.Pipelined:
    """Parameters on the stages that read them."""
    who = "layouts.place"
    like = value_and_grad(layout, loss, has_aux, None, who)
    return pipeline.place(tree, like, batch, rule=_rule(layout, who))


def create(
    layout: Layout, function: Callable, key: Any, loss: Callable, batch: Any, has_aux: bool
) -> pipeline.Pipelined:
    """`place(layout, function(key), ...)`, each array born on its stages."""
    who = "layouts.init"
    like = value_and_grad(layout, loss, has_aux, None, who)
    return pipeline.create(function, key, like, batch, rule=_rule(layout, who))


def _rule(layout, who):
    """The rule of parameters, whose errors name what was called."""
    rule = parameter_rule(layout, zero=1)
    return rule if isinstance(rule, P) else naming(who)(rule)


def located(layout: Layout, shapes: Any, like: Any, batch: Any, who: str) -> pipeline.Pipelined:
    """The result of `place` for shapes: where arrays would live, and no arrays."""
    pieces, meshes = pipeline.located(shapes, like, batch, rule=_rule(layout, who))
    return pipeline.Pipelined({}, pieces, jax.tree.structure(shapes), meshes)


def lower(
    layout: Layout, create: Callable, tx: Any, loss: Callable, batch: Any, has_aux: bool = False
) -> pipeline.Step:
    """A training step with stages on an abstract mesh, for `topology.compile_stages`.

    `create(key)` makes one device's parameters, `batch` is one of shapes; nothing is allocated. A
    layout that is one program: `topology.lower(layouts.step(layout, loss, tx), ...)`.

    Raises:
      ValueError: no stages, parameters that several stages hold whole, and as `place`.
    """
    if not layout.staged:
        raise ValueError(
            "layouts.lower: a layout without stages, or with program=True, is one program; give "
            "the step that "
            "layouts.step(layout, loss, tx) returns to topology.lower, with abstract arguments."
        )
    shapes = jax.eval_shape(create, jax.random.key(0))
    who = "layouts.lower"
    function = value_and_grad(layout, loss, has_aux, None, who)
    return pipeline.lower(function, located(layout, shapes, function, batch, who), tx, batch)
