"""A proposed layout as the step that it stands for, and what the chips' compiler says of it."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import context, layouts, measure, model, topology
from shardwise.model import Config, Decoder
from shardwise.plan import arrays, realised, sent
from shardwise.plan.arrays import of_decoder
from shardwise.plan.planning import Candidate, Plan
from shardwise.plan.roles import Roles
from shardwise.plan.sent import inserted
from shardwise.topology import child


def layout_of(roles: Roles, config: Config, mesh: Mesh, kernel: str = "tiles") -> layouts.Layout:
    """The layout on a mesh that has, for each role above 1, an axis of the same name.

    Attention to whole sequences is in "tiles", or for TPUs by Pallas' "splash".
    """
    attend = context.splash() if kernel == "splash" else context.tiled
    given = realised.settings(roles, config, kernel)
    again = getattr(jax.checkpoint_policies, given.get("remat", ""), layouts.offload)
    meant = {"kernel": attend, "remat": again, "dtype": config.dtype}
    taken = {role: role for role in roles.sizes} or {"data": "data"}
    return layouts.Layout(mesh, **taken, **{n: meant.get(n, x) for n, x in given.items()})


@dataclasses.dataclass(frozen=True)
class Program:
    """The decoder for a layout: `create(key)`, `loss(params, batch)`, `has_aux` and a `batch`."""

    config: Config
    create: Callable[..., Any]
    loss: Callable[..., Any]
    has_aux: bool
    batch: dict[str, Any]


def program_of(roles: Roles, config: Config, batch: int, sequence: int) -> Program:
    """The `Program` of a layout, which has attention's kernel."""
    config = dataclasses.replace(config, stages=roles.stage)
    graphdef = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))[0]
    has_aux = bool(config.experts)
    loss = functools.partial(model.loss, graphdef=graphdef)
    if has_aux:  # balanced over each row, so that microbatches are the same function
        loss = functools.partial(model.routed_loss, graphdef=graphdef, over="rows")
    shape = batch, sequence
    ints, floats = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32))
    fields = {"tokens": ints, "targets": ints, "mask": floats}
    return Program(config, functools.partial(_create, config), loss, has_aux, fields)


def _create(config, key):
    return nnx.state(Decoder(config, nnx.Rngs(params=key)))


class Check(NamedTuple):
    """The compiler's verdict: `fit` as `measure.fits` tells it, and the compiled program, if any.

    `lowered` are the ring bytes of the collectives that are written by hand; `sent` those of the
    compiled program, by kind; `differences` what became of those that are written, and of those
    that the compiler was expected to insert along tensor. Of stages they are those of the device
    that sends most.
    """

    candidate: Candidate
    fit: measure.Fit
    compiled: topology.Compiled | None
    lowered: float
    sent: dict[str, float]
    seconds: float
    differences: measure.Differences = measure.Differences()


def lowered(each: Roles, plan: Plan) -> tuple[topology.ChipMesh, jax.stages.Lowered]:
    """The training step of a layout, for the plan's chips; nothing is allocated, and the loss is
    not judged.
    """
    mesh = plan.chips.mesh(**(each.sizes or {"data": 1}))
    if plan.own:
        layout, program, tx = plan.own.layout(each, mesh.abstract), plan.own, plan.own.tx
    else:
        kernel = realised.kernel(plan.sequence, plan.chips)
        layout = layout_of(each, plan.config, mesh.abstract, kernel)
        program = program_of(each, plan.config, plan.batch, plan.sequence)
        tx = plan.optimizer.transformation()
    create = program.create
    params = jax.eval_shape(create, jax.random.key(0))
    params, state = jax.tree.map(
        lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to),
        (params, jax.eval_shape(tx.init, params)),
        layouts.shardings(layout, params, tx),
    )
    axes = [entry or None for entry in (layout.rows, layout.context)]
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh.abstract, P(*axes[: len(x.shape)]))
        ),
        program.batch,
    )
    step = layouts.step(layout, program.loss, tx, program.has_aux, check=False)
    return mesh, mesh.lower(step, params, state, batch)


