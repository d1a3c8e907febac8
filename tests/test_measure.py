"""What is measured in compiled programs whose content is known, and in arrays and calls."""

import functools
import math
import time

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import marks, measure, mesh, model, objective, topology
from shardwise.measure import hlo, timing
from shardwise.measure.counts import Count, Op


def compiled(f, *args, **options):
    return jax.jit(f, **options).lower(*args).compile()


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


# --- FLOPs


@settings(max_examples=12)
@given(*[st.integers(1, 40)] * 4)
def test_flops_of_one_batched_product(batch, m, n, k):
    program = compiled(
        lambda x, y: jnp.einsum("bmk,bkn->bmn", x, y), shape(batch, m, k), shape(batch, k, n)
    )
    # Inner and outer products become elementwise code on some stacks, and count on none.
    matrices = k > 1 and m * n > 1
    assert measure.flops(program) == (2 * batch * m * k * n if matrices else 0)
    if matrices:
        assert measure.flops(program) == program.cost_analysis()["flops"]


def chain(x, weights):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


def unrolled(x, weights):
    return functools.reduce(lambda x, w: jnp.tanh(x @ w), weights, x)


@settings(max_examples=4)
@given(st.integers(1, 6), st.integers(2, 20), st.integers(2, 20))
def test_flops_of_a_scan_are_those_of_the_unrolled_loop(trips, rows, size):
    args = shape(rows, size), shape(trips, size, size)
    for f, passes in ((lambda f: f, 1), (lambda f: jax.grad(lambda *a: f(*a).sum(), (0, 1)), 3)):
        expected = passes * trips * 2 * rows * size**2
        assert measure.flops(compiled(f(chain), *args)) == expected
        assert measure.flops(compiled(f(unrolled), *args)) == expected


def nested(x, weights):
    return jax.lax.scan(lambda x, _: (chain(x, weights), None), x, None, length=3)[0]


def counted(x, weights):
    return jax.lax.fori_loop(2, 9, lambda i, x: jnp.tanh(x @ weights[0]), x)


def branched(x, weights):
    one, two = (lambda x: x @ weights[0]), (lambda x: x @ weights[0] @ weights[1])
    return jax.lax.cond(x[0, 0] > 0, two, one, x)


def recomputed(x, weights):
    """Per trip: the product, the same again in the backward pass, and two for the gradients."""
    body = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    return jax.grad(lambda *a: jax.lax.scan(body, *a)[0].sum(), (0, 1))(x, weights)


@pytest.mark.parametrize(
    ("f", "products"), [(nested, 15), (counted, 7), (branched, 2), (recomputed, 20)]
)
def test_flops_in_loops_branches_and_rematerialisation(f, products):
    program = compiled(f, shape(8, 16), shape(5, 16, 16))
    assert measure.flops(program) == products * 2 * 8 * 16 * 16


def test_flops_of_an_mlp_and_its_gradient():
    def mlp(first, second, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ first) @ second))

    program = compiled(jax.value_and_grad(mlp, (0, 1)), shape(6, 10), shape(10, 4), shape(8, 6))
    # Forward and the weights' gradients; the second layer has its input's gradient besides.
    assert measure.flops(program) == 2 * (2 * 8 * 6 * 10) + 3 * (2 * 8 * 10 * 4)


