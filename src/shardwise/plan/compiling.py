"""The best layouts as whole steps, by the chips' compiler: its memory beside the formula's."""

import time
from typing import Any, NamedTuple, TextIO

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import layouts, measure, topology, train
from shardwise.plan import inserted, parts, programs, sent
from shardwise.plan.arrays import of_decoder
from shardwise.plan.planning import Candidate, Plan
from shardwise.plan.roles import Roles
from shardwise.topology import child


class Check(NamedTuple):
    """The compiler's verdict: `fit` as `measure.fits` tells it, and the compiled program, if any.

    `lowered` are the ring bytes of the collectives that are written by hand; `sent` those of the
    compiled program, by kind; `differences` what became of those that are written, and of those
    that the compiler was expected to insert along tensor. Of stages, sums are the most of any
    rank, and differences those of the rank that sends most by hand, but for what goes between
    stages; where one of their programs was refused, `lowered` is not known.
    """

    candidate: Candidate
    fit: measure.Fit
    compiled: topology.Compiled | topology.Stages | None
    lowered: float | None
    sent: dict[str, float]
    seconds: float
    differences: measure.Differences = measure.Differences()


def lowered(each: Roles, plan: Plan) -> tuple[topology.ChipMesh, jax.stages.Lowered]:
    """The training step of a layout without stages, for the plan's chips; nothing is allocated, and
    the loss is not judged.
    """
    mesh = plan.chips.mesh(**(each.sizes or {"data": 1}))
    if plan.own:
        layout, program, tx = plan.own.layout(each, mesh.abstract), plan.own, plan.own.tx
    else:
        kernel = programs.has_kernel(each, plan.sequence)
        layout = programs.layout(each, plan.config, mesh.abstract, kernel)
        program = programs.program(each, plan.config, plan.batch, plan.sequence, kernel)
        tx = train.optimizer()
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
    return mesh, topology.lower(step, params, state, batch)


def check(candidate: Candidate, plan: Plan) -> Check:
    """Compile one layout; with stages, each stage's programs.

    Raises:
      ImportError: there is no libtpu.
      ValueError: stages whose devices are no box of the torus; weights that several hold whole.
    """
    child.versions()  # or there is no compiler, and nothing need be traced
    if candidate.roles.stage > 1:
        return _of_stages(candidate, plan)
    began = time.perf_counter()
    mesh, program = lowered(candidate.roles, plan)
    by_hand = measure.collectives(program).ring_bytes
    compiled, became = None, measure.Differences()
    try:
        compiled = topology.compile(program, mesh)
        fit = measure.fits(compiled)
        found = {kind: c.ring_bytes for kind, c in measure.collectives(compiled).items()}
        became = measure.differences(program, compiled, _expected(candidate.roles, plan))
    except topology.DoesNotFit as error:
        fit, found = measure.fits(error), {}
    spent = time.perf_counter() - began
    return Check(candidate, fit, compiled, by_hand, found, spent, became)


def _expected(each, plan, stage=0):
    if plan.own:
        return ()
    given = of_decoder(plan.config), plan.batch, plan.sequence
    of_stages = parts.parts(each, plan.config, *given)
    return inserted.inserted(next(part for part in of_stages if part.stage >= stage))


def _of_stages(candidate, plan):
    began, each = time.perf_counter(), candidate.roles
    mesh = plan.chips.mesh(**each.sizes)
    layout = programs.layout(each, plan.config, mesh.abstract)
    program = programs.program(each, plan.config, plan.batch, plan.sequence)
    told = program.create, train.optimizer(), program.loss, program.batch, program.has_aux
    compiled, found, by_hand, became = None, {}, None, measure.Differences()
    try:
        compiled = topology.compile_stages(layouts.lower(layout, *told), mesh)
        fit, found, by_hand = compiled.fit, compiled.sent_by_kind, compiled.sent_by_hand
        became = compiled.differences(compiled.busiest, _expected(each, plan, compiled.busiest))
    except topology.DoesNotFit as error:
        fit = measure.fits(error)
    spent = time.perf_counter() - began
    return Check(candidate, fit, compiled, by_hand, found, spent, became)


def checked(plan: Plan, number: int, out: TextIO) -> list[dict[str, Any]]:
    """Compile the best layouts, print each on `out` when it is done, and return facts of all."""
    chosen = plan.best[:number]
    print("\nCompiled, GiB on a device (of stages the fullest):", file=out)
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
    return (
        f"  {found.candidate.roles}: {fits}, {said:.2f}, by formula {ours:.2f} "
        f"({ours / said - 1:+.0%}); sends {kinds or 'nothing'}; {found.seconds:.0f} s"
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
