"""Puzzles on where arrays lie: specs, products, rule tables; how they are born, and restored."""

import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import checkpoint, measure, mesh, model, rules
from shardwise_book.puzzles import judging
from shardwise_book.puzzles.judging import Verdict, Wrong, puzzle


@puzzle("put a `P(...)` in the place of the dots.")
def bands(spec: P) -> Verdict:
    """Check the spec of eight bands of rows: device (i, j) of data=4, model=2 holds band 4j + i."""
    grid = mesh.make(data=4, model=2)
    if not isinstance(spec, P):
        raise Wrong(f"expected a PartitionSpec, `P(...)`, and got {spec!r}.")
    for shape in ((64, 32), (16, 8, 4)):
        layout = NamedSharding(grid, spec)
        share = np.prod(layout.shard_shape(shape)) / np.prod(shape)
        if share != 1 / 8:
            raise Wrong(f"a device holds {share:.3g} of the array; a band is an eighth, 0.125.")
        where, rows = layout.devices_indices_map(shape), shape[0] // 8
        for (i, j), device in np.ndenumerate(grid.devices):
            cut, *others = (index.indices(n) for index, n in zip(where[device], shape, strict=True))
            if any(index[:2] != (0, n) for index, n in zip(others, shape[1:], strict=True)):
                raise Wrong(f"an eighth each, but an axis other than the rows of {shape} is cut.")
            if cut[0] != (4 * j + i) * rows:
                raise Wrong(
                    f"an eighth each, but device ({i}, {j}) holds band {cut[0] // rows}, and "
                    f"should hold band {4 * j + i}."
                )
    return "every device holds its band, an eighth of the array."


@puzzle("return two specs, one for A and one for B.")
def product(specs: Callable[[int, int, int], tuple[P, P]]) -> Verdict:
    """Check the layouts of two factors, I×J and J×K, for whose product devices send least.

    `specs(I, J, K)` returns both PartitionSpecs over a mesh model=4; each factor is cut in four.
    """
    line, told = mesh.make(model=4), []
    for i, j, k in ((256, 64, 32), (32, 64, 256), (16, 512, 16), (64, 64, 64)):
        a, b = judging.whole_numbers(i, i, j), judging.whole_numbers(k, j, k)
        layouts = [NamedSharding(line, spec) for spec in specs(i, j, k)]
        for name, factor, layout in zip("AB", (a, b), layouts, strict=True):
            share = np.prod(layout.shard_shape(factor.shape)) / factor.size
            if share != 1 / 4:
                raise Wrong(f"each device holds {share:.3g} of {name}; it is to hold a quarter.")
        placed = jax.device_put((a, b), tuple(layouts))
        program = judging.compiled(jnp.dot, *placed)
        judging.require_equal(program(*placed), a @ b)
        # Either factor may be gathered, or the partial products be reduced, which is two passes.
        enough = min(a.nbytes, b.nbytes, 2 * 4 * i * k) * 3 / 4
        sent = judging.require_sent(program, enough, f"ring bytes for {i}×{j} times {j}×{k}")
        told.append(f"{sent:,} ({i}×{j} by {j}×{k})")
    return f"ring bytes {', '.join(told)}; no other pair of specs sends less."


@puzzle("put a mesh axis, several, or None in the place of each of the dots.")
def table(axes: Mapping[str, str | tuple | None]) -> Verdict:
    """Check a rule table for the decoder on a mesh data=4, model=2.

    `axes` maps each logical axis to a mesh axis, several, or None. Every matrix is to lie in
    eighths, and an MLP to send as little as it can.
    """
    grid, rule = mesh.make(data=4, model=2), rules.LogicalRules(dict(axes))
    sizes = (64, 4, 2, 16, 192), (128, 8, 4, 16, 256)
    for embed, heads, kv_heads, head_dim, mlp in sizes:
        config = model.Config(256, embed, 2, heads, kv_heads, head_dim, mlp)
        params = nnx.eval_shape(lambda c=config: nnx.state(model.Decoder(c, nnx.Rngs(0))))
        for row in rules.describe(rule, params, grid).rows:
            whole = 4 * np.prod(row.shape)
            if np.prod(row.shape) >= 1024 and row.bytes != whole / 8:
                raise Wrong(
                    f"{row.path} lies under `{row.spec}`: {row.bytes:,} bytes on each device, and "
                    f"an eighth is {whole // 8:,}."
                )
    told = [
        f"{_send_mlp(rule, grid, embed, mlp):,} ring bytes for an MLP of {embed} and {mlp}"
        for embed, *_, mlp in sizes
    ]
    return f"eighths of every matrix; {', '.join(told)}."


