"""A pipeline as one program beside the same schedule dispatched stage by stage, and one device.

Run from the project's root: `pip install -e .`, then `python benchmarks/one_program.py`. Takes some
five minutes; `--sizes small --schedules 1f1b` takes less than one.

Simulated devices share this machine's cores, so what is compared is work: processor seconds of a
loss and its gradient, the median of some steps, each beside the same of one device (a scan over the
microbatches). Of a schedule's idle time nothing is seen here. `first` is seconds to the end of the
first step, with tracing and compilation. Ends with an error if gradients are not one device's.
"""

import argparse
import functools
import time

import jax
import numpy as np
from flax import nnx

from shardwise import layouts, mesh, model, objective, schedules

SIZES = {"small": dict(embed=64, mlp=128), "large": dict(embed=256, mlp=512)}
MICROBATCHES, ROWS, LENGTH = 8, 32, 64


def problem(size, stages):
    """(loss, params, batch): a decoder of two layers a stage, by a scan."""
    heads = dict(heads=4, kv_heads=4, head_dim=SIZES[size]["embed"] // 4)
    config = model.Config(layers=2 * stages, stages=stages, scan=True, **heads, **SIZES[size])
    graphdef, params = nnx.split(nnx.jit(lambda: model.Decoder(config, nnx.Rngs(0)))())
    draw = np.random.default_rng(0)
    batch = {n: draw.integers(0, 256, (ROWS, LENGTH)) for n in ("tokens", "targets")}
    batch = {name: x.astype(np.int32) for name, x in batch.items()}
    batch["mask"] = np.ones((ROWS, LENGTH), np.float32)
    return functools.partial(model.loss, graphdef=graphdef), params, batch


def measured(run, steps):
    """(what the first call returned, its seconds, processor seconds of one more)."""
    start = time.perf_counter()
    out = jax.block_until_ready(run())
    first, taken = time.perf_counter() - start, []
    for _ in range(steps):
        start = time.process_time()
        jax.block_until_ready(run())
        taken.append(time.process_time() - start)
    return out, first, float(np.median(taken))


def row(size, name, devices, steps):
    """The cells of a schedule's line."""
    stages = schedules.spread(name, devices, MICROBATCHES).stages
    loss, params, batch = problem(size, stages)
    alone = jax.jit(objective.value_and_grad(loss, MICROBATCHES))
    expected, _, unit = measured(lambda: alone(params, batch), steps)
    cells = [size, name, devices, f"{unit:.3f}"]
    for program in (False, True):
        options = dict(schedule=name, microbatches=MICROBATCHES, program=program)
        layout = layouts.Layout(mesh.make(stage=devices), stage="stage", **options)
        placed = layouts.place(layout, params, loss, batch)
        both = layouts.value_and_grad(layout, loss, check=False)
        found, first, taken = measured(functools.partial(both, placed, batch), steps)
        for a, b in zip(
            *map(jax.tree.leaves, (layouts.whole(layout, found[1]), expected[1])), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max(), err_msg=name)
        cells += [f"{taken / unit:.2f}", f"{first:.1f}"]
    return cells


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=[*SIZES])
    parser.add_argument("--devices", type=int, nargs="+", default=[4])
    parser.add_argument(
        "--schedules", nargs="+", default=["gpipe", "1f1b", "zb_h1", "zb_v", "dualpipe_v"]
    )
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    mesh.simulate(8)
    print(f"jax {jax.__version__}; 'dispatched' and 'program' as ratios to one device's seconds")
    print("size    schedule         devices  one device  dispatched  first  program  first")
    for size in options.sizes:
        for devices in options.devices:
            for name in options.schedules:
                a, b, c, d, e, f, g, h = row(size, name, devices, options.steps)
                print(f"{a:7} {b:16} {c:7}  {d:>10}  {e:>10}  {f:>5}  {g:>7}  {h:>5}")
