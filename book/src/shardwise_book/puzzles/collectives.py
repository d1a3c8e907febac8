"""Puzzles on what devices send: collectives by `ppermute`, and FSDP by its gathers."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from shardwise import layouts, marks, measure, mesh
from shardwise_book.puzzles import judging
from shardwise_book.puzzles.judging import Verdict, Wrong, puzzle


@puzzle("return the sum of the block that belongs to this device.")
def scatter(function: Callable[[jax.Array], jax.Array]) -> Verdict:
    """Check a reduce-scatter along "x" by `ppermute` in log₂ n steps, with n = 2, 4 and 8 devices.

    `function` maps a device's blocks [n, ...] to [...], the sum of its own block over all devices.
    """
    for n in (2, 4, 8):
        line, partial = mesh.make(x=n), judging.whole_numbers(n, n * n, 4, 8)
        program = judging.on_each(function, line, partial, check=False)
        sums = partial.reshape(n, n, 4, 8).sum(axis=0).reshape(-1, 8)
        judging.require_equal(program(partial), sums, f" on {n} devices")
        moved = measure.collectives(program)
        if others := set(moved) - {"collective-permute"}:
            raise Wrong(f"right values, by {', '.join(others)}; send them by `ppermute` alone.")
        steps, enough = n.bit_length() - 1, partial.nbytes // n * (n - 1) // n
        sent = judging.require_sent(program, enough, f"bytes on {n} devices")
        judging.require_at_most(moved.dynamic, steps, f"permutes on {n} devices")
    blocks = f"{n - 1} blocks of {partial.nbytes // n**2}"
    return f"{steps} permutes on {n} devices, and {sent:,} bytes as on the ring, {blocks}."


@puzzle("return this device's part of the sum.")
def one_order(function: Callable[[jax.Array], jax.Array]) -> Verdict:
    """Check a reduce-scatter of eight arrays along "x", bit by bit, on n = 1, 2, 4 and 8 devices.

    `function` maps a device's [8/n, w] to its part [w/n] of the sum of all eight, whose bits have
    to be the same for each n.
    """
    arrays = judging.normal(0, 8, 256) * 10.0 ** np.arange(-3, 5).astype(np.float32)[:, None]
    sums = arrays
    while len(sums) > 1:
        sums = sums[0::2] + sums[1::2]
    for n in (1, 2, 4, 8):
        program = judging.on_each(function, mesh.make(x=n), arrays, check=False)
        judging.require_equal(program(arrays), sums[0], f" on {n} devices")
        enough = sums.nbytes * (n - 1) // n
        sent = judging.require_sent(program, enough, f"bytes on {n} devices")
    return f"the same bits on 1, 2, 4 and 8 devices, and on 8 a reduce-scatter's {sent:,.0f} bytes."


def halo(x: jax.Array) -> jax.Array:
    """x [rows, width] with the last row of the device before on top, [rows + 1, width]."""
    n = jax.lax.axis_size("x")
    above = jax.lax.ppermute(x[-1:], "x", [(d, (d + 1) % n) for d in range(n)])
    return jnp.concatenate([above, x])


@puzzle("return what each device's rows receive.")
def transpose(function: Callable[[jax.Array], jax.Array]) -> Verdict:
    """Check the transpose of `halo`, [rows + 1, width] to [rows, width], which sends no more."""
    for n, rows in ((2, 3), (4, 2), (8, 5)):
        line = mesh.make(x=n)
        x = judging.whole_numbers(n, n * rows, 6)
        y = judging.whole_numbers(n + 1, n * (rows + 1), 6)
        forward, backward = judging.on_each(halo, line, x), judging.on_each(function, line, y)
        found = np.asarray(backward(y))
        if found.shape == x.shape:
            left, right = np.vdot(forward(x), y), np.vdot(x, found)
            if left != right:
                raise Wrong(f"on {n} devices ⟨Ax, y⟩ is {left:g} and ⟨x, Aᵀy⟩ is {right:g}.")
        whole = jax.shard_map(halo, mesh=line, in_specs=P("x"), out_specs=P("x"))
        by_jax = judging.in_one(lambda y, f=whole, x=x: jax.linear_transpose(f, x)(y)[0])
        judging.require_equal(found, by_jax(y), f" on {n} devices")
        enough = measure.collectives(forward).ring_bytes
        sent = judging.require_sent(backward, enough, f"ring bytes on {n} devices")
    return f"⟨Ax, y⟩ = ⟨x, Aᵀy⟩ on 2, 4 and 8 devices, and {sent} bytes sent: one row."


EMBED, MLP = 64, 256


def layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """One layer on whole matrices: `w["up"]` [embed, mlp] and `w["down"]` [mlp, embed]."""
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def _stack(layers):
    up, down = judging.normal(0, layers, EMBED, MLP) / 8, judging.normal(1, layers, MLP, EMBED) / 16
    return {"up": up, "down": down}


def _error(body, stack, batch):
    return jnp.sum((jax.lax.scan(body, batch["x"], stack)[0] - batch["y"]) ** 2)


@puzzle("return what the layer yields, and None.")
def gather(body: Callable[[jax.Array, Any], tuple[jax.Array, None]]) -> Verdict:
    """Check the body of a scan over layers that are cut over eight devices along "fsdp".

    `body(x, w)` has a device's rows x [rows, embed], and in w its eighth of the rows of `up` and of
    `down`; it returns (what `layer` yields for x, None).
    """
    programs = {layers: _like_one_device(body, _stack(layers)) for layers in (2, 4)}
    temporaries = {n: measure.bytes_per_device(p).temporaries for n, p in programs.items()}
    one, grown = sum(a.nbytes for a in _stack(1).values()), (temporaries[4] - temporaries[2]) / 2
    if grown > 0.2 * one:
        raise Wrong(
            f"right gradients, but each layer more takes {grown / one:.2f} layers' bytes of "
            f"temporaries: gathered weights are kept for the backward pass, or gathered too early."
        )
    sent = judging.require_sent(programs[4], (3 * 4 * one + 8) * 7 / 8)
    return (
        f"{sent:,.0f} ring bytes for 4 layers, and each layer more takes {grown:,.0f} bytes of "
        f"temporaries, {grown / one:.3f} of its {one:,}."
    )


def _like_one_device(body, stack):
    """The gradient's program under FSDP by `body`, after a comparison with one device."""
    cut = P(None, "fsdp")
    batch = {"x": judging.normal(2, 16, EMBED), "y": judging.normal(3, 16, EMBED)}

    def run(stack, batch):
        value, slope = jax.value_and_grad(lambda s: _error(body, s, batch))(stack)
        return jax.lax.psum(value, "fsdp"), slope

    specs = dict(in_specs=(cut, P("fsdp")), out_specs=(P(), cut))
    program = judging.on_each(run, mesh.make(fsdp=8), stack, batch, **specs)
    value, slope = program(stack, batch)
    whole = jax.value_and_grad(lambda s: _error(lambda x, w: (layer(x, w), None), s, batch))
    expected = judging.in_one(whole)(stack)
    judging.require_close(value, expected[0], "the loss")
    judging.require_close(slope, expected[1], "the gradient")
    return program


