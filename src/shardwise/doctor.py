"""Collectives, gradients, donation and random draws, tried on the devices of a mesh."""

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
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

MIB = 2**20
SIZES = {"64 KiB": 2**16, "1 MiB": MIB, "8 MiB": 8 * MIB}  # held by each device
DTYPES = ("float32", "bfloat16", "int32")
SCATTERED = 4 * MIB  # each device's result of a psum_scatter that was wrong on CPU (jax issue 40830)
LARGEST = 64 * MIB  # an operand on one device
TABLE = (24, 35, 256)  # each device's share of a table whose gradient TPUs got wrong (xla 49143)
CLOCKS = 1.0  # seconds by which clocks may differ

# Each beside NumPy's: `rows` has what the devices along the axis hold, of which this is number `i`.
COLLECTIVES = {
    "psum": (lambda x, axis: jax.lax.psum(x, axis), lambda rows, i: sum(rows)),
    "all_gather": (
        lambda x, axis: jax.lax.all_gather(_part(x, jax.lax.axis_size(axis), 0), axis, tiled=True),
        lambda rows, i: np.concatenate([_part(row, len(rows), 0) for row in rows]),
    ),
    "psum_scatter": (
        lambda x, axis: jax.lax.psum_scatter(x, axis, tiled=True),
        lambda rows, i: sum(_part(row, len(rows), i) for row in rows),
    ),
    "all_to_all": (
        lambda x, axis: jax.lax.all_to_all(x, axis, 0, 0, tiled=True),
        lambda rows, i: np.concatenate([_part(row, len(rows), i) for row in rows]),
    ),
    "ppermute": (
        lambda x, axis: jax.lax.ppermute(x, axis, _ring(jax.lax.axis_size(axis))),
        lambda rows, i: rows[i - 1],
    ),
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of a check, the same in every process.

    `found` says what is wrong, and in which process; of what is right, or for information only,
    what was measured.
    """

    check: str
    ok: bool
    found: str
    expected: str
    information: bool = False

    def __str__(self) -> str:
        word = "info" if self.information else "ok" if self.ok else "WRONG"
        parts = [self.found, f"expected: {self.expected}" * (not self.ok)]
        return f"{word:6}{self.check:44}{'; '.join(filter(None, parts))}".rstrip()


def examine(mesh: Mesh) -> list[Finding]:
    """The findings of all checks on the devices of `mesh`, in every process; all must call it.

    Results are compared bit for bit with NumPy's: operands are whole numbers, so small that every
    order of a sum gives the same. Axes of one device are left out. A check that raises is a finding
    as well.
    """
    mesh = meshes.auto(mesh)
    values = _Values(mesh)
    equal = "what NumPy computes"
    own = []
    for axis in (name for name, size in mesh.shape.items() if size > 1):
        for name in COLLECTIVES:
            run = functools.partial(_collective, values, axis, name)
            own.append(_tried(f"{name} along {axis}", equal, run))
        run = functools.partial(_large_scatter, values, axis)
        own.append(_tried(f"psum_scatter along {axis}, large, repeated", equal, run))
        own.append(_bandwidth(values, axis))
    own += [
        _tried("gradient of gathered weights, in a scan", equal, lambda: _gathered(values)),
        _tried("gradient of a table, in a scan", equal, lambda: _table(values)),
        _tried("donation", "the result, and no argument left", lambda: _donation(values)),
        _tried("random draws over the mesh", "one device's", lambda: _draws(values)),
    ]
    return [*_agreed(own), *_same_system()]


class _Values:
    """Random whole numbers of each device of a mesh, by its place there: every process knows all.

    The sum over all devices is at most 256, which bfloat16 holds.
    """

    def __init__(self, mesh):
        self.mesh, self.names = mesh, tuple(mesh.axis_names)
        self.sharding = NamedSharding(mesh, P(self.names))
        high = max(1, 256 // mesh.size)
        length = LARGEST // 4 + mesh.size
        self._numbers = np.random.default_rng(0).integers(-high, high + 1, length, np.int16)
        self.operands = {
            (dtype, size): self.put(_multiple(count // jnp.dtype(dtype).itemsize, mesh.size), dtype)
            for size, count in SIZES.items()
            for dtype in DTYPES
        }

    def row(self, place, count):
        """The numbers of the device at a place of the mesh."""
        return self._numbers[place : place + count]

    def put(self, count, dtype="float32"):
        """An array with a row of numbers on each device."""

        def shard(index):
            return self.row(_start(index), count)[None].astype(dtype)

        return jax.make_array_from_callback((self.mesh.size, count), self.sharding, shard)

    def along(self, axis, place, count):
        """The rows of the devices that a place meets along an axis, and its number among them."""
        at, where = self.names.index(axis), list(np.unravel_index(place, self.mesh.devices.shape))
        number, where[at] = where[at], slice(None)
        met = np.arange(self.mesh.size).reshape(self.mesh.devices.shape)[tuple(where)]
        return [self.row(each, count) for each in met], number

    def by_hand(self, function):
        """The jitted function of the devices' own rows, given and returned as lists of arrays."""

        def shares(*arrays):
            return [each[None] for each in function(*(x[0] for x in arrays))]

        specs = dict(in_specs=P(self.names), out_specs=P(self.names))
        return jax.jit(jax.shard_map(shares, mesh=self.mesh, check_vma=False, **specs))


def _tried(check, expected, run: Callable[[], str]) -> Finding:
    """The finding of `run`, which returns what is wrong, or nothing."""
    try:
        found = run()
    except Exception as error:  # whatever a backend may lack
        found = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return Finding(check, not found, found, expected)


def _collective(values, axis, name):
    collective, reference = COLLECTIVES[name]
    run = values.by_hand(lambda *rows: [collective(row, axis) for row in rows])
    for (dtype, size), out in zip(
        values.operands, run(*values.operands.values()), strict=True
    ):
        count = values.operands[dtype, size].shape[1]
        wrong = _wrong(out, lambda i, n=count: reference(*values.along(axis, i, n)))
        if wrong:
            return f"{dtype}, {size}: {wrong}"
    return ""


def _large_scatter(values, axis):
    n = values.mesh.shape[axis]
    count = min(SCATTERED, LARGEST // n) // 4 * n
    collective, reference = COLLECTIVES["psum_scatter"]
    run = values.by_hand(lambda row: [collective(row, axis)])
    operand = values.put(count)
    for _ in range(3):
        [out] = run(operand)
        if wrong := _wrong(out, lambda i: reference(*values.along(axis, i, count))):
            return wrong
    return ""


def _bandwidth(values, axis):
    """What a device receives a second in an all-gather, beside what a link of its chip has."""
    gather, _ = COLLECTIVES["all_gather"]
    run = values.by_hand(lambda row: [gather(row, axis)])
    operand = values.operands["float32", "8 MiB"]
    seconds = measure.step_time(run, operand, repeats=5).median_s
    n, kind = values.mesh.shape[axis], values.mesh.devices.flat[0].device_kind
    rate = operand.nbytes / values.mesh.size * (n - 1) / n / seconds
    chip = topology.of_device(kind)
    link = f"; a link of {chip.kind} has {chip.link_bandwidth / 1e9:.0f}" if chip else ""
    told = f"{rate / 1e9:.3g} GB/s into each device by an all-gather of 8 MiB{link}"
    return Finding(f"bandwidth along {axis}", True, told, "", information=True)


def _gathered(values):
    """FSDP's gradient: weights gathered in each step of a scan, gradients scattered and added."""
    k, steps, size = 1000, 3, values.mesh.size

    def accumulate(weights, batch):
        def loss(weights, x):
            return jnp.sum(jax.lax.all_gather(weights, values.names, tiled=True) ** 2 * x) / 2

        def step(total, x):
            return total + jax.grad(loss)(weights, x), None

        return [jax.lax.scan(step, jnp.zeros_like(weights), batch.reshape(steps, -1))[0]]

    def expected(place):
        batches = (values.row(i, steps * size * k).reshape(steps, size, k) for i in range(size))
        return values.row(place, k) * sum(x[:, place].sum(0, np.int32) for x in batches)

    [out] = values.by_hand(accumulate)(values.put(k), values.put(steps * size * k))
    return _wrong(out, expected)


def _table(values):
    """The gradient of a table's looked-up rows, added up in a scan, as the compiler divides it."""
    rows, *features = TABLE
    size, sharding = values.mesh.size, values.sharding
    shape = (2, 2 * size, 8)  # steps of a scan, rows of a batch, tokens
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, rows * size, shape, np.int32)
    factors = draw.integers(-8, 9, shape).astype(np.float32)
    feature = draw.integers(-8, 9, features).astype(np.float32)

    def accumulate(table, tokens, factors):
        def loss(table, tokens, factors):
            return jnp.sum(table[tokens] * (factors[..., None, None] * feature))

        def step(total, batch):
            return total + jax.grad(loss)(table, *batch), None

        return jax.lax.scan(step, jnp.zeros_like(table), (tokens, factors))[0]

    batch = NamedSharding(values.mesh, P(None, values.names))
    table = jax.jit(lambda: jnp.zeros((rows * size, *features)), out_shardings=sharding)()
    given = [jax.make_array_from_callback(shape, batch, x.__getitem__) for x in (tokens, factors)]
    totals = np.bincount(tokens.ravel(), factors.ravel(), rows * size)
    return _wrong(
        jax.jit(accumulate, out_shardings=sharding)(table, *given),
        lambda start: totals[start : start + rows, None, None] * feature,
    )


def _donation(values):
    """Steps that each donate what they are given; at first an array that NumPy may share."""
    host = np.stack([values.row(i, 2**14) for i in range(values.mesh.size)]).astype(np.float32)
    right = 8 * host + 7
    x = jax.make_array_from_callback(host.shape, values.sharding, host.__getitem__)
    step = jax.jit(lambda x: 2 * x + 1, donate_argnums=0)
    for _ in range(3):
        given, x = x, step(x)
        if not given.is_deleted() and values.mesh.devices.flat[0].platform in ("cpu", "gpu", "tpu"):
            return "the donated argument is not deleted"
    if (8 * host + 7 != right).any():
        return "NumPy's own array was overwritten"
    return _wrong(x, lambda place: right[place])


def _draws(values):
    """Random bits of one key, drawn by all devices and by one of this process."""
    draw = functools.partial(jax.random.bits, shape=(values.mesh.size, 2**14))
    one = jax.device_put(jax.random.key(0), values.mesh.local_devices[0])
    right = np.asarray(jax.jit(draw)(one))
    out = jax.jit(draw, out_shardings=values.sharding)(jax.random.key(0))
    return _wrong(out, lambda place: right[place])


def _same_system():
    """Findings on what processes must have in common: clocks, versions and draws."""
    multihost_utils.sync_global_devices("before the clocks")
    begun = time.time()
    multihost_utils.sync_global_devices("clocks")  # ends everywhere after it has begun everywhere
    facts = {"begun": begun, "ended": time.time()}
    facts |= {name: metadata.version(name) for name in ("jax", "jaxlib")}
    facts["random bits"] = hex(jax.random.bits(jax.random.key(0)))
    told = _of_all(facts)
    apart = max(x["begun"] for x in told) - min(x["ended"] for x in told)
    clocks = f"{apart:.1f} seconds apart" if apart > CLOCKS else ""
    findings = [Finding("clocks", not clocks, clocks, f"at most {CLOCKS:g} second apart")]
    for name in ("jax", "jaxlib", "random bits"):
        each = [x[name] for x in told]
        found = ", ".join(each) if len(set(each)) > 1 else each[0]
        findings.append(Finding(name, len(set(each)) == 1, found, "the same in all processes"))
    return findings


def _agreed(own: Sequence[Finding]) -> list[Finding]:
    """The findings of all processes as one list: what is wrong in one is wrong."""
    told = [[Finding(**each) for each in one] for one in _of_all(list(map(dataclasses.asdict, own)))]
    agreed = []
    for each in zip(*told, strict=True):
        at = next((i for i, finding in enumerate(each) if not finding.ok), 0)
        who = f"process {at}: " if len(each) > 1 and not each[at].ok else ""
        agreed.append(dataclasses.replace(each[at], found=who + each[at].found))
    return agreed


def _of_all(value: Any) -> list[Any]:
    """What each process has for a value that JSON can carry, in the order of processes."""
    if jax.process_count() == 1:
        return [value]
    mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(mine.size))
    padded = np.pad(mine, (0, sizes.max() - mine.size))
    texts = multihost_utils.process_allgather(padded)
    return [json.loads(text[:size].tobytes()) for text, size in zip(texts, sizes, strict=True)]


def _wrong(out, expected):
    """Words for what differs in this process's shards of `out`; "" where nothing does.

    `expected` gives NumPy's, for the shard that begins with a row of `out`.
    """
    for shard in out.addressable_shards:
        found = np.asarray(shard.data).ravel()
        right = np.asarray(expected(_start(shard.index))).ravel().astype(found.dtype)
        differ = np.flatnonzero(found != right)
        if differ.size:
            k = differ[0]
            return (
                f"{differ.size:,} of {found.size:,} numbers on {shard.device}, the first is number "
                f"{k:,}, {found[k]} for {right[k]}"
            )
    return ""


def _part(row, parts, i):
    return row.reshape(parts, -1)[i]


def _ring(n):
    return [(i, (i + 1) % n) for i in range(n)]


def _start(index):
    return index[0].start or 0


def _multiple(count, of):
    return -(-count // of) * of
