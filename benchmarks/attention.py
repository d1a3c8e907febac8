"""Temporaries of attention alone, forward and backward, as the sequence and the devices grow."""

import functools

import jax
import jax.numpy as jnp
import recipes
from jax.sharding import PartitionSpec as P

from shardwise import context, marks, measure, mesh

LENGTH, DEVICES, HEADS, HEAD_DIM = 4096, 4, 8, 16
SIZES = {"(S, n)": (1, 1), "(2S, 2n)": (2, 2), "(2S, n)": (2, 1)}
MOST = {"(S, n)": 1.0, "(2S, 2n)": 1.2, "(2S, n)": 2.4}  # of those at (S, n)
FORMS = {
    "ring": (context.ring, context.contiguous),
    "zigzag": (context.ring, context.zigzag),
    "all_gather": (context.all_gather, context.contiguous),
    "ulysses": (context.ulysses, context.contiguous),
} | {name: (form, context.contiguous) for name, form in recipes.RECIPES.items()}
BOUND = ("ring", "zigzag")


def compare():
    """Print the table; what missed its target."""
    print(f"\nattention: S = {LENGTH}, n = {DEVICES}, {HEADS} heads of {HEAD_DIM}; temporaries, MB")
    width = max(map(len, FORMS))
    print("".ljust(width), *(name.rjust(18) for name in SIZES))
    missed = []
    for name, given in FORMS.items():
        found = {at: temporaries(*given, *scale) for at, scale in SIZES.items()}
        ratios = {at: size / found["(S, n)"] for at, size in found.items()}
        cells = (f"{found[at] / 1e6:9.3f} ({ratios[at]:.2f})".rjust(18) for at in SIZES)
        print(name.ljust(width), *cells)
        over = [at for at in SIZES if name in BOUND and ratios[at] > MOST[at]]
        missed += [
            f"{name} at {at} takes {ratios[at]:.2f} of (S, n), not {MOST[at]}" for at in over
        ]
    return missed


def temporaries(form, order, longer, wider):
    """Bytes on one device, of the gradient with respect to q, k and v."""
    length, n = LENGTH * longer, DEVICES * wider
    grid, spec = mesh.make(context=n), P(None, "context")

    def device(q, k, v, index):
        places = marks.Places(index, jnp.zeros_like(index), index)
        attend = functools.partial(form("context"), places=places)
        out, back = jax.vjp(attend, q, k, v)
        return back(out)

    manual = jax.shard_map(device, mesh=grid, in_specs=spec, out_specs=spec, check_vma=False)
    index = jnp.asarray(order(length, n))[None]
    x = jax.ShapeDtypeStruct((1, length, HEADS, HEAD_DIM), jnp.float32)
    compiled = jax.jit(manual).lower(x, x, x, index).compile()
    return measure.bytes_per_device(compiled).temporaries