@pytest.mark.parametrize("strides", [(1, 1), (2, 1)])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_flops_of_convolutions_match_the_compilers_count(strides, padding):
    def convolve(x, k):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, k, strides, padding, dimension_numbers=numbers)

    args = shape(2, 9, 8, 3), shape(3, 2, 3, 5)
    program = compiled(convolve, *args)
    assert measure.flops(program) == program.cost_analysis()["flops"] > 0
    if padding == "VALID":
        assert measure.flops(program) == 2 * math.prod(program.out_info.shape) * 3 * 2 * 3
    _, pullback = jax.vjp(convolve, *(jnp.zeros(a.shape) for a in args))
    program = compiled(pullback, program.out_info)
    assert measure.flops(program) == program.cost_analysis()["flops"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_flops_of_the_decoder_do_not_depend_on_scan(dtype):
    rows, length = 2, 16
    batch = {key: shape(rows, length, dtype=jnp.int32) for key in ("tokens", "targets")}
    batch["mask"] = shape(rows, length)
    found = []
    for scan in (True, False):
        c = model.Config(embed=32, layers=2, head_dim=8, mlp=48, dtype=dtype, scan=scan)
        graphdef, params = nnx.split(nnx.eval_shape(lambda c=c: model.Decoder(c, nnx.Rngs(0))))
        loss = functools.partial(model.loss, graphdef=graphdef)
        found.append(measure.flops(compiled(objective.value_and_grad(loss), params, batch)))
    projections = c.embed * c.head_dim * (2 * c.heads + 2 * c.kv_heads) + 3 * c.embed * c.mlp
    attention = 2 * length * c.heads * c.head_dim
    expected = 2 * rows * length * (c.layers * (projections + attention) + c.embed * c.vocab)
    assert measure.flops(compiled(loss, params, batch)) == expected
    assert found == [3 * expected] * 2


# --- Collectives

MESHES = [
    ({"a": 8}, "a"),
    ({"a": 4, "b": 2}, "a"),
    ({"a": 4, "b": 2}, "b"),
    ({"a": 4, "b": 2}, "ab"),
    ({"a": 2, "b": 2, "c": 2}, "c"),
    ({"a": 2, "b": 2, "c": 2}, "ac"),
    ({"a": 2, "b": 2, "c": 2}, "abc"),
]


def every_kind(axes, n, trips):
    """A function of one [8 n] array a device, with each kind of collective `trips` times."""

    def once(x, _):
        gathered = jax.lax.all_gather(x, axes, tiled=True)  # 8 n^2
        x = jax.lax.psum_scatter(jnp.sin(gathered), axes, tiled=True)  # 8 n
        x = jax.lax.all_to_all(jnp.sin(x), axes, 0, 0, tiled=True)
        x = jnp.sin(jax.lax.psum(jnp.sin(x), axes))
        return jax.lax.ppermute(x, axes, [(i, (i + 1) % n) for i in range(n)]), None

    return lambda x: jax.lax.scan(once, x, None, length=trips)[0]


@pytest.mark.parametrize("trips", [1, 3])
@pytest.mark.parametrize(("axes_sizes", "axes"), MESHES)
def test_every_kind_of_collective_on_every_mesh(axes_sizes, axes, trips):
    grid = mesh.make(**axes_sizes)
    n = math.prod(axes_sizes[axis] for axis in axes)
    spec = P(tuple(axes_sizes))
    f = jax.shard_map(
        every_kind(tuple(axes), n, trips), mesh=grid, in_specs=spec, out_specs=spec, check_vma=False
    )
    lowered = jax.jit(f).lower(shape(8 * n * 8))
    block = 8 * n * 4
    payload = {
        "all-gather": block * n,
        "reduce-scatter": block * n,
        "all-reduce": block,
        "all-to-all": block,
        "collective-permute": block,
    }
    passes = dict.fromkeys(payload, (n - 1) / n) | {"all-reduce": 2 * (n - 1) / n}
    passes["collective-permute"] = 1
    expected = {
        kind: Count(1, trips, trips * size, trips * size * passes[kind])
        for kind, size in payload.items()
    }
    for program in (lowered, lowered.compile()):
        found = measure.collectives(program)
        assert found == expected
        assert found.ring_bytes == sum(count.ring_bytes for count in expected.values())
        assert {op.group_size for op in found.ops} == {n, None}
        assert {op.trips for op in found.ops} == {trips}
        assert measure.by_axis(found, grid) == {tuple(axes): expected}


def test_collectives_by_axis():
    grid = mesh.make(a=2, b=2, c=2)

    def f(x):
        x = jax.lax.psum(jax.lax.all_gather(x, "c", tiled=True), ("a", "b"))
        swap = [(i, 3 - i) for i in range(4)]  # both places change
        return jax.lax.ppermute(jax.lax.ppermute(x, ("b", "c"), swap), "b", [(0, 0), (1, 1)])

    f = jax.shard_map(f, mesh=grid, in_specs=P("c"), out_specs=P(), check_vma=False)
    lowered = jax.jit(f).lower(shape(16))
    for program in (lowered, lowered.compile()):
        found = measure.by_axis(measure.collectives(program), grid)
        sent = {axes: part.ring_bytes for axes, part in found.items()}
        assert sent == {("a", "b"): 2 * 64 * 3 / 4, ("b", "c"): 64, ("c",): 32}
        assert list(sent) == [("a", "b"), ("b", "c"), ("c",)]  # the mesh's order, not the program's
        chips = topology.chips("v5e:2x4").mesh(a=2, b=2, c=2)
        assert measure.by_axis(measure.collectives(program), chips) == found
    with pytest.raises(ValueError, match=r"number 7, and the mesh \{'a': 4\} has 4"):
        measure.by_axis(measure.collectives(lowered), jax.sharding.AbstractMesh((4,), ("a",)))


@pytest.mark.parametrize("n", [8, 50, 51, 128, 4096])
def test_collectives_of_many_devices_are_read_as_those_of_few(n):
    """More than a hundred numbers MLIR writes in hexadecimal."""
    grid = jax.sharding.AbstractMesh((n, 2), ("a", "b"))
    ring = [(i, (i + 1) % n) for i in range(n)]

    def of_one(x):
        return jax.lax.psum(jax.lax.ppermute(x, "a", ring), "b")

    mapped = jax.shard_map(of_one, mesh=grid, in_specs=P(("a", "b")), out_specs=P("a"))
    x = jax.ShapeDtypeStruct((2 * n, 3), jnp.float32, sharding=NamedSharding(grid, P(("a", "b"))))
    lowered = jax.jit(mapped).trace(x).lower(lowering_platforms=("cpu",))
    found = measure.collectives(lowered)
    assert found["collective-permute"].ring_bytes == found["all-reduce"].ring_bytes == 12
    assert found["all-reduce"].payload_bytes == 12 and found.ops[1].group_size == 2
    assert len(found.ops[0].groups) == 2 * n


def test_a_permute_sends_where_any_device_has_another_target():
    """One number counts for all devices: that of those that send."""
    block, some = (hlo.Array("f32", (4,)),), ((0, 0), (1, 2))
    assert Op("collective-permute", "", block, None, groups=some).ring_bytes == 16
    assert Op("collective-permute", "", block, None, groups=((0, 0), (1, 1))).ring_bytes == 0


def test_where_no_root_is_marked_the_last_instruction_is_it():
    text = compiled(lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x @ x, x), shape(4, 4)).as_text()
    assert "ROOT " in text
    assert hlo.parse(text.replace("ROOT ", "")) == hlo.parse(text)


