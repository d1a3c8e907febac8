"""What the benchmarks share: variants of one training step, run in rounds, and their table.

In a round every variant takes one step, so that what else the machine does meets them all.
"""

import sys
import time
from typing import NamedTuple

import jax
import numpy as np
import optax

from shardwise import measure

SHORT = {
    "all-gather": "AG",
    "reduce-scatter": "RS",
    "all-reduce": "AR",
    "all-to-all": "A2A",
    "collective-permute": "CP",
}


class Variant:
    """A jitted `step(params, opt_state, batch)` that donates its state, and what it has done.

    `limit` is the most ring bytes per device that it may need, if that is known.
    """

    def __init__(self, name, step, params, opt_state, batch, limit=None):
        self.name, self.limit = name, limit
        self._step, self.state, self._batch = step, (params, opt_state), batch
        self.losses, self.seconds = [], []
        compiled = step.lower(*self.state, batch).compile()
        self.memory, self.sent = measure.bytes_per_device(compiled), measure.collectives(compiled)

    def run(self):
        """One step, waited for."""
        start = time.perf_counter()
        *self.state, loss = jax.block_until_ready(self._step(*self.state, self._batch))
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(loss))

    @property
    def time(self):
        """Seconds of a step: the median, and the spread between the quartiles."""
        low, median, high = np.percentile(self.seconds, [25, 50, 75])
        return median, high - low


class Row:
    """A step on a mesh, compiled once and run as compiled: by `lowered`, or a step as it is."""

    def __init__(self, name, mesh, step, state, batch, whole=None):
        self.name, self._state, self._batch = name, list(state), batch
        self._whole = whole or (lambda tree: tree)
        self.losses, self.seconds = [], []
        start = time.perf_counter()
        self.memory, self.sent, self._step = self.measured(mesh, step)
        told = f"{self.memory.temporaries:,} B of temporaries, sends {self.sent}"
        print(f"{name}: {time.perf_counter() - start:.0f} s; {told}", file=sys.stderr, flush=True)

    def measured(self, mesh, step):
        """(`measure.memory.DeviceBytes`, {mesh axes: bytes sent}, what runs)."""
        compiled = step.lower(*self._state, self._batch).compile()
        found = measure.by_axis(measure.collectives(compiled), mesh)
        sent = {axes: part.ring_bytes for axes, part in found.items()}
        return measure.bytes_per_device(compiled), sent, compiled

    def run(self):
        """One step, waited for."""
        start = time.perf_counter()
        out = jax.block_until_ready(self._step(*self._state, self._batch))
        self.seconds.append(time.perf_counter() - start)
        self._state = list(out[:2])
        self.losses.append(float(out[2]))

    @property
    def state(self):
        """Parameters and the optimizer's state, as one device has them."""
        return [self._whole(tree) for tree in self._state]

    @property
    def median(self):
        """Seconds of a step; NaN where none was run."""
        return float(np.median(self.seconds)) if self.seconds else float("nan")


class Missing(NamedTuple):
    """The row of a variant that cannot run here, and why."""

    name: str
    why: str


def check(variants, steps=3, rtol=5e-6, of_largest=5e-4):
    """Run `steps` of each variant; losses and Adam's first moments must be those of the first.

    Float32 sums taken in another order differ by some 1e-7 of the largest numbers summed: so do
    losses, means over thousands of tokens. Entries of a gradient cancel to far less than what
    was summed, and from the second step on they are taken at parameters that Adam, which divides
    by a gradient's size, has moved by noise: moments are compared with their array's largest
    entry. In three steps losses came within 5e-7 and moments within 5e-5; ten times that is
    allowed. Gradients summed where a mean is due are off by a factor of the devices: Adam hides
    that from the losses, and its moments show it.

    Raises:
      AssertionError: a variant differs.
    """
    first = variants[0]
    for variant in variants:
        for _ in range(steps):
            variant.run()
        np.testing.assert_allclose(variant.losses, first.losses, rtol, err_msg=variant.name)
        for own, expected in zip(_moments(variant), _moments(first), strict=True):
            atol = of_largest * np.abs(expected).max()
            np.testing.assert_allclose(own, expected, 0, atol, err_msg=variant.name)


def _moments(variant):
    return map(np.asarray, jax.tree.leaves(optax.tree_utils.tree_get(variant.state[1], "mu")))


def time_all(variants, repeats):
    """Time `repeats` rounds; what ran before, which compiled, is not counted."""
    for variant in variants:
        variant.seconds.clear()
    for _ in range(repeats):
        for variant in variants:
            variant.run()


def table(rows):
    """The rows, `Variant`s and `Missing`s, as text.

    All bytes are those of one device, in MB of 10^6; `run` counts collectives as often as they
    run: all-gather AG, reduce-scatter RS, all-reduce AR, all-to-all A2A, collective-permute CP.
    """
    fastest = min(row.time[0] for row in rows if isinstance(row, Variant))
    head = ("", "step s", "spread", "ratio", "args MB", "out MB", "temp MB", "run", "ring MB", "")
    cells = [head, *(_cells(row, fastest) for row in rows if isinstance(row, Variant))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths[0] = max(len(row.name) for row in rows)
    lines = iter([_line(row, widths) for row in cells])
    out = [next(lines)]
    for row in rows:
        known = isinstance(row, Variant)
        out.append(next(lines) if known else f"{row.name.ljust(widths[0])}  {row.why}")
    return "\n".join(out)


def _cells(row, fastest):
    median, spread = row.time
    memory = (row.memory.arguments, row.memory.outputs, row.memory.temporaries)
    runs = " ".join(f"{count.dynamic} {SHORT[kind]}" for kind, count in row.sent.items())
    target = "" if row.limit is None else f"{'met' if met(row) else 'MISSED'} {_mb(row.limit)}"
    times = (f"{median:.3f}", f"{spread:.3f}", f"{median / fastest:.2f}")
    return row.name, *times, *map(_mb, memory), runs or "-", _mb(row.sent.ring_bytes), target


def met(row):
    """Whether the variant sends no more than its limit."""
    return row.limit is None or row.sent.ring_bytes <= row.limit


def _mb(size):
    return f"{size / 1e6:.3f}"


def _line(cells, widths):
    name, *rest = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join([name.strip().ljust(widths[0]), *rest]).rstrip()
