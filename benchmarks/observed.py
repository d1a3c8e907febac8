"""What one JAX, with the TPU compiler beside it, makes of the observatory's programs, as JSON.

`make observe` runs this once with each stack's interpreter; `benchmarks/observatory.py` collects
what it prints. Each program is a loss and its gradient on eight v5e chips, in bfloat16, compiled
anew: the time is that of this machine, the start of the compiler included.
"""

import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import context, marks, measure, pipeline, topology

CHIPS = "v5e:2x4"
PACKAGES = ("jax", "jaxlib", "libtpu", "flax")
LAYERS, EMBED, MLP, ROWS, LENGTH = 4, 1024, 4096, 32, 1024
HEADS, HEAD, EXPERTS = 8, 128, 8


def fsdp_by_hand() -> tuple:
    """Weights gathered in each layer, forward and again backward; gradients scattered."""
    mesh = topology.chips(CHIPS).mesh(fsdp=8)

    def layer(x, w):
        whole = {name: jax.lax.all_gather(a, "fsdp", tiled=True) for name, a in w.items()}
        return _block(x, whole), None

    def loss(stack, x):
        return _total(jax.lax.scan(jax.checkpoint(layer), x, stack)[0])

    shards, rows = P(None, "fsdp"), P("fsdp")
    each = jax.shard_map(
        jax.grad(loss), mesh=mesh.abstract, in_specs=(shards, rows), out_specs=shards
    )
    return mesh, jax.jit(each), (_stack(mesh, shards, shards), _array(mesh, rows, *_TOKENS))


def fsdp_by_compiler() -> tuple:
    """The same shardings, and no collective written."""
    mesh = topology.chips(CHIPS).mesh(fsdp=8)

    def loss(stack, x):
        return _total(jax.lax.scan(jax.checkpoint(lambda x, w: (_block(x, w), None)), x, stack)[0])

    shards = P(None, "fsdp")
    laid = NamedSharding(mesh.abstract, shards)
    each = jax.jit(jax.grad(loss), out_shardings={"up": laid, "down": laid})
    return mesh, each, (_stack(mesh, shards, shards), _array(mesh, P("fsdp"), *_TOKENS))


def tensor_and_sequence() -> tuple:
    """The MLP cut in two products, and the sequence between them: pinned, as layouts pin them."""
    mesh = topology.chips(CHIPS).mesh(data=2, tensor=4)
    between, within = (
        NamedSharding(mesh.abstract, spec)
        for spec in (P("data", "tensor"), P("data", None, "tensor"))
    )
    pin = jax.lax.with_sharding_constraint

    def layer(x, w):
        hidden = jax.nn.gelu(pin(x @ w["up"], within))
        return pin(x + hidden @ w["down"], between), None

    def loss(stack, x):
        return _total(jax.lax.scan(layer, pin(x, between), stack)[0])

    specs = P(None, None, "tensor"), P(None, "tensor")
    laid = dict(zip(("up", "down"), (NamedSharding(mesh.abstract, s) for s in specs), strict=True))
    each = jax.jit(jax.grad(loss), out_shardings=laid)
    return mesh, each, (_stack(mesh, *specs), _array(mesh, P("data"), *_TOKENS))


def ring_attention() -> tuple:
    """Keys and values go around eight chips, each with an eighth of the sequence."""
    mesh, spec = topology.chips(CHIPS).mesh(context=8), P(None, "context")
    attend = context.ring("context")

    def loss(q, k, v, places):
        return _total(
            attend(q, k, v, marks.Places(places, jnp.zeros_like(places), places), marks.causal)
        )

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    each = jax.shard_map(
        gradient, mesh=mesh.abstract, in_specs=(spec,) * 4, out_specs=spec, check_vma=False
    )
    whole = 2, 8 * LENGTH, HEADS, HEAD
    given = [_array(mesh, spec, *whole) for _ in "qkv"]
    places = _array(mesh, spec, *whole[:2], dtype=jnp.int32)
    return mesh, jax.jit(each), (*given, places)


def experts() -> tuple:
    """Slots of tokens travel to the chip of their expert and back."""
    mesh, spec = topology.chips(CHIPS).mesh(expert=8), P("expert")

    def loss(w, slots):  # of a chip: its expert, and its tokens' slots for all experts
        there = jax.lax.all_to_all(slots, "expert", 0, 1, tiled=True)
        done = jax.vmap(_block)(there, w)
        return _total(jax.lax.all_to_all(done, "expert", 1, 0, tiled=True))

    each = jax.shard_map(
        jax.grad(loss, argnums=(0, 1)), mesh=mesh.abstract, in_specs=spec, out_specs=spec
    )
    w = {
        "up": _array(mesh, spec, EXPERTS, EMBED, MLP),
        "down": _array(mesh, spec, EXPERTS, MLP, EMBED),
    }
    return mesh, jax.jit(each), (w, _array(mesh, spec, 8 * EXPERTS, LENGTH, EMBED))


def gpipe() -> tuple:
    """Eight stages and eight microbatches as one scan over ticks, activations passed on."""
    mesh = topology.chips(CHIPS).mesh(stage=8)
    run = pipeline.gpipe(lambda w, x: jnp.tanh(x @ w[0]), mesh.abstract, 8)
    gradient = jax.jit(jax.grad(lambda stack, x: _total(run(stack, x))))
    given = _array(mesh, P("stage"), 8, EMBED, EMBED), _array(mesh, P(), ROWS * 64, EMBED)
    return mesh, gradient, given


_TOKENS = ROWS, LENGTH, EMBED


def _block(x, w):
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def _total(y):
    return jnp.sum(y.astype(jnp.float32) ** 2)


def _array(mesh, spec, *shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh.abstract, spec))


def _stack(mesh, up, down):
    return {
        "up": _array(mesh, up, LAYERS, EMBED, MLP),
        "down": _array(mesh, down, LAYERS, MLP, EMBED),
    }


PROGRAMS: dict[str, Callable[[], tuple]] = {
    "FSDP by hand": fsdp_by_hand,
    "FSDP by the compiler": fsdp_by_compiler,
    "tensor and sequence": tensor_and_sequence,
    "ring attention": ring_attention,
    "experts": experts,
    "pipeline in one program": gpipe,
}


def observed() -> Iterator[dict[str, Any]]:
    """Of each program its name, bytes, collectives by kind, and seconds; or why there is none."""
    for name, make in PROGRAMS.items():
        try:
            yield {"name": name, **_facts(*make())}
        except (ValueError, RuntimeError, NotImplementedError) as error:
            said = " ".join(str(error).split())[:200]
            yield {"name": name, "failed": f"{type(error).__name__}: {said}"}


def _facts(mesh, jitted, given):
    lowered, began = mesh.lower(jitted, *given), time.perf_counter()
    compiled = topology.compile(lowered, mesh)
    seconds = time.perf_counter() - began
    found = measure.collectives(compiled)
    return {
        "seconds": round(seconds, 1),
        "hbm": compiled.hbm_bytes,
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        "sent": found.ring_bytes,
        "collectives": {
            kind: {
                "in_program": counted.static,
                "run": counted.dynamic,
                "asynchronous": sum(op.asynchronous for op in found.ops if op.kind == kind),
                "sent": counted.ring_bytes,
            }
            for kind, counted in found.items()
        },
    }


def main() -> int:
    """Print one line of JSON with the versions, then one for each program when it is done."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    print(json.dumps({"chips": CHIPS, "versions": versions}), flush=True)
    for facts in observed():
        print(json.dumps(facts), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
