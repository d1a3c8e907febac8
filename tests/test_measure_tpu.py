"""What is counted in a TPU's program, against what was written: bytes equal, or named apart."""

import dataclasses
import functools
import importlib.util
import itertools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sampling import marked, sample

from shardwise import data, layouts, marks, measure, model, topology
from shardwise.measure import hlo
from shardwise.measure.counts import Count

needs_libtpu = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"),
    reason="libtpu, the TPU compiler, is not installed: pip install 'shardwise[tpu]'",
)
WRITTEN = ("all_gather", "reduce_scatter", "psum", "ppermute", "all_to_all")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path_factory.getbasetemp()))


def sharded(mesh, shape, *spec, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh.abstract, P(*spec)))


def compiled(mesh, f, *args):
    jitted = f if hasattr(f, "trace") else jax.jit(f)
    return topology.compile(mesh.lower(jitted, *args), mesh)


def manual(mesh, f, in_specs, out_specs):
    return jax.shard_map(
        f, mesh=mesh.abstract, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


@functools.cache
def by_hand(name, axis, rows, slices=1, columns=384, only=WRITTEN, **axes):
    """(n, bytes of a share, what was counted, what became of what) of one program with these
    collectives over `axis`."""
    mesh = topology.chips(name, slices).mesh(**axes)
    n = mesh.shape[axis]

    def each(share, whole):
        ring = [(i, (i + 1) % n) for i in range(n)]
        made = {
            "all_gather": lambda: jax.lax.all_gather(share, axis, tiled=True),
            "reduce_scatter": lambda: jax.lax.psum_scatter(whole, axis, tiled=True),
            "psum": lambda: jax.lax.psum(whole * 2, axis),
            "ppermute": lambda: jax.lax.ppermute(share, axis, ring),
            "all_to_all": lambda: jax.lax.all_to_all(share, axis, 0, 1, tiled=True),
        }
        return [made[written]() for written in only]

    out = [P() if written in ("all_gather", "psum") else P(axis) for written in only]
    program = manual(mesh, each, (P(axis), P()), out)
    share, whole = sharded(mesh, (n * rows, columns), axis), sharded(mesh, (n * rows, columns))
    lowered = mesh.lower(jax.jit(program), share, whole)
    made = topology.compile(lowered, mesh)
    became = measure.differences(lowered, made)
    return n, rows * columns * 2, measure.collectives(made), became


def formula(written, n, share):
    """What a device sends in a ring, by hand."""
    return {
        "all_gather": share * (n - 1),
        "reduce_scatter": share * (n - 1),
        "psum": 2 * share * (n - 1),
        "ppermute": share,
        "all_to_all": share * (n - 1) // n,
    }[written]


PLACES = {
    "v5e:2x4": dict(name="v5e:2x4", axis="x", rows=512, x=8),
    "v5p:2x2x2": dict(name="v5p:2x2x2", axis="x", rows=512, x=8),
    "v5p:4x4x8, an axis of 32": dict(name="v5p:4x4x8", axis="x", rows=512, x=32, y=4),
    "v5p:4x4x8": dict(name="v5p:4x4x8", axis="x", rows=128, x=128),
    "padded": dict(
        name="v5p:4x4x8", axis="x", rows=512, columns=1024, only=WRITTEN[1:2], x=32, y=4
    ),
    "v5e:4x4": dict(name="v5e:4x4", axis="y", rows=256, x=2, y=8),
}
CHEAP = ("v5e:2x4",)


@needs_libtpu
@pytest.mark.parametrize("place", marked(PLACES, CHEAP, 1))
def test_bytes_are_those_written_or_the_difference_has_a_name(place):
    n, share, found, became = by_hand(**PLACES[place])
    written = PLACES[place].get("only", WRITTEN)
    assert sum(d.written for d in became.values()) == sum(formula(w, n, share) for w in written)
    assert sum(d.compiled for d in became.values()) == found.ring_bytes
    assert became.keys() <= {"as written", "combined", "all-reduce", "padded"}
    assert ("padded" in became) == (place == "padded")
    for name, change in became.items():  # sums over the torus instead: twice the bytes
        if name != "padded":
            assert change.compiled == change.written * (2 if name == "all-reduce" else 1)
    for op in found.ops:
        assert op.kind != "all-reduce" or op.strategy
        assert ("combined" in op.notes) == (len(op.arrays) > 1)
        assert op.asynchronous == (op.kind == "collective-permute")
        if place == "padded" and op.kind == "collective-permute":
            assert op.ring_bytes < share  # what the padding has shifted moves on by one chip
        elif place == "padded":
            ((_, (rows, columns)),) = op.arrays
            assert op.kind == "reduce-scatter" and rows * columns * 2 > n * share
            assert op.ring_bytes == formula("reduce_scatter", n, rows * columns * 2 // n)


@needs_libtpu
@pytest.mark.slow
def test_what_the_torus_makes_of_a_gather_and_a_scatter_is_told():
    n, share, found, became = by_hand("v5p:4x4x8", "x", 32, only=WRITTEN[:3], x=128)
    assert became.keys() == {"combined", "all-reduce"}
    assert became["all-reduce"].written == 2 * formula("all_gather", n, share)
    assert became["all-reduce"].more == became["all-reduce"].written
    assert found["all-reduce"].ring_bytes == 3 * formula("psum", n, share)
    head, *rows = repr(became).splitlines()
    assert head.split()[:5] == ["what", "became", "of", "it", "in"] and len(rows) == 2
    assert all(word in became._repr_html_() for word in ("all-reduce", "combined", "<th"))


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 16])
def test_between_slices_transfers_have_kinds_of_their_own(size):
    """Over both networks together a device sends what one ring of all would have it send."""
    axes = dict(s=2, y=8) if size == 2 else dict(x=16)
    axis = "s" if size == 2 else "x"
    n, share, found, _ = by_hand("v5e:2x4", axis, 512, slices=2, **axes)
    between = {kind.removesuffix(" between slices") for kind in found if "between" in kind}
    assert between == set(measure.counts.KINDS)
    within = {op.kind: op for op in found.ops if "between" not in op.kind}
    sent = {kind: found[f"{kind} between slices"].ring_bytes for kind in between}
    assert sent["all-gather"] == share  # to the other slice, once
    assert sent["all-to-all"] == formula("all_to_all", n, share)
    assert sent["collective-permute"] == share
    if size == 2:
        assert not within
        assert sent["all-reduce"] == formula("psum", n, share)
        assert sent["reduce-scatter"] == formula("reduce_scatter", n, share)
        return
    assert sent["all-gather"] + within["all-gather"].ring_bytes >= formula("all_gather", n, share)
    # A sum is scattered within a slice, summed between slices, and gathered.
    assert sent["all-reduce"] == 2 * (n * share // 8) // 2


@needs_libtpu
@pytest.mark.slow
def test_between_slices_the_axes_are_known():
    mesh = topology.chips("v5e:2x4", 2).mesh(s=2, y=8)
    program = manual(mesh, lambda x: jax.lax.psum(jax.lax.psum(x, "y") * 2, "s"), P(), P())
    found = measure.collectives(compiled(mesh, program, sharded(mesh, (512, 256))))
    parts = measure.by_axis(found, mesh.abstract)
    assert {axes: set(part) for axes, part in parts.items()} == {
        ("y",): {"all-reduce"},
        ("s",): {"all-reduce between slices"},
    }
    _, _, told_by_place, _ = by_hand("v5e:2x4", "x", 512, slices=2, x=16)
    with pytest.raises(ValueError, match="tells who takes part by places"):
        measure.by_axis(told_by_place, topology.chips("v5e:2x4", 2).mesh(x=16).abstract)


@needs_libtpu
def test_a_carried_gather_counts_once_in_each_trip():
    """Three gathers a layer, some of them carried by the products of the others."""
    layers, size = 3, 1024
    made = carried(512, size, layers)
    found = measure.collectives(made)
    bytes_sent = layers * 3 * size * size * 2 * 7 // 8
    assert found == {"all-gather": Count(3, 3 * layers, layers * 3 * size * size * 2, bytes_sent)}
    assert 1 <= sum(op.asynchronous for op in found.ops) <= 2
    assert made.as_text().count(" all-gather(") > 3  # each is written out where it is carried
    assert measure.flops(made) == layers * 3 * 2 * 512 * size * size


@functools.cache
def together():
    """One program for eight chips, whose parts are apart: a product cut by its contraction, which
    the compiler sums; a ragged exchange; and a gather in 8 turns among 22 ticks, as a pipeline's
    tasks are.
    """
    mesh = topology.chips("v5e:2x4").mesh(x=8)

    def exchange(rows, out, numbers):
        return jax.lax.ragged_all_to_all(rows, out, *[numbers] * 4, axis_name="x")

    def turning(x, w, now):
        def once(i, x):
            x, w_now, _ = jax.lax.optimization_barrier((x, w, i))
            return jnp.tanh(x @ jax.lax.all_gather(w_now, "x", tiled=True))

        def tick(x, now):
            with marks.turns(8, of=22):
                return jax.lax.fori_loop(0, now, once, x), None

        return jax.lax.scan(tick, x, now)[0]

    exchange = manual(mesh, exchange, P("x"), P("x"))
    turning = manual(mesh, turning, (P("x"), P("x"), P()), P("x"))

    def program(product, ragged, turns):
        y = jax.lax.with_sharding_constraint(
            product[0] @ product[1], NamedSharding(mesh.abstract, P("x"))
        )
        return y, exchange(*ragged), turning(*turns)

    rows, numbers = sharded(mesh, (8 * 64, 256), "x"), sharded(mesh, (64,), "x", dtype=jnp.int32)
    return compiled(
        mesh,
        program,
        (sharded(mesh, (1024, 512), None, "x"), sharded(mesh, (512, 256), "x")),
        (rows, rows, numbers),
        (
            sharded(mesh, (64, 1024), "x"),
            sharded(mesh, (1024, 1024), "x"),
            sharded(mesh, (22,), dtype=jnp.int32),
        ),
    )


@needs_libtpu
def test_a_scatter_that_the_compiler_fuses_is_one():
    """The sum after a product cut by its contraction, of which each chip keeps its rows."""
    text, found = together().as_text(), measure.collectives(together())
    assert " all-reduce(" in text and " reduce-scatter(" not in text
    size = 1024 * 256 * 2
    assert found["reduce-scatter"] == Count(1, 1, size, size * 7 // 8)
    assert found.keys() == {"reduce-scatter", "all-to-all", "all-gather"}


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("axes, shards", sample([(dict(x=4, y=2), 3), (dict(x=8), 9)], 1))
def test_a_product_in_windows_sends_shares_by_its_trips(axes, shards):
    """Of 8 chips in a ring 9 shares are sent where a gather would send 7."""
    mesh = topology.chips("v5e:2x4").mesh(**axes)
    y = "y" if "y" in axes else None
    rows, inner, columns = 2048 * axes["x"], 1024, 4096
    out = NamedSharding(mesh.abstract, P("x", y))
    program = jax.jit(lambda x, w: jnp.tanh(x @ w), out_shardings=out)
    x, w = sharded(mesh, (rows, inner), "x"), sharded(mesh, (inner, columns), "x", y)
    found = measure.collectives(compiled(mesh, program, x, w))
    assert set(found) == {"collective-permute"}
    assert all(op.notes == ("windowed",) and op.asynchronous for op in found.ops)
    share = inner * columns * 2 // axes["x"] // axes.get("y", 1)
    assert found.ring_bytes == shards * share


@needs_libtpu
@pytest.mark.slow
def test_a_gather_in_bfloat16_stays_so_and_one_too_wide_is_narrowed():
    mesh = topology.chips("v5e:2x4").mesh(x=8)

    def wide(x, w):
        return x @ jax.lax.all_gather(w, "x", tiled=True).astype(jnp.bfloat16)

    program = jax.jit(manual(mesh, wide, (P("x"), P("x")), P("x")))
    args = sharded(mesh, (4096, 512), "x"), sharded(mesh, (512, 512), "x", dtype=jnp.float32)
    lowered = mesh.lower(program, *args)
    (written,) = measure.collectives(lowered).ops
    (made,) = measure.collectives(topology.compile(lowered, mesh)).ops
    assert (written.dtype, made.dtype) == ("f32", "bf16")
    assert made.ring_bytes * 2 == written.ring_bytes


@needs_libtpu
def test_a_ragged_exchange_is_a_bound():
    (op,) = (op for op in measure.collectives(together()).ops if op.kind == "all-to-all")
    assert op.notes == ("bound",) and op.ring_bytes == 64 * 256 * 2


@needs_libtpu
@pytest.mark.slow
def test_text_and_compiled_programs_are_read_alike():
    mesh = topology.chips("v5e:2x4").mesh(x=8)
    made = compiled(
        mesh, manual(mesh, lambda x: jax.lax.psum(x, "x"), P(), P()), sharded(mesh, (512, 256))
    )
    assert repr(measure.collectives(made.as_text())) == repr(measure.collectives(made))
    memory = measure.bytes_per_device(made)
    assert memory.arguments == memory.outputs == 512 * 256 * 2
    assert hlo.parse(made.as_text()).devices == 8


@needs_libtpu
@pytest.mark.slow
def test_kernels_count_by_their_formula():
    """One that states it, one that is told, and one whose metadata stands on lines of its own."""
    mesh = topology.chips("v5e:2x4").mesh(x=8)

    def product(a, b, out):
        out[...] = jnp.dot(a[...], b[...])

    def run(a, b, estimate, **flops):
        out = jax.ShapeDtypeStruct((128, 128), jnp.float32)
        with marks.kernels(**flops):
            return pl.pallas_call(product, out_shape=out, cost_estimate=estimate)(a, b)

    said = pl.CostEstimate(flops=7 * 128**3, bytes_accessed=1, transcendentals=0)
    arrays = [sharded(mesh, (8 * 128, 128), "x", dtype=jnp.float32)] * 2
    untold = manual(mesh, functools.partial(run, estimate=None), P("x"), P("x"))
    with pytest.raises(ValueError, match=r"a tpu_custom_call; .* say marks.kernels\("):
        measure.flops(compiled(mesh, untold, *arrays))
    mask = masks.MultiHeadMask([masks.CausalMask((256, 256))])
    splash = attention.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    heads = [sharded(mesh, (8, 1, 256, 128), "x", dtype=jnp.float32)] * 3

    def each(a, b, *heads):
        with marks.kernels(splash=5):
            attended = jax.vmap(splash)(*heads)
        return run(a, b, said), run(b, a, None, pallas_call=3), attended

    made = compiled(mesh, manual(mesh, each, P("x"), P("x")), *arrays, *heads)
    assert measure.flops(made) == 7 * 128**3 + 3 + 5
    assert measure.collectives(made) == {}


# --- A whole training step


def fsdp_step(mesh):
    """(FSDP's step of a decoder, lowered; the bytes of its parameters and optimizer's state)."""
    config = model.Config(
        embed=256, layers=2, heads=2, kv_heads=2, head_dim=128, mlp=512, remat=True
    )
    graphdef = nnx.split(nnx.eval_shape(lambda: model.Decoder(config, nnx.Rngs(0))))[0]
    loss = functools.partial(model.loss, graphdef=graphdef)
    layout = layouts.Layout(mesh.abstract, fsdp="fsdp", dtype=jnp.bfloat16)
    tx = optax.sgd(1e-3, momentum=0.9)

    def create(key):
        return nnx.state(model.Decoder(config, nnx.Rngs(params=key)))

    state = jax.eval_shape(lambda key: layouts.init(layout, create, tx, key), jax.random.key(0))
    rows = next(iter(data.batches(2 * mesh.chips.devices, 128, seed=1)))
    batch = jax.tree.map(lambda x: sharded(mesh, x.shape, "fsdp", dtype=x.dtype), rows)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    return mesh.lower(layouts.step(layout, loss, tx), *state, batch), size


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", sample(["v5e:2x4", "v5p:2x2x2"], 1))
def test_a_whole_step_sends_what_was_written_and_holds_its_share(name):
    mesh = topology.chips(name).mesh(fsdp=8)
    lowered, state = fsdp_step(mesh)
    made = topology.compile(lowered, mesh)
    written, found = measure.collectives(lowered), measure.collectives(made)
    became = measure.differences(lowered, made)
    assert became.keys() <= {"as written", "combined", "all-reduce"}
    assert found.payload_bytes == written.payload_bytes
    memory = measure.fits(made).memory
    assert state // 8 <= memory.arguments < state // 8 * 1.05  # small arrays are padded to tiles
    assert memory.aliased >= state // 8  # both are donated


# --- What stands beside a collective


def carried(rows, size, layers):
    """A program with three gathers a layer, of which products carry some."""
    mesh = topology.chips("v5e:2x4").mesh(x=8)

    def run(x, stack):
        def layer(x, weights):
            for i in range(3):
                x = jnp.tanh(x @ jax.lax.all_gather(weights[i], "x", tiled=True))
            return x, None

        return jax.lax.scan(layer, x, stack)[0]

    program = manual(mesh, run, (P("x"), P(None, None, "x")), P("x"))
    x = sharded(mesh, (8 * rows, size), "x")
    return compiled(mesh, program, x, sharded(mesh, (layers, 3, size, size), None, None, "x"))


@needs_libtpu
def test_a_carried_gather_is_covered_by_the_product_that_carries_it():
    rows, size, layers, chip = 512, 1024, 3, topology.CHIPS["v5e"]
    made = carried(rows, size, layers)
    found = measure.overlap(made, chip)
    product = 2 * rows * size * size / 197e12
    gather = size * size * 2 * 7 / 8 / (2 * 45e9)  # a ring of eight, both ways
    assert found.seconds == pytest.approx(3 * layers * gather)
    for beside in found.found:
        assert (beside.times, beside.seconds) == (layers, pytest.approx(gather))
        if beside.op.asynchronous:
            assert len(beside.products) >= 1
            assert beside.arithmetic == pytest.approx(product * len(beside.products))
        else:
            assert (beside.covered, beside.arithmetic, beside.products) == (0.0, 0.0, ())
    hidden = [beside for beside in found.found if beside.op.asynchronous]
    lines = made.as_text().splitlines()
    starts, ends = (
        [i for i, line in enumerate(lines) if f" %async-collective-{end}" in line.split(" = ")[0]]
        for end in ("start", "done")
    )
    expected = [products(made, lines[i:j]) for i, j in zip(starts, ends, strict=True)]
    assert [list(b.products) for b in hidden] == expected
    beside = {name for b in hidden for name in b.products}
    covered = sum(b.covered for b in hidden)
    assert covered == pytest.approx(len(beside) * product)  # far less than a gather takes
    assert found.exposed == pytest.approx(found.seconds - layers * covered)
    assert found.share == pytest.approx(covered / gather / 3)
    drawn = measure.lanes(made, chip, trips=1)
    for lane, seconds in {"links": 3 * gather, "products": 3 * product}.items():
        spans = [span for span in drawn if span.lane == lane]
        assert sum(span.end - span.start for span in spans) == pytest.approx(seconds)
        assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(spans))
    for sent in (span for span in drawn if span.lane == "links" and not span.asynchronous):
        assert not [
            p
            for p in drawn
            if p.lane == "products" and p.start < sent.end - 1e-12 and p.end > sent.start + 1e-12
        ]
    assert "not a measurement" in repr(found)


def neighbours(made, op):
    """The fewest chips of its own group that a chip has beside it; of a group on a ring, two."""
    places, found = made.coordinates, []
    for group in op.groups:
        cells = [places[i][:3] for i in group]
        apart = [[sum(abs(a - b) for a, b in zip(x, y, strict=True)) for y in cells] for x in cells]
        found += [row.count(1) for row in apart]
    return min(found)


ON_LINKS = [
    ("v5e:2x4", dict(x=8)),
    ("v5p:2x2x2", dict(x=8)),
    ("v5e:2x4", dict(y=4, x=2)),
    ("v5p:2x2x2", dict(y=2, x=4)),
    ("v5p:2x2x2", dict(y=4, x=2)),
]


@needs_libtpu
@pytest.mark.parametrize("chips, axes", marked(ON_LINKS, [], 2))
def test_a_strategy_counts_no_more_links_than_lead_to_its_group(chips, axes):
    """Whatever it is called and however many colors it has, for a small array and a large one."""
    mesh, named = topology.chips(chips).mesh(**axes), set()
    chip, bandwidth = mesh.chips.chip, mesh.chips.chip.link_bandwidth

    def each(share, whole):
        gathered = jax.lax.all_gather(share, "x", tiled=True)
        scattered = jax.lax.psum_scatter(whole, "x", tiled=True)
        return gathered, scattered, jax.lax.psum(whole * 2, "x")

    program = manual(mesh, each, (P("x"), P()), (P(), P("x"), P()))
    for rows in (64, 1024):
        share, whole = sharded(mesh, (rows, 4096), "x"), sharded(mesh, (rows, 4096))
        made = compiled(mesh, program, share, whole)
        found = [b for b in measure.overlap(made, chip).found if b.op.groups]
        found = [b for b in found if b.op.kind != "collective-permute"]
        assert len(found) >= 2  # a scatter that became a sum goes with the other
        for beside in found:
            named.add(beside.op.strategy)
            name = beside.op.strategy
            around = 2 if "1D" in name or name == "StrategyRing" else 6
            assert beside.lanes == min(around, neighbours(made, beside.op)), name
            expected = beside.op.ring_bytes / (beside.lanes * bandwidth)
            assert beside.seconds == pytest.approx(expected)
    assert {name.startswith("UniDirection") for name in named} == {True, False}


@needs_libtpu
@pytest.mark.slow
def test_the_products_beside_a_permute_are_those_between_its_lines():
    """Read off the lines of the text, and no second of arithmetic stands beside two."""
    mesh = topology.chips("v5e:2x4").mesh(x=4, y=2)
    out = NamedSharding(mesh.abstract, P("x", "y"))
    program = jax.jit(lambda x, w: jnp.tanh(x @ w), out_shardings=out)
    x, w = sharded(mesh, (8192, 1024), "x"), sharded(mesh, (1024, 4096), "x", "y")
    made, chip = compiled(mesh, program, x, w), topology.CHIPS["v5e"]
    found = measure.overlap(made, chip)
    lines = made.as_text().partition("ENTRY")[2].splitlines()
    for beside in found.found:
        (start,) = (i for i, line in enumerate(lines) if f" %{beside.op.name} = " in line)
        (end,) = (i for i, line in enumerate(lines) if f"-done(%{beside.op.name})" in line)
        names = products(made, lines[start:end])
        assert list(beside.products) == names
    given = sum(b.covered * b.times for b in found.found)
    assert 0 < given <= measure.flops(made) / chip.peak() * (1 + 1e-9)


def products(made, lines):
    """The names of those fusions whose computation multiplies, by the lines of the text alone."""
    bodies = {}
    for part in re.split(r"\n(?=%)", made.as_text().partition("ENTRY")[0]):
        bodies[part.split(" ")[0]] = part
    found = []
    for line in lines:
        called = re.search(r"^ *(?:ROOT )?%(\S+) = .* fusion\(.*calls=(%[\w.\-]+)", line)
        if called and " convolution(" in bodies[called[2]]:
            found.append(called[1])
    return found


CHIP = dataclasses.replace(
    topology.CHIPS["v5e"], flops=(("bfloat16", 1.0),), link_bandwidth=1.0, devices=1
)
LOOP = """HloModule m, is_scheduled=true, num_partitions=8

%body (c: (f32[2,2], s32[], f32[64])) -> (f32[2,2], s32[], f32[64]) {
  %c = (f32[2,2], s32[], f32[64]) parameter(0)
  %x = f32[2,2] get-tuple-element(%c), index=0
  %i = s32[] get-tuple-element(%c), index=1
  %s = (f32[64], f32[64], u32[]) get-tuple-element(%c), index=2
  %first = f32[2,2] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %done = f32[64] collective-permute-done(%s)
  %second = f32[2,2] dot(%first, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %start = (f32[64], f32[64], u32[]) collective-permute-start(%done), source_target_pairs={{0,1}}
  %third = f32[2,2] dot(%second, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %r = (f32[2,2], s32[], f32[64]) tuple(%third, %next, %start)
}

%condition (c.1: (f32[2,2], s32[], f32[64])) -> pred[] {
  %c.1 = (f32[2,2], s32[], f32[64]) parameter(0)
  %i.1 = s32[] get-tuple-element(%c.1), index=1
  %five = s32[] constant(5)
  ROOT %lt = pred[] compare(%i.1, %five), direction=LT
}

ENTRY %main (p: f32[2,2], v: f32[64]) -> f32[64] {
  %p = f32[2,2] parameter(0)
  %v = f32[64] parameter(1)
  %zero = s32[] constant(0)
  %over = (f32[64], f32[64], u32[]) collective-permute-start(%v), source_target_pairs={{0,1}}
  %t = (f32[2,2], s32[], f32[64]) tuple(%p, %zero, %v)
  %loop = (f32[2,2], s32[], f32[64]) while(%t), condition=%condition, body=%body
  %end = f32[64] collective-permute-done(%over)
  ROOT %out = f32[64] copy(%end)
}
"""


def test_a_collective_may_end_in_the_next_trip_and_no_second_is_given_twice():
    found = {beside.op.name: beside for beside in measure.overlap(LOOP, CHIP).found}
    inner, outer = found["start"], found["over"]
    assert inner.products == ("third", "first") and inner.times == 5
    assert (inner.seconds, inner.covered) == (64 * 4, 2 * 16)
    # Around the loop: fifteen products, of which ten are beside the loop's own.
    assert outer.products == ("loop",) and outer.arithmetic == 15 * 16
    assert outer.covered == 5 * 16


def test_lanes_are_the_order_with_what_is_awaited():
    """By hand: products of 16 s, a permute of 256 that begins after two and ends in the next trip.

    The third product runs beside it, and the first of the next trip; the second one waits.
    """
    spans = measure.lanes(LOOP, CHIP)
    found = [(span.lane, span.name, span.start, span.end) for span in spans]
    one, two = 32 + 256, 32 + 256 + 16
    assert found == [
        ("products", "first", 0, 16),
        ("products", "second", 16, 32),
        ("links", "start", 32, one),
        ("products", "third", 32, 48),
        ("products", "first", 48, 64),
        ("products", "second", one, two),
        ("links", "start", two, two + 256),
        ("products", "third", two, two + 16),
    ]
    (sent, _) = (span for span in spans if span.lane == "links")
    assert (sent.kind, sent.asynchronous) == ("collective-permute", True)
    assert (
        measure.lanes(
            "HloModule m, is_scheduled=true\n\nENTRY %e (p: f32[]) -> f32[] {\n"
            "  ROOT %p = f32[] parameter(0)\n}\n",
            CHIP,
        )
        == ()
    )


def test_what_is_not_scheduled_has_no_overlap():
    compiled = jax.jit(lambda x: x @ x).lower(jax.ShapeDtypeStruct((4, 4), "float32")).compile()
    if "is_scheduled=true" not in compiled.as_text():
        with pytest.raises(ValueError, match="is no schedule; compile it for TPUs"):
            measure.overlap(compiled, CHIP)
    with pytest.raises(ValueError, match="is no schedule"):
        measure.overlap(LOOP.replace(", is_scheduled=true", ""), CHIP)
    with pytest.raises(ValueError, match=r"measure\.lanes: .* is no schedule"):
        measure.lanes(LOOP.replace(", is_scheduled=true", ""), CHIP)
    with pytest.raises(TypeError, match="takes a compiled program, and got int"):
        measure.overlap(3, CHIP)


def send(attributes):
    attributes = f"is_host_transfer=true, frontend_attributes={{{attributes}}}"
    return f"""HloModule m, num_partitions=8

ENTRY %main (p: f32[4]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
  %t = token[] after-all()
  %s = (f32[4]{{0}}, u32[], token[]) send(%p, %t), {attributes}
  %d = token[] send-done(%s), is_host_transfer=true
  ROOT %c = f32[4]{{0}} copy(%p)
}}
"""


def test_a_transfer_between_slices_of_an_unknown_kind_is_refused_by_name():
    unknown = '_xla_megascale_target="{1,2}x{0:7}",_xla_megascale_transfer_type="GOSSIP"'
    with pytest.raises(ValueError, match=re.escape("between slices s: ") + ".*GOSSIP"):
        measure.collectives(send(unknown))
    strange = '_xla_megascale_target="all",_xla_megascale_transfer_type="ALL_REDUCE"'
    with pytest.raises(ValueError, match="cannot read the transfer"):
        measure.collectives(send(strange))
    assert measure.collectives(send('_xla_host_transfer_handler_name="callback"')) == {}


@needs_libtpu
def test_turns_that_a_loop_s_mark_says_are_kept_by_the_compiler():
    """A gather in each of 8 turns; and the product beside it, besides the one that is summed."""
    found = measure.collectives(together())
    assert found["all-gather"] == Count(1, 8, 8 * 2**21, 8 * 2**21 * 7 / 8)
    assert measure.flops(together()) == 8 * 2 * 8 * 1024**2 + 2 * 1024 * 64 * 256
    told = measure.overlap(together(), topology.CHIPS["v5e"]).found
    assert [b.times for b in told if b.op.kind == "all-gather"] == [8]