def test_lowered_programs_say_how_many_devices_run_them():
    sharding = NamedSharding(mesh.make(a=8), P("a"))
    assert hlo.lowered(jax.jit(jnp.sin, in_shardings=sharding).lower(shape(8))).devices == 8
    assert hlo.lowered(jax.jit(jnp.sin).lower(shape(8))).devices == 1


def test_of_a_lowered_program_left_to_the_compiler_nothing_is_said():
    """Its collectives are not there yet, and none is not their number."""
    rows = NamedSharding(mesh.make(a=8), P("a"))
    lowered = jax.jit(lambda x: x.sum(0), in_shardings=rows).lower(shape(8, 4))
    with pytest.raises(ValueError, match="what its 8 devices send, the compiler has yet to decide"):
        measure.collectives(lowered)
    assert measure.collectives(lowered.compile())["all-reduce"].static == 1
    alone = jax.shard_map(jnp.sin, mesh=mesh.make(a=8), in_specs=P("a"), out_specs=P("a"))
    assert not measure.collectives(jax.jit(alone).lower(shape(8)))


def test_lowered_programs_keep_the_dtype_in_which_a_collective_was_written():
    f = jax.shard_map(
        lambda x: jax.lax.psum(x, "a"), mesh=mesh.make(a=8), in_specs=P("a"), out_specs=P()
    )
    lowered = jax.jit(f).lower(shape(8, 16, dtype=jnp.bfloat16))
    written, run = measure.collectives(lowered), measure.collectives(lowered.compile())
    assert [op.dtype for op in written.ops] == ["bf16"]
    assert written.payload_bytes == 16 * 2
    assert run.payload_bytes == 16 * {"bf16": 2, "f32": 4}[run.ops[0].dtype]
    assert "psum" in run.ops[0].source


