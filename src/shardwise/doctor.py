"""Collectives, gradients, donation and random draws, tried on the devices of a mesh."""

import dataclasses
import functools
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import measure, topology
from shardwise import mesh as meshes
from shardwise.processes.system import of_all

_SIZES = {"64 KiB": 2**16, "1 MiB": 2**20, "8 MiB": 2**23}  # on each device
_DTYPES = ("float32", "bfloat16", "int32")
_SCATTERED = 2**22  # bytes of each device's result, wrong on CPU in jax issue 40830
_LARGEST = 2**26  # bytes of an operand on one device
_TABLE = (24, 35, 256)  # a device's share of a table, whose gradient is wrong in xla issue 49143

# Each collective along an axis of n devices, and NumPy's: the result of number i of their rows.
_COLLECTIVES = {
    "psum": (lambda x, axis, n: jax.lax.psum(x, axis), lambda rows, i: sum(rows)),
    "all_gather": (
        lambda x, axis, n: jax.lax.all_gather(_part(x, n, 0), axis, tiled=True),
        lambda rows, i: np.concatenate([_part(row, len(rows), 0) for row in rows]),
    ),
    "psum_scatter": (
        lambda x, axis, n: jax.lax.psum_scatter(x, axis, tiled=True),
        lambda rows, i: sum(_part(row, len(rows), i) for row in rows),
    ),
    "all_to_all": (
        lambda x, axis, n: jax.lax.all_to_all(x, axis, 0, 0, tiled=True),
        lambda rows, i: np.concatenate([_part(row, len(rows), i) for row in rows]),
    ),
    "ppermute": (
        lambda x, axis, n: jax.lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)]),
        lambda rows, i: rows[i - 1],
    ),
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of a `check`: whether it is `ok`, and in words what was `found` and `expected`.
    With `information` it is no test but a fact, such as a bandwidth, and `ok` is always True.
    """

    check: str
    ok: bool
    found: str
    expected: str
    information: bool = False

    def __str__(self) -> str:
        word = "info" if self.information else "ok" if self.ok else "WRONG"
        told = self.found if self.ok else f"{self.found}; expected {self.expected}"
        return f"{word:7}{self.check:45}{told}".rstrip()


def examine(mesh: Mesh) -> list[Finding]:
    """A list with the `Finding` of each check on the devices of `mesh`.

    All processes call this together, and each gets the whole list. Results must equal NumPy's
    exactly: operands are whole numbers, so small that no order of a sum rounds. Collectives run
    along every axis of two devices or more. A check that raises has failed: `ok` is False.
    """
    with meshes.outside():
        operands, own = _Operands(meshes.auto(mesh)), []
        for axis in (axis for axis, size in mesh.shape.items() if size > 1):
            for name in _COLLECTIVES:
                own.append(_tried(f"{name} along {axis}", _collective, operands, axis, name))
            large = f"psum_scatter along {axis}, large, thrice"
            own.append(_tried(large, _large_scatter, operands, axis))
            rate = f"bandwidth of all_gather along {axis}"
            own.append(_tried(rate, _bandwidth, operands, axis, information=True))
        own.append(_tried("gradient of gathered weights, in a scan", _gathered_weights, operands))
        own.append(_tried("gradient of a sharded table, in a scan", _sharded_table, operands))
        own.append(_tried("donation", _donation, operands))
        own.append(_tried("random bits, of all devices and of one", _draws, operands))
        return [*_joined(own), *_same_in_all()]


class _Operands:
    """Whole numbers at random, a row for each place of a mesh, which every process knows.

    Their sum over all devices is at most 256, which bfloat16 holds; over more than 256 devices it
    is so by all odds, since most numbers cancel.
    """

    def __init__(self, mesh):
        self.mesh, self.axes = mesh, tuple(mesh.axis_names)
        self.sharding = NamedSharding(mesh, P(self.axes))
        high = max(1, 256 // mesh.size)
        length = _LARGEST // 4 + mesh.size
        self._numbers = np.random.default_rng(0).integers(-high, high + 1, length, np.int16)
        self.of_sizes = {}
        for size, count in _SIZES.items():
            for dtype in _DTYPES:
                divisible = -(-count // jnp.dtype(dtype).itemsize // mesh.size) * mesh.size
                self.of_sizes[f"{size} of {dtype}"] = self.array(divisible, dtype)

    def row(self, place, count):
        """The first numbers of the device at a place of the mesh."""
        return self._numbers[place : place + count]

    def array(self, count, dtype="float32"):
        """The array of so many numbers on each device."""
        return jax.make_array_from_callback(
            (self.mesh.size, count),
            self.sharding,
            lambda index: self.row(index[0].start or 0, count)[None].astype(dtype),
        )

    def along(self, axis, place, count):
        """The rows along an axis through a place of the mesh, and which of them is the place's."""
        at, where = self.axes.index(axis), [*np.unravel_index(place, self.mesh.devices.shape)]
        number, where[at] = where[at], slice(None)
        places = np.arange(self.mesh.size).reshape(self.mesh.devices.shape)[tuple(where)]
        return [self.row(each, count) for each in places], number

    def by_hand(self, function):
        """The jitted function of each device's own rows, which returns a list of them."""

        def run(*arrays):
            return [row[None] for row in function(*(x[0] for x in arrays))]

        cut = dict(in_specs=P(self.axes), out_specs=P(self.axes), check_vma=False)
        return jax.jit(jax.shard_map(run, mesh=self.mesh, **cut))


