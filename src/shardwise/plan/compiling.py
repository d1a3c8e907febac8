"""A proposed layout as code, as flags of `shardwise train`, and as a step that is compiled."""

import dataclasses
import time
from typing import NamedTuple, TextIO

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import context, layouts, measure, model, topology
from shardwise.context.kernels import LANES
from shardwise.costs.arrays import Roles, parts
from shardwise.costs.sent import inserted
from shardwise.layers import spans
from shardwise.measure import hlo
from shardwise.measure.differences import Differences
from shardwise.measure.memory import Fit
from shardwise.model import Config
from shardwise.plan import arrays
from shardwise.plan.own import Own
from shardwise.plan.planning import Candidate, Plan
from shardwise.plan.roles import layout_on
from shardwise.topology import child
from shardwise.topology.slices import ChipMesh
from shardwise.train import Optimizer

_NOTHING, _PRODUCTS = "nothing_saveable", "dots_with_no_batch_dims_saveable"
_CODE = {
    "tiles": "context.tiled",
    "splash": "context.splash()",
    "cudnn": "context.cudnn()",
    "offload": "layouts.offload",
    "bfloat16": "jnp.bfloat16",
    **{policy: f"jax.checkpoint_policies.{policy}" for policy in (_NOTHING, _PRODUCTS)},
}


def kernel(plan: Plan) -> str:
    """What does attention to whole sequences: a kernel where there is one, or our tiles."""
    if plan.chips.chip.node:
        c = plan.config
        narrow = jnp.dtype(c.dtype).itemsize == 2 and c.head_dim % 8 == 0 and c.head_dim <= 128
        narrow &= c.depth == c.head_dim and not plan.document
        return "cudnn" if narrow else "tiles"
    return "tiles" if plan.sequence % LANES else "splash"


def _settings(roles, config=None, kernel=None):
    """The settings besides axes, as `shardwise train` has them; `kernel` is for whole sequences."""
    again = "offload" if roles.offload else _PRODUCTS if roles.products else _NOTHING
    narrow = config and jnp.dtype(config.dtype) != jnp.dtype(config.param_dtype)
    found = {
        "sequence": roles.tensor > 1,
        "attention": "zigzag" if roles.context > 1 else None,
        "kernel": None if roles.context > 1 else kernel,
        "microbatches": roles.microbatches if roles.microbatches > 1 else None,
        "dtype": jnp.dtype(config.dtype).name if narrow else None,
        "remat": again if roles.remat else None,
    }
    return {name: value for name, value in found.items() if value}


def code(roles: Roles, plan: Plan) -> str:
    """The layout as a Python expression of `context`, `jax`, `jnp`, `layouts` and `mesh`; of a
    program of your own without the settings that were given.
    """
    said = {role: f'"{role}"' for role in roles.axes}
    given = () if plan.own else (plan.config, kernel(plan))
    for name, value in _settings(roles, *given).items():
        said[name] = _CODE.get(value, f'"{value}"') if isinstance(value, str) else str(value)
    axes, said = (", ".join(f"{n}={x}" for n, x in each.items()) for each in (roles.axes, said))
    beside = f"Config(loss_chunks={roles.loss_chunks})" if roles.loss_chunks > 1 else ""
    beside = ", ".join(f"{name}=" for name in plan.own.settings) if plan.own else beside
    return f"layouts.Layout(mesh.make({axes}), {said})" + (f"  # with {beside}" if beside else "")


def flags(roles: Roles, plan: Plan) -> str:
    """The flags of `shardwise train` that train the decoder in this layout, with no mean kept."""
    given = {"batch": plan.batch, "sequence": plan.sequence, "ema": None}
    given |= {"data.packed": True} if plan.document else {}
    said = {"fsdp": 1} | roles.sizes | _settings(roles, plan.config, kernel(plan))
    given |= {f"layout.{name}": value for name, value in said.items()}
    config = dataclasses.replace(plan.config, loss_chunks=roles.loss_chunks)
    for name, chosen in {"model": config, "optimizer": plan.optimizer}.items():
        every, usual = dataclasses.asdict(chosen).items(), type(chosen)()
        given |= {f"{name}.{key}": x for key, x in every if x != getattr(usual, key)}
    return " ".join(_flag(name.replace("_", "-"), value) for name, value in given.items())


def _flag(name, value):
    if isinstance(value, bool):
        return f"--{name}" if value else "--{}.no-{}".format(*name.rsplit(".", 1))
    return f"--{name} {jnp.dtype(value).name if name.endswith('dtype') else value}"


def layout_of(roles: Roles, config: Config, mesh: Mesh, kernel: str = "tiles") -> layouts.Layout:
    """The layout on a mesh that has, for each role above 1, an axis of its name; with attention to
    whole sequences in "tiles", for TPUs by Pallas' "splash", or for GPUs by "cudnn".
    """
    given = _settings(roles, config, kernel)
    attend = {"splash": context.splash(), "cudnn": context.cudnn()}.get(kernel, context.tiled)
    again = getattr(jax.checkpoint_policies, given.get("remat", ""), layouts.offload)
    meant = {"kernel": attend, "remat": again, "dtype": config.dtype}
    return layout_on(mesh, roles, **{n: meant.get(n, x) for n, x in given.items()})