@pytest.mark.parametrize(
    ("left", "right", "out", "expected", "share"),
    [
        (P("a"), P(None, "b"), P("a", "b"), {}, 8),
        (P(None, "b"), P(), P(), {"all-gather": (64 * 128 * 4, 3 / 4)}, 1),
        (P(None, "b"), P("b"), P(), {"all-reduce": (64 * 256 * 4, 3 / 2)}, 4),
        (P("b"), P(None, "b"), P("b"), {"all-gather": (128 * 256 * 4, 3 / 4)}, 4),
    ],
)
def test_products_that_the_compiler_partitions(left, right, out, expected, share):
    grid = mesh.make(a=2, b=4)
    given = tuple(NamedSharding(grid, spec) for spec in (left, right))
    program = compiled(
        lambda x, y: x @ y,
        shape(64, 128),
        shape(128, 256),
        in_shardings=given,
        out_shardings=NamedSharding(grid, out),
    )
    assert measure.flops(program) * share == 2 * 64 * 128 * 256
    assert measure.collectives(program) == {
        kind: Count(1, 1, size, size * passes) for kind, (size, passes) in expected.items()
    }


def test_trips_that_depend_on_data_matter_only_where_something_is_counted():
    def repeated(f):
        return lambda n, x: jax.lax.fori_loop(0, n, lambda i, x: f(x), x)

    args = jnp.int32(3), shape(8, 8)
    assert measure.flops(compiled(repeated(jnp.sin), *args)) == 0
    with pytest.raises(ValueError, match=r"loop while\S* in main\S* .* is no constant\. Use jax"):
        measure.flops(compiled(repeated(lambda x: x @ x), *args))
    f = jax.shard_map(
        repeated(lambda x: jax.lax.psum(x, "a") / 8),
        mesh=mesh.make(a=8),
        in_specs=P(),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match=r"loop while\.\d+ in .* is no constant\. Use jax"):
        measure.collectives(jax.jit(f).lower(*args))


def in_turns(x, now):
    """A sum 3 times in each of 5 turns of 7, and one in each of 2; elsewhere in 1 and 6."""

    def once(i, x):
        return jax.lax.psum(jnp.sin(x @ x) + i, "a")

    def often(i, x):
        return jax.lax.fori_loop(0, 3, once, x + i)

    def tick(x, now):
        for number, (times, body) in enumerate([([5, 1], often), ([2, 6], once)]):
            with marks.turns(times, of=7):
                x = jax.lax.fori_loop(0, (now == number).astype(jnp.int32), body, x)
        return x, None

    return jax.lax.scan(tick, x, now)[0]


def test_a_loop_whose_trips_depend_on_data_counts_as_its_mark_says():
    f = jax.shard_map(in_turns, mesh=mesh.make(a=8), in_specs=P(), out_specs=P(), check_vma=False)
    lowered = jax.jit(f).lower(shape(8, 8), shape(7, dtype=jnp.int32))
    for program in (lowered, lowered.compile()):
        found = measure.collectives(program)
        assert found == {"all-reduce": Count(2, 17, 17 * 256, 17 * 448)}
        assert sorted(op.trips for op in found.ops) == [2, 15]
    assert measure.flops(lowered.compile()) == 17 * 2 * 8**3


