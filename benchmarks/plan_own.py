"""`plan.own`'s estimate of memory, which knows nothing of the decoder, beside the TPU compiler's.

`python benchmarks/plan_own.py` takes what `benchmarks/plan.py` has recorded of layouts of data and
fsdp, and traces the same losses as if they were anybody's: some 10 s each, nothing is compiled for
TPUs. With `--flax`, networks of Flax's own parts, whose layers are in no scan, are compiled too:
one to two minutes each.
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

from shardwise import context, mesh, topology, train
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


def estimated(case: plan_cases.Case) -> float:
    """Bytes on a device."""
    program = compiling.program_of(case.roles, case.config, case.batch, case.sequence)
    told = program.create, program.loss, train.optimizer(), program.batch, program.has_aux
    again = jax.checkpoint_policies.nothing_saveable if case.roles.remat else None
    settings = {"dtype": case.config.dtype, "kernel": context.tiled, "remat": again}
    job = Own(*told, settings)
    return candidate(job, case.roles, topology.chips(case.chips)).memory.total


def of_images(network: nn.Module, size: int, rows: int = 256) -> float:
    """The estimate over what the compiler reserves, less 1, with FSDP on eight chips."""

    def loss(params, batch):
        logits = network.apply(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    pixels = jax.ShapeDtypeStruct((rows, size, size, 3), jnp.float32)
    batch = {"x": pixels, "y": jax.ShapeDtypeStruct((rows,), jnp.int32)}
    create = lambda key: network.init(key, jnp.zeros((1, size, size, 3)))  # noqa: E731
    found = own(create, loss, optax.adamw(1e-3), "v5e:2x4", batch)
    every = *found.fitting, *found.too_large
    chosen = next(c for c in every if c.roles.fsdp == 8 and c.roles.microbatches == 1)
    return chosen.memory.total / compiling.check(chosen, found).fit.needed - 1


def of_flax() -> Iterator[tuple[str, float]]:
    """(a network, how far off its estimate is)."""
    yield "vision transformer", of_images(VisionTransformer(), 224)
    yield "the same, bfloat16", of_images(VisionTransformer(jnp.bfloat16), 224)
    yield "convolutions", of_images(Convolutions(), 112)


def main() -> None:
    mesh.look_for_no_tpu()
    for name, share in of_flax() if "--flax" in sys.argv[1:] else ():
        print(f"{name:28} {share:+.1%}", flush=True)
    record, off = plan.recorded(), {"whole": [], "in chunks": []}
    for name, case in plan.CASES.items():
        r, c = case.roles, case.config
        if set(r.sizes) <= {"data", "fsdp"} and not (r.offload or r.products or c.experts):
            of_logits = off["in chunks" if r.loss_chunks > 1 else "whole"]
            of_logits.append(estimated(case) / record[name]["needed"] - 1)
            print(f"{name:28} {of_logits[-1]:+.1%}", flush=True)
    for which, each in off.items():
        near = sum(abs(x) <= 0.15 for x in each)
        told = f"from {min(each):+.0%} to {max(each):+.0%}"
        print(f"logits {which}: {near} of {len(each)} within 15 %, {told}")


if __name__ == "__main__":
    main()