def program_of(
    roles: Roles,
    config: Config,
    batch: int,
    sequence: int,
    optimizer: Optimizer | None = None,
    packed: bool = False,
) -> Own:
    """The decoder's program for a layout, which has attention's kernel."""
    config = dataclasses.replace(config, stages=roles.stage, loss_chunks=roles.loss_chunks)
    create, loss, has_aux = model.program(config)
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "mask": jnp.float32}
    dtypes |= {"documents": jnp.int32, "positions": jnp.int32} if packed else {}
    fields = {name: jax.ShapeDtypeStruct((batch, sequence), x) for name, x in dtypes.items()}
    tx = optimizer and optimizer.transformation()
    return Own(create, loss, tx, fields, has_aux)


class Check(NamedTuple):
    """The compiler's verdict on a step: `fit` as `measure.fits` tells it, and ring bytes of a
    device, of stages of that which sends most. `lowered` are those of all collectives by hand;
    `sent` those of the compiled program, a dict by kind, as "all-gather"; `differences`, a
    `measure.differences.Differences`, tells what became of those by hand and of those expected
    along tensor. These two are empty for what does not fit. `seconds` are those of the check.
    """

    candidate: Candidate
    fit: Fit
    lowered: float
    sent: dict[str, float]
    seconds: float
    differences: Differences = Differences()


def lowered(each: Roles, plan: Plan) -> tuple[ChipMesh, jax.stages.Lowered]:
    """The training step of a layout for the plan's chips, abstract; the loss is not judged."""
    mesh = plan.chips.mesh(**each.axes)
    if plan.own:
        job = plan.own.under(each)
        layout = layout_on(mesh.abstract, each, **job.settings)
    else:
        given = plan.config, plan.batch, plan.sequence, plan.optimizer, bool(plan.document)
        job = program_of(each, *given)
        # XLA's compiler knows no cuDNN where no GPU is; where one was, tiles took about as much.
        chosen = "tiles" if plan.chips.chip.node else kernel(plan)
        layout = layout_of(each, plan.config, mesh.abstract, chosen)
    axes = [entry or None for entry in (layout.rows, layout.context)]
    shapes = job.params, jax.eval_shape(job.tx.init, job.params), job.batch
    rows = jax.tree.map(lambda x: NamedSharding(mesh.abstract, P(*axes[: x.ndim])), job.batch)
    laid = *layouts.shardings(layout, job.params, job.tx), rows
    given = jax.tree.map(lambda x, to: x.update(sharding=to), shapes, laid)
    step = layouts.step(layout, job.loss, job.tx, job.has_aux, check=False)
    return mesh, mesh.lower(step, *given)


def check(candidate: Candidate, plan: Plan) -> Check:
    """The `Check`, by the chips' compiler, of a candidate of what `plan.plan` or `own` returned.

    Raises:
      ImportError: as `topology.compile`, also RuntimeError. That it does not fit is no error.
      ValueError: a step that cannot be lowered for these chips.
    """
    child.versions(plan.chips.chip)  # or there is no compiler, and nothing need be traced
    began = time.perf_counter()
    mesh, program = lowered(candidate.roles, plan)
    written = hlo.lowered(program)  # read here: with a tensor axis alone nothing is by hand
    by_hand, found, became = measure.collectives(written), {}, Differences()
    try:
        compiled = topology.compile(program, mesh)
        fit = measure.fits(compiled)
        found = {kind: c.ring_bytes for kind, c in measure.collectives(compiled).items()}
        became = measure.differences(written, compiled, _expected(plan, candidate, by_hand.device))
    except topology.DoesNotFit as error:
        fit = measure.fits(error)
    spent = time.perf_counter() - began
    return Check(candidate, fit, by_hand.ring_bytes, found, spent, became)


def _expected(plan, candidate, stage):
    """The collectives that the compiler is expected to insert on a device of this stage."""
    if plan.own:
        return ()
    held = arrays.of_decoder(plan.config, plan.optimizer)
    first, *_ = parts(candidate.roles, plan.config, held, plan.batch, plan.sequence)
    span = spans(plan.config.layers, candidate.roles.stage)[stage]
    return inserted(dataclasses.replace(first, stage=stage, span=span))


def checked(plan: Plan, number: int, out: TextIO) -> list[Check]:
    """Compile the best layouts, and print each on `out` when it is done."""
    print("\nCompiled, GiB on a device:", file=out)
    found = []
    for candidate in plan.best[:number]:
        try:
            found.append(check(candidate, plan))
        except ImportError as error:
            print(f"  Nothing was compiled. {error}", file=out, flush=True)
            return []
        except (RuntimeError, ValueError) as error:  # the compiler's own end among them
            print(f"  {candidate.roles}: not compiled. {error}", file=out, flush=True)
            continue
        print(_told(found[-1], bool(plan.own)), file=out, flush=True)
    return found


def _told(found, own):
    """A line on memory and bytes sent, and one on what became of the bytes by formula."""
    said, ours = found.fit.needed / 2**30, found.candidate.memory.total / 2**30
    kinds = ", ".join(f"{kind} {size / 1e9:.4g} GB" for kind, size in found.sent.items())
    fits = "fits" if found.fit else "does not fit"
    sends = f"sends {kinds or 'nothing'}; " if kinds or found.fit else ""
    told = (
        f"  {found.candidate.roles}: {fits}, {said:.2f}, by formula {ours:.2f} "
        f"({ours / said - 1:+.0%}); {sends}{found.seconds:.0f} s"
    )
    if (memory := found.candidate.memory).most > memory.total:
        told += "" if own else "; attention in tiles"
        told += f"; on a GPU up to {memory.most / 2**30:.2f}"
    became = "; ".join(
        f"{name} {d.written / 1e6:,.1f} MB" + (f" ({d.more / 1e6:+,.1f})" if d.more else "")
        for name, d in found.differences.items()
    )
    return f"{told}\n    by formula and what the compiler made of it: {became}" if became else told