@puzzle("return the clipped gradients, as a dict.")
def clip(function: Callable[[dict[str, jax.Array], float], dict[str, jax.Array]]) -> Verdict:
    """Check the clipping of gradients by their global norm, for which devices send one number.

    `function(grads, limit)` runs on each of eight devices along "x": in the dict `grads`, "w" and
    "v" are cut, "b" is whole. It returns such a dict, of a norm of at most `limit` in all.
    """
    line, laid = mesh.make(x=8), {"w": P("x"), "v": P("x"), "b": P()}
    specs = dict(in_specs=(laid,), out_specs=laid)
    for seed, limit in ((0, 1.0), (1, 1e3), (2, 5.0)):
        grads = {"w": judging.normal(seed, 64, 16), "v": judging.normal(seed + 1, 32)}
        grads["b"] = 3 * judging.normal(seed + 2, 16)
        program = judging.on_each(lambda g, k=limit: function(g, k), line, grads, **specs)
        found = program(grads)
        expected, _ = optax.clip_by_global_norm(limit).update(grads, optax.EmptyState())
        for name in laid:
            judging.require_close(found[name], expected[name], f'"{name}" under limit {limit:g}')
        moved = measure.collectives(program)
        judging.require_at_most(moved.payload_bytes, 4, "bytes of payload")
    return f"{moved.payload_bytes} bytes of payload, {moved.ring_bytes:g} ring bytes: one number."


@puzzle("choose `zero`, `dtype` and `reduce_dtype`.")
def settings(options: Mapping[str, Any]) -> Verdict:
    """Check the settings of an FSDP `Layout` that sends least within 2.9Ψ bytes of memory.

    `options` is a dict of "zero", "dtype" and "reduce_dtype". They are for a step of four
    microbatches on eight devices, whose gradients are summed in float32; Ψ is the bytes of the
    parameters, and memory all that a device needs in the step.
    """
    if unknown := set(options) - {"zero", "dtype", "reduce_dtype"}:
        raise Wrong(f"choose zero, dtype and reduce_dtype, and leave out {sorted(unknown)}.")
    lowered, program, psi = _step(options)
    total, written = measure.bytes_per_device(program).total / psi, measure.collectives(lowered)
    if total > 2.9:
        raise Wrong(f"a device needs {total:.2f}Ψ during the step; the budget is 2.9Ψ.")
    if any(op.kind == "reduce-scatter" and "bf16" in op.dtype for op in written.ops):
        raise Wrong("gradients are summed in bfloat16; they are to be summed in float32.")
    sent = round(written.ring_bytes / psi * 8 / 7, 2)
    if sent > 4.5:
        raise Wrong(f"within the budget ({total:.2f}Ψ), {sent:g}Ψ(n−1)/n sent; 4.5 are enough.")
    return f"{sent:g}Ψ(n−1)/n sent as written, and {total:.2f}Ψ of memory as XLA for CPU has it."


def _step(options):
    """A step of four layers, lowered and compiled, and the bytes of their parameters."""

    def loss(stack, batch):
        body = jax.checkpoint(lambda x, w: (layer(x, marks.use(w)), None))
        return jnp.mean((jax.lax.scan(body, batch["x"], stack)[0] - batch["y"]) ** 2)

    grid, stack, adam = mesh.make(fsdp=8), _stack(4), optax.adam(1e-3)
    batch = {"x": judging.normal(2, 64, EMBED), "y": judging.normal(3, 64, EMBED)}
    how = dict(fsdp="fsdp", stacked=lambda path: True, microbatches=4)
    layout = layouts.Layout(grid, **how, **options)
    state = jax.device_put((stack, adam.init(stack)), layouts.shardings(layout, stack, adam))
    lowered = layouts.step(layout, loss, adam).lower(*state, batch)
    program = lowered.compile(judging.QUICK)
    mean = program(*state, batch)[2]
    judging.require_close(mean, judging.in_one(loss)(stack, batch), "the loss", 1e-2)
    return lowered, program, sum(a.nbytes for a in stack.values())