def test_turns_that_do_not_come_out_whole_are_counted_as_fractions():
    f = jax.jit(jax.shard_map(in_turns, mesh=mesh.make(a=8), in_specs=P(), out_specs=P()))
    found = measure.collectives(f.lower(shape(8, 8), shape(9, dtype=jnp.int32)))
    np.testing.assert_allclose([op.trips for op in found.ops], [5 * 3 * 9 / 7, 2 * 9 / 7])


def test_a_conditional_counts_as_its_heaviest_branch():
    def f(i, x):
        light, heavy = (lambda x: x), (lambda x: jax.lax.psum(jax.lax.psum(x, "a") / 8, "a") / 8)
        return jax.lax.switch(i[0], [light, heavy, lambda x: jax.lax.psum(x, "a") / 8], x)

    f = jax.shard_map(f, mesh=mesh.make(a=8), in_specs=P(), out_specs=P(), check_vma=False)
    lowered = jax.jit(f).lower(shape(1, dtype=jnp.int32), shape(16))
    for program in (lowered, lowered.compile()):
        assert measure.collectives(program) == {"all-reduce": Count(2, 2, 128, 224)}


def scanned(x):
    return jax.lax.scan(lambda x, _: (jax.lax.psum(jnp.sin(x), "a"), None), x, None, length=3)[0]


def indexed(x):
    return jax.lax.fori_loop(2, 9, lambda i, x: jax.lax.psum(x * i, "a"), x)


def downward(x):
    def step(carry):
        return carry[0] - 2, jax.lax.psum(carry[1], "a")

    return jax.lax.while_loop(lambda carry: carry[0] > 0, step, (9, x))[1]


@pytest.mark.parametrize(("f", "trips"), [(scanned, 3), (indexed, 7), (downward, 5)])
def test_loops_beside_axes_that_are_left_to_the_compiler(f, trips):
    """There every value of a loop, its counter too, is lowered with a sharding constraint."""
    f = jax.shard_map(
        f, mesh=mesh.make(a=4, b=2), in_specs=P(), out_specs=P(), axis_names={"a"}, check_vma=False
    )
    lowered = jax.jit(f).lower(shape(4, 2))
    for program in (lowered, lowered.compile()):
        found = measure.collectives(program)
        assert found == {"all-reduce": Count(1, trips, trips * 32, trips * 48)}


def on_host(x):
    jax.debug.print("{}", x[0, 0])
    return jax.pure_callback(np.sin, x, x)


@pytest.mark.parametrize(
    "f",
    [
        jnp.linalg.cholesky,
        jnp.linalg.qr,
        jnp.linalg.svd,
        jnp.linalg.eigh,
        jnp.linalg.inv,
        jnp.fft.fft,
        jax.scipy.special.erf,
        lambda x: jax.lax.top_k(x, 2),
        lambda x: jax.lax.approx_max_k(x, 2),
        lambda x: jax.random.normal(jax.random.key(0), x.shape),
        on_host,
    ],
)
def test_custom_calls_that_stay_on_their_device(f):
    both = jax.shard_map(
        lambda x: (f(x), jax.lax.psum(x, "a")),
        mesh=mesh.make(a=8),
        in_specs=P("a"),
        out_specs=(P("a"), P()),
        check_vma=False,
    )
    found = measure.collectives(jax.jit(both).lower(shape(64, 8)))
    assert found == {"all-reduce": Count(1, 1, 256, 448)}


# --- What is refused


def test_a_collective_whose_bytes_depend_on_data():
    f = jax.shard_map(
        functools.partial(jax.lax.ragged_all_to_all, axis_name="a"),
        mesh=mesh.make(a=8),
        in_specs=P("a"),
        out_specs=P("a"),
        check_vma=False,
    )
    rows, numbers = shape(64, 4), [shape(64, dtype=jnp.int32)] * 4
    with pytest.raises(
        ValueError, match=r"bytes of ragged.all.to.all\.\d+, a ragged-all-to-all; kn"
    ):
        measure.collectives(jax.jit(f).lower(rows, rows, *numbers))


