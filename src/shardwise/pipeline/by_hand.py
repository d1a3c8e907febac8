"""The form of a stage whose collectives are written out: each program a shard_map."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardwise import cut
from shardwise.pipeline.forms import Form
from shardwise.pipeline.local import LocalStage
from shardwise.pipeline.manual import Manual
from shardwise.pipeline.placing import Piece
from shardwise.pipeline.tracing import Traced


def by_hand(
    manual: Manual, traced: Traced, stage: cut.Stage, mesh: Mesh, pieces: list[Piece]
) -> Form:
    """The `Form` of one stage of a trace by hand; on `mesh` parameters lie as `pieces` say."""
    local = LocalStage(manual, traced, stage, mesh, pieces)
    own = [x.sharding for x in local.params]
    gathered = [i for i, x in enumerate(local.held) if x.sharding != own[i]]
    return Form(
        stage=local.whole(),
        halves=_halves(local),
        mesh=mesh,
        laid=local.laid(),
        own=own,
        held=local.held,
        gathered=gathered,
        gather=_gather(local, gathered),
        sums=local.sums,
        total=_total(local),
    )


def _halves(local):
    """The `cut.Halves` of the stage as programs on the rank's arrays."""
    shares, halves, numbers = local.shares, local.halves, local.numbers

    def entered(name, params):
        return shares.enter(numbers, params, halves.reads[name])

    def forward(params, data, carry):
        outputs, kept = halves.forward(entered("forward", params), data, _mine(carry))
        return local.of_loss(outputs) if local.stage.last else _apart(outputs), _apart(kept)

    def whole(params, data, kept, cots):
        given = entered("whole", params), data, _mine(kept), _arrived(local, cots)
        back, grads = halves.whole(*given)
        return _apart(back), _terms(local, grads)

    def to_input(params, data, kept, cots):
        given = entered("to_input", params), data, _mine(kept), _arrived(local, cots)
        back, pending = halves.to_input(*given)
        return _apart(back), _apart(pending)

    def to_weights(params, data, kept, pending):
        given = entered("to_weights", params), data, _mine(kept), _mine(pending)
        return _terms(local, halves.to_weights(*given))

    params, sums, each = local.specs(local.held), local.specs(local.sums), local.each
    cots = P() if local.stage.last else each
    specs = {
        forward: ((params, local.data, each), (local.outputs, each)),
        whole: ((params, local.data, each, cots), (each, sums)),
        to_input: ((params, local.data, each, cots), (each, each)),
        to_weights: ((params, local.data, each, each), sums),
    }
    mapped = {f.__name__: local.manual.mapped(f, local.mesh, *spec) for f, spec in specs.items()}
    return dataclasses.replace(halves, **mapped)


def _gather(local, gathered):
    """The program that gathers the stage's parameters of the numbers `gathered`, once a step."""
    numbers = [local.numbers[i] for i in gathered]
    kept, held = (local.specs([group[i] for i in gathered]) for group in (local.params, local.held))
    gather = lambda arrays: local.shares.gather(numbers, arrays)  # noqa: E731
    return local.manual.mapped(gather, local.mesh, (kept,), held)


def _total(local):
    """The program that makes the gradients of the sums, once a step."""

    def total(sums):
        pairs = zip(local.numbers, sums, strict=True)
        terms = [x[0] if local.shares.terms(i) else x for i, x in pairs]
        return local.shares.total(local.numbers, terms)

    sums, params = local.specs(local.sums), local.specs(local.params)
    return local.manual.mapped(total, local.mesh, (sums,), params)


def _terms(local, grads):
    """Gradients as tasks add them to the sums."""
    pairs = zip(local.numbers, local.shares.leave(local.numbers, grads), strict=True)
    return [g[None] if local.shares.terms(i) else g for i, g in pairs]


def _arrived(local, cots):
    """Cotangents as the stage's program takes them: those of a loss come in a wide dtype."""
    if not local.stage.last:
        return _mine(cots)
    dtypes = [local.stage.outputs[i].dtype for i in cut.differentiable(local.stage)]
    return [c.astype(dtype) for c, dtype in zip(cots, dtypes, strict=True)]


def _mine(arrays: list) -> list[Any]:
    return [x[0] for x in arrays]


def _apart(arrays: list) -> list[Any]:
    return [jnp.expand_dims(x, 0) for x in arrays]
