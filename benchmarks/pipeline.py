"""Pipelines as run beside pipelines as simulated: time on stages that sleep, bytes on real ones.

Run from the project's root: `pip install -e .`, then `python benchmarks/pipeline.py`. Takes some
fifteen minutes; `--tables time --devices 4 --rounds 2` takes one or two.

Eight simulated devices share this machine's few cores, so the stages that are timed compute next
to nothing: each sleeps, 20 ms for F, I and W and 40 ms for B, in a callback, which leaves Python
to the other ranks. What is left is what the executor adds. Between runs of the pipeline every
program is run alone, on its own devices, and the simulator is fed with those times, so that what
else the machine does lengthens both; on a busy one ratios scatter by 0.05 either way. Ends with an
error if a pipeline's gradients are not those of one device, or a device holds less or more than
the table of tasks says (`pipeline_memory.py`); times are only shown.

Columns: `stages` and microbatches (`mb`); `s` measured makespan, median, and its spread between
the quartiles; the ratio of that to the makespan simulated with each task as it runs `alone` (its
program, waited for, and its result handed to the next stage; at most 1.05 is the target), with the
`program` alone, and with the `nominal` milliseconds; and, on the path of tasks that wait for each
other up to the last one, in microseconds, how much `longer` each takes than its program alone, and
how much passes `between` two of them.
"""

import argparse
import itertools

import jax
import numpy as np
import pipeline_memory
import sleeping

from shardwise import mesh, pipeline, schedules

TARGET = 1.05


class Timed:
    """One schedule on stages that sleep: what its tasks took alone, and its runs."""

    def __init__(self, name, devices, microbatches, seconds=sleeping.SECONDS):
        self.name, self.seconds = name, seconds
        self.schedule = schedules.spread(name, devices, microbatches)
        params, batch = sleeping.arguments(self.schedule.stages, microbatches)
        grid = mesh.make(stage=devices)
        loss = sleeping.loss(seconds)
        self.function = pipeline.value_and_grad(loss, grid, self.schedule, microbatches)
        self.params, self.batch = pipeline.place(params, self.function, batch), batch
        self.check(params)
        kinds = {task.kind for order in self.schedule.tasks for task in order}
        plan = self.function.plan(self.params, batch)
        self.alone, self.runs = sleeping.Alone(plan, self.params, kinds), []

    def check(self, params):
        """The first run, which compiles: one device's loss and gradients."""
        mean, grads = self.function(self.params, self.batch)
        expected = jax.value_and_grad(sleeping.mean)(params, self.batch)
        found = mean, pipeline.whole(grads)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, err_msg=self.name)

    def round(self):
        """Every program alone, and one run of the pipeline."""
        self.alone.round()
        self.runs.append(self.function.timed(self.params, self.batch)[1])

    @property
    def makespans(self):
        return [max(end for _, end in times.values()) for times in self.runs]

    def row(self):
        """The cells of the table."""
        low, median, high = np.percentile(self.makespans, [25, 50, 75])
        longer, between = self.overhead()
        costs = (self.alone.tasks, self.alone.programs, sleeping.nominal(self.seconds))
        ratios = [median / schedules.timeline(self.schedule, cost).makespan for cost in costs]
        verdict = "met" if ratios[0] <= TARGET else "MISSED"
        size = self.schedule.devices, self.schedule.stages, self.schedule.microbatches
        times = (f"{median:.3f}", f"{high - low:.3f}", *(f"{ratio:.3f}" for ratio in ratios))
        return (self.name, *size, *times, f"{longer:.0f}", f"{between:.0f}", verdict)

    def overhead(self):
        """(longer, between) of a task on the critical path, in microseconds: medians of the runs.

        Longer than its program alone: handing the result on counts here.
        """
        found = [self._overhead(times) for times in self.runs]
        return 1e6 * np.median(found, axis=0)

    def _overhead(self, times):
        path = critical_path(self.schedule, times)
        took = sum(times[task][1] - times[task][0] for task in path)
        alone = sum(self.alone.programs[task.stage, task.kind] for task in path)
        return (took - alone) / len(path), (times[path[-1]][1] - took) / len(path)


def critical_path(schedule, times):
    """The last task to end, what it waited for longest, and so on; the first task first."""
    pairs = (pair for order in schedule.tasks for pair in itertools.pairwise(order))
    before = {task: (prior,) for prior, task in pairs}
    waits, path = times, []
    while waits:
        path.append(max(waits, key=lambda task: times[task][1]))
        waits = (*schedule.dependencies(path[-1]), *before.get(path[-1], ()))
    return path[::-1]


HEAD = (
    *("schedule", "devices", "stages", "mb", "s", "spread"),
    *("alone", "program", "nominal", "longer", "between", ""),
)


def compare(devices, rounds, repeats):
    """The rows of all schedules, and why some cannot run."""
    rows, refused = [HEAD], []
    for count, each, name in itertools.product(devices, rounds, schedules.SCHEDULES):
        try:
            schedules.spread(name, count, count * each)
        except ValueError as error:
            refused.append(f"{name} on {count} devices: {error}")
            continue
        rows.append(timed(name, count, count * each, repeats).row())
    return rows, refused


def timed(name, devices, microbatches, repeats, seconds=sleeping.SECONDS):
    """A schedule, run."""
    found = Timed(name, devices, microbatches, seconds)
    for _ in range(repeats):
        found.round()
    return found


def awake(devices, repeats):
    """The rows of stages that take no time: microseconds of each task on the critical path."""
    rows = [("no sleep", "devices", "us in a task", "us between")]
    for count, name in itertools.product(devices, ("gpipe", "1f1b", "zb_h1")):
        overhead = timed(name, count, 2 * count, repeats, seconds=0).overhead()
        rows.append((name, count, *(f"{time:.0f}" for time in overhead)))
    return rows


def parts():
    """The rows of what a task is made of, beside its stage's own time."""
    found = sleeping.parts(mesh.devices())
    return [("after 20 ms of sleep", "us"), *((name, f"{us:.0f}") for name, us in found.items())]


def table(rows):
    """Rows as text: the first column to the left, the others to the right."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = (str(cell).rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8])
    parser.add_argument(
        "--rounds", type=int, nargs="+", default=[1, 2, 4], help="microbatches per device"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tables", nargs="+", default=["time", "memory"])
    options = parser.parse_args()
    mesh.simulate(8)
    if "time" in options.tables:
        rows, refused = compare(options.devices, options.rounds, options.repeats)
        print(f"{1e3 * sleeping.SECONDS:.0f} ms, jax {jax.__version__}, {options.repeats} rounds")
        print("\n".join([table(rows), *refused]))
        print(f"\n{table(awake(options.devices, options.repeats))}\n\n{table(parts())}\n")
    if "memory" in options.tables:
        title, rows = pipeline_memory.report()
        print(f"{title}\n{table(rows)}")