def _send_mlp(rule, grid, embed, mlp, rows=512):
    names = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
    x, up = judging.whole_numbers(3, rows, embed), judging.whole_numbers(1, embed, mlp)
    down = judging.whole_numbers(2, mlp, embed)
    specs = rules.LogicalRules(dict(rule.table), names=names)({"up": up, "down": down}, grid)
    layouts = tuple(NamedSharding(grid, s) for s in (P("data"), specs["up"], specs["down"]))
    placed = jax.device_put((x, up, down), layouts)
    how = dict(in_shardings=layouts, out_shardings=layouts[0])
    program = judging.compiled(lambda x, up, down: jax.nn.relu(x @ up) @ down, *placed, **how)
    judging.require_equal(program(*placed), np.maximum(x @ up, 0) @ down)
    # Half of both matrices gathered over `data`, the result of four rows' share reduced over two.
    enough = 2 * (embed * mlp * 4 // 2) * 3 // 4 + 2 * (rows // 4 * embed * 4) // 2
    what = f"ring bytes for an MLP of {embed} and {mlp} on {rows} rows"
    return judging.require_sent(program, enough, what)


@puzzle("return the stack of matrices.")
def born(create: Callable[[jax.Array], jax.Array]) -> Verdict:
    """Check a function that draws eight uniform [128, 128] matrices with little scratch.

    `create(key)` returns them stacked, matrix i from key i of `jax.random.split(key, 8)`. Compiled
    with `out_shardings` over eight devices, its temporaries may take as many bytes as a device's
    share of the matrices.
    """

    def at_once(key):
        return jax.vmap(lambda k: jax.random.uniform(k, (128, 128)))(jax.random.split(key, 8))

    cut = NamedSharding(mesh.make(fsdp=8), P(None, "fsdp"))
    for seed in (0, 7):
        key = jax.random.key(seed)
        program = judging.compiled(create, key, out_shardings=cut)
        judging.require_equal(program(key), judging.in_one(at_once)(key))
    held = measure.bytes_per_device(program)
    if sent := measure.collectives(program).ring_bytes:
        raise Wrong(f"right values, but each device sends {sent:,} bytes; none need be sent.")
    judging.require_at_most(held.temporaries, held.outputs, "bytes of temporaries on each device")
    return (
        f"XLA for CPU takes {held.temporaries:,} bytes of temporaries beside {held.outputs:,} of "
        f"shards, and none is sent."
    )


@puzzle("return abstract arrays with shardings, like the tree.")
def target(make: Callable[[Any, Mesh], Any]) -> Verdict:
    """Check what a checkpoint is restored as, so that devices hold as little as arrays allow.

    `make(tree, mesh)` has the tree of abstract arrays that was saved, and returns it with a
    NamedSharding in each.
    """
    state = {
        "kernel": judging.normal(0, 64, 48),
        "odd": judging.normal(1, 6, 32).astype(jnp.bfloat16),
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
        ours, theirs = (np.asarray(one, np.float32) for one in (found[name], array))
        judging.require_equal(ours, theirs, f" in {name}")
        share = {d: 0 for d in grid.devices.flat} | measure.bytes_on_devices(found[name])
        parts = 1 if array.ndim == 0 else grid.size
        if set(share) != set(grid.devices.flat) or set(share.values()) != {array.nbytes // parts}:
            raise Wrong(
                f"right bits, but of {name}, {array.nbytes:,} bytes, devices of {dict(grid.shape)} "
                f"hold {sorted(set(share.values()))}; each is to hold {array.nbytes // parts:,}."
            )
    return measure.bytes_on_devices(found)[grid.devices.flat[0]]
