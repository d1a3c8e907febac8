"""A pipeline as one program beside the smallest runtime that dispatches its stages, and one device.

Run from the project's root: `pip install -e .`, then `python benchmarks/pipeline.py`. Takes some
five minutes; `--sizes small --schedules 1f1b` takes less than one.

Simulated devices share this machine's cores, so what is compared is work: processor seconds of a
loss and its gradient, the median of some steps, each as a ratio to one device's (a scan over the
microbatches). Of a schedule's idle time nothing is seen here. `first` is seconds to the end of the
first step, with tracing and compilation; `temp MB` the program's temporaries on a device. Ends with
an error if gradients are not one device's, or if the program sends other bytes along the stages
than `layouts.predict` says.
"""

import argparse
import functools
import time
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardwise import layouts, measure, mesh, model, objective, schedules
from shardwise.pipeline import cut
from shardwise.schedules import Task

SIZES = {"small": dict(embed=64, mlp=128), "large": dict(embed=256, mlp=512)}
MICROBATCHES, ROWS, LENGTH = 8, 32, 64
HEAD = ("size", "schedule", "devices", "one device s", "program", "first", "temp MB")
FORMAT = "{:6}  {:16}  {:>7}  {:>12}  {:>7}  {:>6}  {:>7}  {:>10}  {:>6}"


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


class Dispatcher:
    """A schedule's lists of tasks, a thread each: what the one program is compared with.

    Each stage has jitted programs of its own, on its device; what goes on is `jax.device_put`.
    """

    def __init__(self, loss, params, batch, schedule):
        self.schedule, self.batch = schedule, jax.tree.leaves(batch)
        first = jax.tree.map(lambda x: x[:: schedule.microbatches], batch)
        self.stages = cut.stages(loss, params, first).stages
        halves = [cut.backward(stage) for stage in self.stages]
        names = dict(F="forward", B="whole", I="to_input", W="to_weights")
        self.programs = {k: [jax.jit(getattr(h, n)) for h in halves] for k, n in names.items()}
        self.add = jax.jit(lambda one, other: jax.tree.map(jnp.add, one, other))
        self.count = batch["mask"].sum()
        self.weights = [self.of_stage(stage, params) for stage in self.stages]

    def of_stage(self, stage, tree):
        """The rows of a tree's leaves that a stage has, on its device."""
        leaves = [np.asarray(x) for x in jax.tree.leaves(tree)]
        rows = [leaves[i][slice(*(ends or (None,)))] for i, ends in stage.rows.items()]
        return self.send(stage.index, rows)

    def send(self, s, arrays):
        """Arrays, to the device of stage `s`."""
        return jax.device_put(arrays, mesh.devices()[self.schedule.device_of[s]])

    def __call__(self):
        """(the mean, the gradients of each stage's parameters)."""
        tasks, m = self.schedule.tasks, self.schedule.microbatches
        self.done = {task: Future() for order in tasks for task in order}
        self.kept, self.pending, self.grads = {}, {}, {}
        with ThreadPoolExecutor(len(tasks)) as threads:
            list(threads.map(self.drive, tasks))
        totals = [self.done[Task(len(self.stages) - 1, "F", j)].result()[0] for j in range(m)]
        return sum(totals) / self.count, self.grads

    def drive(self, tasks):
        """One device's tasks; an error is told to those that wait."""
        for task in tasks:
            try:
                self.done[task].set_result(self.run(*task))
            except Exception as error:
                self.done[task].set_exception(error)
                raise

    def run(self, s, kind, j):
        """One task: what other stages wait for."""
        stage, program = self.stages[s], self.programs[kind][s]
        data = [self.batch[i][j :: self.schedule.microbatches] for i in stage.data]
        given = self.weights[s], self.send(s, data)
        if kind == "F":
            carry = self.send(s, self.done[Task(s - 1, "F", j)].result()) if s else []
            out, self.kept[s, j] = program(*given, carry)
            return out
        if kind == "W":
            return self.summed(s, program(*given, self.kept.pop((s, j)), self.pending.pop((s, j))))
        cotangents = [1 / self.count]
        if not stage.last:
            _, after = self.schedule.dependencies(Task(s, kind, j))
            cotangents = self.send(s, self.done[after].result())
        if kind == "I":
            back, self.pending[s, j] = program(*given, self.kept[s, j], cotangents)
            return back
        back, grads = program(*given, self.kept.pop((s, j)), cotangents)
        self.summed(s, grads)
        return back

    def summed(self, s, grads):
        """Add a stage's gradients to its sums."""
        self.grads[s] = self.add(self.grads[s], grads) if s in self.grads else grads


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


def close(name, found, expected):
    """Raise unless gradients are those expected, within 1e-4 of an array's largest entry."""
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max(), err_msg=name)


def row(size, name, devices, steps):
    """The cells of a schedule's line."""
    schedule = schedules.spread(name, devices, MICROBATCHES)
    loss, params, batch = problem(size, schedule.stages)
    alone = jax.jit(objective.value_and_grad(loss, MICROBATCHES))
    (_, expected), _, unit = measured(lambda: alone(params, batch), steps)
    grid = mesh.make(stage=devices)
    layout = layouts.Layout(grid, stage="stage", schedule=name, microbatches=MICROBATCHES)
    placed = layouts.place(layout, params)
    start = time.perf_counter()
    both = layouts.value_and_grad(layout, loss, check=False).lower(placed, batch).compile()
    compiled = time.perf_counter() - start
    sent = measure.collectives(both).ring_bytes
    asked = layouts.predict(layout, params, batch, loss=loss).sent["stage",]
    if asked != sent:
        raise AssertionError(f"{name} sends {sent:,} bytes, and {asked:,} are predicted.")
    (_, grads), first, taken = measured(lambda: both(placed, batch), steps)
    close(name, grads, expected)
    held = measure.bytes_per_device(both).temporaries / 1e6
    start = time.perf_counter()
    runtime = Dispatcher(loss, params, batch, schedule)
    made = time.perf_counter() - start
    (_, grads), later, dispatched = measured(runtime, steps)
    for stage in runtime.stages:
        close(name, grads[stage.index], runtime.of_stage(stage, expected))
    program = f"{taken / unit:.2f}", f"{compiled + first:.1f}", f"{held:.1f}"
    other = f"{dispatched / unit:.2f}", f"{made + later:.1f}"
    return size, name, devices, f"{unit:.3f}", *program, *other


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=[*SIZES])
    parser.add_argument("--devices", type=int, nargs="+", default=[4])
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b", "zb_h1", "zb_v"])
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    mesh.simulate(8)
    print(f"jax {jax.__version__}; 'program' and 'dispatched' as ratios to one device's seconds")
    print(FORMAT.format(*HEAD, "dispatched", "first"))
    for size in options.sizes:
        for devices in options.devices:
            for name in options.schedules:
                print(FORMAT.format(*row(size, name, devices, options.steps)), flush=True)