def check(candidate: Candidate, plan: Plan) -> Check:
    """Compile one layout.

    Raises:
      ImportError: the chips' compiler is not there.
    """
    child.versions(plan.chips.chip)  # or there is no compiler, and nothing need be traced
    began = time.perf_counter()
    mesh, program = lowered(candidate.roles, plan)
    by_hand = measure.collectives(program)
    compiled, became = None, measure.Differences()
    try:
        compiled = topology.compile(program, mesh)
        fit = measure.fits(compiled)
        found = {kind: c.ring_bytes for kind, c in measure.collectives(compiled).items()}
        expected = _expected(candidate.roles, plan, by_hand.device)
        became = measure.differences(program, compiled, expected)
    except topology.DoesNotFit as error:
        fit, found = measure.fits(error), {}
    spent = time.perf_counter() - began
    return Check(candidate, fit, compiled, by_hand.ring_bytes, found, spent, became)


def _expected(each, plan, stage):
    if plan.own:
        return ()
    given = each, plan.config, of_decoder(plan.config, plan.optimizer), plan.batch, plan.sequence
    return inserted(next(part for part in arrays.parts(*given) if part.stage >= stage))


def checked(plan: Plan, number: int, out: TextIO) -> list[dict[str, Any]]:
    """Compile the best layouts, print each on `out` when it is done, and return facts of all."""
    chosen = plan.best[:number]
    print("\nCompiled, GiB on a device:", file=out)
    facts = []
    for candidate in chosen:
        try:
            found = check(candidate, plan)
        except ImportError as error:
            print(f"  Nothing was compiled. {error}", file=out, flush=True)
            return []
        except (NotImplementedError, ValueError) as error:
            print(f"  {candidate.roles}: not compiled. {error}", file=out, flush=True)
            continue
        print(_line(found), file=out, flush=True)
        if found.differences:
            print(_became(found), file=out, flush=True)
        facts.append(_facts(found))
    return facts


def _line(found):
    said, ours = found.fit.needed / 2**30, found.candidate.memory.total / 2**30
    kinds = ", ".join(f"{kind} {size / 1e9:.4g} GB" for kind, size in found.sent.items())
    fits = "fits" if found.fit else "does not fit"
    sends = f"sends {kinds or 'nothing'}; " if kinds or found.fit else ""
    return (
        f"  {found.candidate.roles}: {fits}, {said:.2f}, by formula {ours:.2f} "
        f"({ours / said - 1:+.0%}); {sends}{found.seconds:.0f} s"
    )


def _became(found):
    """A line on what became of the bytes by formula; all together are those the compiler sends."""
    told = [
        f"{name} {d.written / 1e6:,.1f} MB" + (f" ({d.more / 1e6:+,.1f})" if d.more else "")
        for name, d in found.differences.items()
    ]
    return f"    by formula and what the compiler made of it: {'; '.join(told)}"


def _facts(found):
    by_hand = [s for s in found.candidate.sent if s.roles != ("tensor",)]
    return {
        "roles": found.candidate.roles.sizes,
        "microbatches": found.candidate.roles.microbatches,
        "remat": found.candidate.roles.remat,
        "offload": found.candidate.roles.offload,
        "products": found.candidate.roles.products,
        "fits": bool(found.fit),
        "bytes": found.fit.needed,
        "bytes_by_formula": found.candidate.memory.total,
        "memory": found.fit.memory._asdict() if found.fit.memory else None,
        "sent_by_hand_lowered": found.lowered,
        "sent_by_hand_by_formula": sum(sent.by_role(by_hand).values()),
        "sent": found.sent,
        "differences": {name: d._asdict() for name, d in found.differences.items()},
        "seconds": found.seconds,
    }
