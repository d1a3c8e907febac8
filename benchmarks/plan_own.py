"""`plan.own`'s estimate of memory, which knows nothing of the decoder, beside the compilers'.

`python benchmarks/plan_own.py` takes what `benchmarks/plan.py` and `plan_gpu.py` have recorded of
layouts of data and fsdp, and traces the same losses as if they were anybody's: some 10 s each,
nothing is compiled. With `--flax`, networks of Flax's own parts, whose layers are in no scan, are
compiled too: for TPUs one to two minutes each, for GPUs ten seconds.
"""

import sys
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import plan
import plan_cases
import plan_gpu

from shardwise import context, mesh, topology, train
from shardwise.costs.memory import Memory
from shardwise.plan import compiling, own
from shardwise.plan.own import Own, candidate


class VisionTransformer(nn.Module):
    """Six layers of 384, on patches of 8 × 8 pixels."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(384, (8, 8), (8, 8), dtype=self.dtype)(x)
        x = x.reshape(x.shape[0], -1, 384)
        for _ in range(6):
            y = nn.LayerNorm(dtype=self.dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(6, dtype=self.dtype)(y, y)
            y = nn.Dense(4 * 384, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
            x = x + nn.Dense(384, dtype=self.dtype)(nn.gelu(y))
        return nn.Dense(1000)(x.mean(1).astype(jnp.float32))


class Convolutions(nn.Module):
    """Ten of them, with group norm, and two dense layers."""

    @nn.compact
    def __call__(self, x):
        for wide, layers in (64, 2), (128, 2), (256, 3), (512, 3):
            for _ in range(layers):
                x = nn.relu(nn.GroupNorm(32)(nn.Conv(wide, (3, 3))(x)))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(1000)(nn.relu(nn.Dense(1024)(x.reshape(x.shape[0], -1))))


def estimated(case: plan_cases.Case) -> Memory:
    """By a trace of the program."""
    program = compiling.program_of(case.roles, case.config, case.batch, case.sequence)
    told = program.create, program.loss, train.optimizer(), program.batch, program.has_aux
    again = jax.checkpoint_policies.nothing_saveable if case.roles.remat else None
    settings = {"dtype": case.config.dtype, "kernel": context.tiled, "remat": again}
    job = Own(*told, settings)
    return candidate(job, case.roles, topology.chips(case.chips)).memory


def off(memory: Memory, needed: float) -> tuple[float, float]:
    """The estimate, and the most that is asked to fit, over what the compiler reserves, less 1."""
    return memory.total / needed - 1, memory.most / needed - 1


def of_images(network: nn.Module, size: int, chips: str, rows: int = 256) -> tuple[float, float]:
    """How far `off` a network is with FSDP on eight chips."""

    def loss(params, batch):
        logits = network.apply(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    pixels = jax.ShapeDtypeStruct((rows, size, size, 3), jnp.float32)
    batch = {"x": pixels, "y": jax.ShapeDtypeStruct((rows,), jnp.int32)}
    create = lambda key: network.init(key, jnp.zeros((1, size, size, 3)))  # noqa: E731
    found = own(create, loss, optax.adamw(1e-3), chips, batch)
    every = *found.fitting, *found.too_large
    chosen = next(c for c in every if c.roles.fsdp == 8 and c.roles.microbatches == 1)
    return off(chosen.memory, compiling.check(chosen, found).fit.needed)


def of_flax() -> Iterator[tuple[str, tuple[float, float]]]:
    """(a network, how far off it is)."""
    for chips in ("v5e:2x4", "h100:1x8"):
        yield f"vision transformer, {chips}", of_images(VisionTransformer(), 224, chips)
        yield f"bfloat16, {chips}", of_images(VisionTransformer(jnp.bfloat16), 224, chips)
        yield f"convolutions, {chips}", of_images(Convolutions(), 112, chips)


def main() -> None:
    mesh.look_for_no_tpu()
    for name, found in of_flax() if "--flax" in sys.argv[1:] else ():
        print(f"{name:32} {found[0]:+.1%} {found[1]:+.1%}", flush=True)
    every: dict[str, list[tuple[float, float]]] = {}
    for of in (plan, plan_gpu):
        record = of.recorded()
        for name, case in of.CASES.items():
            r, c = case.roles, case.config
            if set(r.sizes) <= {"data", "fsdp"} and not (r.offload or r.products or c.experts):
                found = off(estimated(case), record[name]["needed"])
                print(f"{name:32} {found[0]:+.1%} {found[1]:+.1%}", flush=True)
                which = "in chunks" if r.loss_chunks > 1 else "whole"
                which += ", GPUs" if of is plan_gpu else ", TPUs"
                every.setdefault(which, []).append(found)
    for which, each in every.items():
        low, most = zip(*each, strict=True)
        near = sum(abs(x) <= 0.15 for x in low)
        told = f"from {min(low):+.0%} to {max(low):+.0%}; at most, {min(most):+.0%} or more"
        print(f"logits {which}: {near} of {len(each)} within 15 %, {told}")


if __name__ == "__main__":
    main()