def test_custom_calls_that_nobody_knows():
    call = jax.ffi.ffi_call("their_exchange", shape(4))
    with pytest.raises(ValueError, match=r"custom call their_exchange sends .* themselves"):
        measure.collectives(jax.jit(lambda x: call(x)).lower(shape(4)))


def test_a_lowered_program_of_unknown_sizes():
    (rows,) = jax.export.symbolic_shape("rows")
    lowered = jax.jit(lambda x: jnp.sin(x).sum()).lower(shape(rows, 4))
    with pytest.raises(
        ValueError, match=r"f32\[\?,4\]\S* has a size that is not known; lower with"
    ):
        measure.collectives(lowered)


def kernel(sends):
    """A TPU kernel, which doubles its block or copies it to the next device, to lower only."""

    def double(x, out):
        out[...] = 2 * x[...]

    def copy(x, out, sent, received):
        to = (jax.lax.axis_index("a") + 1) % 8
        sending = pltpu.make_async_remote_copy(x, out, sent, received, (to,))
        sending.start()
        sending.wait()

    semaphores = [pltpu.SemaphoreType.DMA] * 2 if sends else []
    call = pl.pallas_call(copy if sends else double, shape(8, 128), scratch_shapes=semaphores)
    f = jax.shard_map(call, mesh=mesh.make(a=8), in_specs=P("a"), out_specs=P("a"), check_vma=False)
    return jax.jit(f).trace(shape(64, 128)).lower(lowering_platforms=("tpu",))


def test_kernels_that_send_are_refused_and_others_are_not():
    assert measure.collectives(kernel(sends=False)) == {}
    with pytest.raises(ValueError, match="whether the custom call tpu_custom_call sends"):
        measure.collectives(kernel(sends=True))


@pytest.mark.parametrize("what", ["collectives", "flops", "bytes_per_device"])
def test_what_is_no_compiled_program_is_named_with_the_remedy(what):
    with pytest.raises(TypeError, match=rf"measure\.{what} .*function; pass jax\.jit\(f\)\.lower"):
        getattr(measure, what)(lambda x: x)
    if what != "collectives":
        with pytest.raises(TypeError, match=rf"{what} takes a compiled program, and got Lowered"):
            getattr(measure, what)(jax.jit(jnp.sin).lower(1.0))


# --- Memory


def test_a_backend_that_tells_no_memory_is_named(monkeypatch):
    program = compiled(jnp.sin, jax.ShapeDtypeStruct((8,), jnp.float32))
    monkeypatch.setattr(type(program), "memory_analysis", lambda self: None)
    with pytest.raises(ValueError, match=r"this backend tells no memory.*measure.bytes_on_devices"):
        measure.bytes_per_device(program)


@pytest.mark.parametrize("donate", [False, True])
def test_bytes_per_device_of_a_sharded_program(donate):
    sharding = NamedSharding(mesh.make(a=8), P("a"))
    x = jax.ShapeDtypeStruct((1024,), jnp.float32, sharding=sharding)
    program = compiled(lambda x: x + 1, x, donate_argnums=(0,) if donate else ())
    found = measure.bytes_per_device(program)
    assert (found.arguments, found.outputs, found.aliased) == (512, 512, 512 * donate)
    assert found.total == 1024 - 512 * donate + found.temporaries


def test_temporaries_are_those_of_the_intermediate_value():
    program = compiled(lambda x: (x @ x.T) @ jnp.sin(x @ x.T) @ x, shape(512, 2))
    assert measure.bytes_per_device(program).temporaries >= 512 * 512 * 4


