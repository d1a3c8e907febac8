"""Puzzles on arrays that come into being, or come back from disk, in shards."""

import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import checkpoint, measure, mesh
from shardwise_book.puzzles.running import compiled, in_one, normal, require_at_most, require_equal
from shardwise_book.puzzles.verdict import Verdict, Wrong, puzzle


@puzzle("return the stack of matrices.")
def born(create: Callable[[jax.Array], jax.Array]) -> Verdict:
    """Eight uniform [128, 128] matrices, one for each key of `split(key, 8)`, with little scratch.

    Compiled with `out_shardings` on eight devices: temporaries at most a device's share of them.
    """

    def at_once(key):
        return jax.vmap(lambda k: jax.random.uniform(k, (128, 128)))(jax.random.split(key, 8))

    cut = NamedSharding(mesh.make(fsdp=8), P(None, "fsdp"))
    for seed in (0, 7):
        key = jax.random.key(seed)
        program = compiled(create, key, out_shardings=cut)
        require_equal(program(key), in_one(at_once)(key))
    held = measure.bytes_per_device(program)
    if sent := measure.collectives(program).ring_bytes:
        raise Wrong(f"right values, but each device sends {sent:,} bytes; none need be sent.")
    require_at_most(held.temporaries, held.outputs, "bytes of temporaries on each device")
    return (
        f"{held.temporaries:,} bytes of temporaries beside {held.outputs:,} of shards, none sent."
    )


@puzzle("return abstract arrays with shardings, like the tree.")
def target(make: Callable[[Any, Mesh], Any]) -> Verdict:
    """`make(tree, mesh)`: what to restore, so that devices hold as little as the arrays allow."""
    state = {
        "kernel": normal(0, 64, 48),
        "odd": normal(1, 6, 32).astype(jnp.bfloat16),
        "count": np.int32(20),
    }
    rows = NamedSharding(mesh.make(data=8), P("data"))
    placed = jax.tree.map(jnp.asarray, state) | {"kernel": jax.device_put(state["kernel"], rows)}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), placed)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(folder, 1, {"state": placed})
        checkpoint.wait(folder)
        for grid in (mesh.make(data=4), mesh.make(data=4, model=2)):
            found = checkpoint.restore(folder, {"state": make(abstract, grid)})["state"]
            held = _check_restored(found, state, grid)
    return f"all bits, and {held:,} bytes on each of {grid.size} devices."


def _check_restored(found, state, grid):
    for name, array in state.items():
        require_equal(
            np.asarray(found[name], np.float32), np.asarray(array, np.float32), f" in {name}"
        )
        share = {d: 0 for d in grid.devices.flat} | measure.bytes_on_devices(found[name])
        parts = 1 if array.ndim == 0 else grid.size
        if set(share) != set(grid.devices.flat) or set(share.values()) != {array.nbytes // parts}:
            raise Wrong(
                f"right bits, but of {name}, {array.nbytes:,} bytes, devices of {dict(grid.shape)} "
                f"hold {sorted(set(share.values()))}; each is to hold {array.nbytes // parts:,}."
            )
    return measure.bytes_on_devices(found)[grid.devices.flat[0]]