def _tried(check: str, run: Callable[..., str], *args: Any, information: bool = False) -> Finding:
    """The finding of `run(*args)`, which returns words for what is wrong, or for information."""
    try:
        found = run(*args)
    except Exception as error:  # whatever a backend raises for what it lacks
        found = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    expected = "" if information else "what NumPy computes"
    return Finding(check, information or not found, found, expected, information)


def _collective(operands, axis, name, arrays=None, times=1):
    collective, reference = _COLLECTIVES[name]
    arrays, n = arrays or operands.of_sizes, operands.mesh.shape[axis]
    run = operands.by_hand(lambda *rows: [collective(row, axis, n) for row in rows])
    # All runs, before a process finds what others do not.
    outs = [each for _ in range(times) for each in zip(arrays, run(*arrays.values()), strict=True)]
    for label, out in outs:
        count = arrays[label].shape[1]
        if wrong := _wrong(out, lambda at, k=count: reference(*operands.along(axis, at, k))):
            return f"{label}: {wrong}"
    return ""


def _large_scatter(operands, axis):
    n = operands.mesh.shape[axis]
    large = operands.array(min(_SCATTERED, _LARGEST // n) // 4 * n)
    return _collective(operands, axis, "psum_scatter", {"float32": large}, times=3)


def _bandwidth(operands, axis):
    """The bytes a device receives a second in an all-gather, beside those of its chip's links."""
    n, kind = operands.mesh.shape[axis], operands.mesh.devices.flat[0].device_kind
    gather = operands.by_hand(lambda row: [_COLLECTIVES["all_gather"][0](row, axis, n)])
    label, operand = list(operands.of_sizes.items())[-1]
    received = operand.nbytes / operands.mesh.size * (n - 1) / n
    rate = received / measure.step_time(gather, operand, repeats=5).median_s
    chip = topology.of_device(kind)
    link = f"; a link of {chip.kind} has {chip.link_bandwidth / 1e9:.0f}" if chip else ""
    return f"{rate / 1e9:.3g} GB/s into a device, of {label}{link}"


def _accumulated(loss, weights, *batches):
    """The gradient of a loss in its weights, summed over batches in a scan."""

    def step(total, batch):
        return total + jax.grad(loss)(weights, *batch), None

    return jax.lax.scan(step, jnp.zeros_like(weights), batches)[0]


def _gathered_weights(operands):
    """FSDP by hand: weights gathered in every step of a scan, whose gradient is a psum_scatter."""
    k, steps, size = 256, 3, operands.mesh.size

    def loss(weights, x):
        return jnp.sum(jax.lax.all_gather(weights, operands.axes, tiled=True) ** 2 * x) / 2

    def expected(place):
        batches = (operands.row(i, steps * size * k).reshape(steps, size, k) for i in range(size))
        return operands.row(place, k) * sum(x[:, place].sum(0, np.int32) for x in batches)

    run = operands.by_hand(lambda w, x: [_accumulated(loss, w, x.reshape(steps, -1))])
    return _wrong(run(operands.array(k), operands.array(steps * size * k))[0], expected)


def _sharded_table(operands):
    """The compiler's way: a table of which each step of a scan looks rows up, in cut batches."""
    rows, *features = _TABLE
    size, draw = operands.mesh.size, np.random.default_rng(1)
    shape = (2, 2 * size, 8)  # steps of the scan, rows of a batch, tokens
    tokens = draw.integers(0, rows * size, shape, np.int32)
    factors = draw.integers(-8, 9, shape).astype(np.float32)
    feature = draw.integers(-8, 9, features).astype(np.float32)

    def loss(table, tokens, factors):
        return jnp.sum(table[tokens] * factors[..., None, None] * feature[None, None])

    cut = NamedSharding(operands.mesh, P(None, operands.axes))
    batches = [jax.make_array_from_callback(shape, cut, x.__getitem__) for x in (tokens, factors)]
    part, whole = np.zeros((rows, *features), np.float32), (rows * size, *features)
    table = jax.make_array_from_callback(whole, operands.sharding, lambda index: part)
    run = jax.jit(functools.partial(_accumulated, loss), out_shardings=operands.sharding)
    totals = np.bincount(tokens.ravel(), factors.ravel(), rows * size)
    return _wrong(run(table, *batches), lambda i: totals[i : i + rows, None, None] * feature)


def _donation(operands):
    """Steps that each donate their argument; the first one's may share NumPy's memory."""
    host = np.stack([operands.row(i, 2**14) for i in range(operands.mesh.size)]).astype(np.float32)
    before, platform = host.copy(), operands.mesh.devices.flat[0].platform
    x = jax.make_array_from_callback(host.shape, operands.sharding, host.__getitem__)
    step = jax.jit(lambda x: 2 * x + 1, donate_argnums=0)
    for _ in range(3):
        given, x = x, step(x)
        if not given.is_deleted() and platform in ("cpu", "gpu", "tpu"):
            return "a donated argument is still there"
    if (host != before).any():
        return "NumPy's own array was overwritten"
    return _wrong(x, lambda place: 8 * before[place] + 7)


def _draws(operands):
    """Random bits drawn in shards, which equal those that one device draws."""
    draw = functools.partial(jax.random.bits, shape=(operands.mesh.size, 2**14))
    key = jax.random.key(0)
    one = np.asarray(jax.jit(draw)(jax.device_put(key, operands.mesh.local_devices[0])))
    return _wrong(jax.jit(draw, out_shardings=operands.sharding)(key), lambda place: one[place])


def _same_in_all():
    """The findings on what must be the same in all processes: clocks, versions, a draw."""
    multihost_utils.sync_global_devices("before clocks are read")
    begun = time.time()
    multihost_utils.sync_global_devices("clocks")  # every process is here at one moment
    facts = {"begun": begun, "ended": time.time()}
    facts |= {name: metadata.version(name) for name in ("jax", "jaxlib")}
    facts["random bits"] = hex(jax.jit(jax.random.bits)(jax.random.key(0)))
    told = of_all(facts)
    apart = max(each["begun"] for each in told) - min(each["ended"] for each in told)
    clocks = f"{apart:.1f} s apart" if apart > 1 else ""
    findings = [Finding("clocks", not clocks, clocks, "one second at most")]
    for name in ("jax", "jaxlib", "random bits"):
        each = [facts[name] for facts in told]
        same = len(set(each)) == 1
        found = ", ".join(each[:1] if same else each)
        findings.append(Finding(name, same, found, "the same in all processes"))
    return findings


def _joined(own):
    """The findings of all processes in one list: wrong is what is wrong in one of them."""
    joined = []
    for each in zip(*of_all([dataclasses.asdict(finding) for finding in own]), strict=True):
        at = next((i for i, finding in enumerate(each) if not finding["ok"]), 0)
        who = f"process {at}: " if len(each) > 1 and not each[at]["ok"] else ""
        joined.append(Finding(**each[at] | {"found": who + each[at]["found"]}))
    return joined


def _wrong(out, expected):
    """What is wrong in this process's shards of `out`; `expected(row)` is NumPy's from that row."""
    for shard in out.addressable_shards:
        found = np.asarray(shard.data).ravel()
        right = expected(shard.index[0].start or 0).astype(found.dtype).ravel()
        if (wrong := np.flatnonzero(found != right)).size:
            first = wrong[0]
            return (
                f"{wrong.size:,} of {found.size:,} on {shard.device}, the first at {first:,}: "
                f"{found[first]} for {right[first]}"
            )
    return ""


def _part(row, parts, i):
    return row.reshape(parts, -1)[i]