@settings(max_examples=20)
@given(st.permutations(["a", "b", None]), st.integers(1, 3), st.sampled_from(["float32", "int8"]))
def test_bytes_on_devices_for_every_spec(axes, rows, dtype):
    sizes = {"a": 4, "b": 2, None: 1}
    spec = P(*axes[:2])
    x = np.zeros((8 * rows, 8), dtype)
    grid = mesh.make(a=4, b=2)
    sharded = jax.device_put(x, NamedSharding(grid, spec))
    parts = sizes[axes[0]] * sizes[axes[1]]
    tree = {"x": sharded, "again": [sharded], "host": np.ones(9), "step": 3, "none": None}
    expected = dict.fromkeys(mesh.devices(), x.nbytes // parts)
    assert measure.bytes_on_devices(tree) == expected


def test_bytes_on_devices_of_models_keys_and_deleted_arrays():
    state = nnx.state(nnx.jit(lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0)))())
    device = jnp.ones(1).device
    assert measure.bytes_on_devices(state) == {device: 4 * (4 * 8 + 8)}
    assert measure.bytes_on_devices(jax.random.key(0)) == {device: 8}
    x = jnp.ones(4)
    x.delete()
    assert measure.bytes_on_devices([x]) == {}
    with pytest.raises(TypeError, match=r"leaf at \['f'\] is a object; expected arrays"):
        measure.bytes_on_devices({"f": object()})


# --- Time


class Clock:
    """Seconds that pass only while a result is waited for, by a list."""

    def __init__(self, *seconds):
        self.now, self.seconds = 0.0, list(seconds)

    def __call__(self, *args):
        return self

    def block_until_ready(self):
        self.now += self.seconds.pop(0)
        return self


def test_step_time_waits_and_leaves_out_the_warm_up(monkeypatch):
    clock = Clock(100, 5, 1, 2, 4, 3)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    found = measure.step_time(clock, repeats=5)
    assert found == (3, 2, "host")


def test_step_time_of_a_jitted_function_names_the_device():
    start = time.perf_counter()
    found = measure.step_time(jax.jit(jnp.sin), jnp.ones(8), repeats=3)
    assert 0 < found.median_s < time.perf_counter() - start
    assert found.device_kind == mesh.devices()[0].device_kind


def test_step_time_of_a_step_that_donates_its_state():
    step = jax.jit(lambda a, b, x: (a + x, b - x, x), donate_argnums=(0, 1))
    with pytest.raises(ValueError, match=r"argument 0, 1 was donated and is gone.*carry=2"):
        measure.step_time(step, jnp.ones(8), jnp.ones(8), jnp.ones(8))
    assert measure.step_time(step, *jnp.ones((3, 8)), carry=2, repeats=2).median_s > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "repeats=0, carry=0: expected at least 1"),
        ({"carry": 3}, r"carry=3: expected .* 0 to 2 \(the number of arguments\)"),
        ({"carry": 2}, r"carry=2, but the function returned 1 result\(s\)"),
    ],
)
def test_step_time_refuses_what_it_cannot_do(options, message):
    with pytest.raises(ValueError, match=message):
        measure.step_time(jnp.add, 1.0, 2.0, **options)


@pytest.mark.parametrize("compiled", [False, True], ids=["lowered", "compiled"])
def test_bytes_go_to_the_axes_over_which_they_were_sent(compiled):
    grid = mesh.make(a=2, b=2, c=2)

    def exchange(x):  # [2, 2, 2] on a device
        turned = jax.lax.ppermute(x, "a", [(0, 1), (1, 0)])
        summed = jax.lax.psum(turned, ("a", "c"))
        return jax.lax.all_gather(summed, "b", tiled=True)

    run = jax.shard_map(
        exchange, mesh=grid, in_specs=P("a", "b", "c"), out_specs=P(), check_vma=False
    )
    program = jax.jit(run).lower(jnp.ones((4, 4, 4), jnp.float32))
    found = measure.collectives(program.compile() if compiled else program)
    size = 2 * 2 * 2 * 4
    expected = {("a",): size, ("a", "c"): 2 * size * 3 / 4, ("b",): 2 * size / 2}
    parts = measure.by_axis(found, grid)
    assert {axes: part.ring_bytes for axes, part in parts.items()} == expected
