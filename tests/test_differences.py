"""What became of written collectives: known programs compiled here, and ops made by hand."""

import dataclasses
import importlib.util
import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import measure, mesh, model, plan, topology
from shardwise.measure.counts import Op
from shardwise.measure.differences import Difference, pairs
from shardwise.measure.hlo import Array
from shardwise.plan import arrays, compiling, planning, roles

N = 8
BY_HAND = "jit(run)/shard_map/"


def op(kind, dims, dtype="f32", trips=1, source=BY_HAND, n=N, **more):
    """One collective of these arrays, among `n` devices."""
    arrays = tuple(Array(dtype, d) for d in (dims if isinstance(dims, list) else [dims]))
    groups = ((0, 1),) if n is None else ()
    return Op(kind, f"{kind}.{id(arrays)}", arrays, n, trips, source, groups, **more)


def named(written, compiled):
    """{name: (bytes written, bytes compiled)}; of all together no byte is lost."""
    found = list(pairs(written, compiled))
    for i, ops in ((2, written), (3, compiled)):
        assert math.isclose(sum(pair[i] for pair in found), sum(o.ring_bytes for o in ops))
    told = {}
    for name, _, sent, sends in found:
        before = told.get(name, (0, 0))
        told[name] = before[0] + sent, before[1] + sends
    return told


GATHER, SCATTER = op("all-gather", (1, 128, 96)), op("reduce-scatter", (1000, 96), trips=3)
REASONS = {
    "as written": ([GATHER], [op("all-gather", (128, 96), source="")]),
    "narrowed": ([GATHER], [op("all-gather", (128, 96), "bf16")]),
    "widened": ([op("all-reduce", (7,), "bf16")], [op("all-reduce", (7,))]),
    "padded": ([SCATTER], [op("reduce-scatter", (1024, 96), trips=3, notes=("padded",))]),
    "all-reduce": ([SCATTER], [op("all-reduce", (1000, 96), trips=3, source="")]),
    "divided": ([GATHER], [op("all-gather", (128, 24), source=BY_HAND + "all_gather")]),
    "of equal rows": (
        [op("all-gather", (4, 1, 100), "s32")],
        [op("all-gather", (100,), "s32", source=BY_HAND + "all_gather")],
    ),
    "dropped": ([SCATTER], [op("reduce-scatter", (1000, 96), trips=1)]),
    "repeated": ([SCATTER], [op("reduce-scatter", (1000, 96), trips=4, source=BY_HAND + "psum")]),
    "windowed": ([], [op("collective-permute", (8, 4), n=None, notes=("windowed",))]),
    "inserted": ([], [op("all-reduce", (8, 4), source="jit(run)/reduce_sum")]),
    "left over": ([GATHER], []),
}


@pytest.mark.parametrize("name", REASONS)
def test_each_difference_has_its_name(name):
    found = named(*REASONS[name])
    assert found.keys() - {"as written"} <= {name} or name in ("dropped", "repeated")
    assert name in found and "left over" not in found.keys() - {name}


def test_what_is_cut_to_one_is_divided_too():
    """As the only head of keys that a device has left."""
    made = op("all-reduce", (4, 768, 1, 128), source=BY_HAND + "psum")
    assert named([op("all-reduce", (4, 768, 4, 128))], [made]).keys() == {"divided"}


def test_what_is_written_several_times_is_paired_once_each():
    both = [op("all-gather", (64, 3), trips=2), op("all-gather", (1, 64, 3), trips=5)]
    found = named(both, [op("all-gather", (64, 3), trips=6, source=BY_HAND + "all_gather")])
    each = both[0].ring_bytes / 2
    assert found == {"as written": (6 * each, 6 * each), "dropped": (each, 0)}


def test_arrays_of_one_collective_are_paired_by_themselves():
    """A sum of which one part does the work of a scatter; written in two dtypes."""
    written = [op("all-reduce", (16,)), op("reduce-scatter", (80, 8))]
    made = [op("all-reduce", [(16,), (80, 8)], notes=("combined",))]
    assert named(written, made) == {"combined": (112, 112), "all-reduce": (2240, 4480)}


def test_of_two_of_one_size_each_finds_its_own_width():
    """A ring's K in bfloat16, and their gradients in float32; in whatever order."""
    both = [op("collective-permute", (8, 4), d, n=None) for d in ("bf16", "f32")]
    for made in (both, both[::-1]):
        assert named(both, made).keys() == {"as written"}


def test_what_is_combined_with_another_is_known_by_it():
    """The compiler tells of several in one the origin of the first alone."""
    made = op("all-reduce", [(), (4, 8)], source="jit(run)/reduce_sum", notes=("combined",))
    found = named([op("all-reduce", (4, 8))], [made])
    assert found.keys() == {"combined", "inserted"} and found["combined"] == (224, 224)


def test_another_collective_of_as_many_bytes_is_no_fellow():
    gathered = op("all-gather", (32, 4), source=BY_HAND + "all_gather")
    for changed in (
        dict(group_size=4),
        dict(arrays=(Array("f32", (32, 5)),)),
        dict(kind="all-to-all", source=BY_HAND + "all_to_all"),
    ):
        other = dataclasses.replace(gathered, **changed)
        assert named([gathered], [other]).keys() == {"left over"}


def test_a_gather_at_the_origin_of_another_collective_is_inserted():
    """As of what an all-to-all brings in shares of the tensor axis, and its reader wants whole."""
    brought = op("all-to-all", (2, 1, 64, 128), n=2)
    gathered = op("all-gather", (2, 1, 64, 128), source=BY_HAND + "all_to_all", n=4)
    found = named([brought], [brought, gathered])
    assert found == {"as written": (32768, 32768), "inserted": (0, gathered.ring_bytes)}


def test_what_is_divided_may_be_combined_with_another():
    made = op("all-reduce", [(), (1024, 8)], source="jit(run)/reduce_sum", notes=("combined",))
    assert named([op("all-reduce", (1024, 32))], [made]).keys() == {"divided", "inserted"}


def test_a_gather_may_be_a_window_of_products():
    """Seven hops of a share, or of half of one; another share is of another gather."""
    gathered = op("all-gather", (16, 32))
    for rows, written in ((16, "windowed"), (8, "windowed"), (7, "left over")):
        hop = op("collective-permute", (rows, 32), trips=7, n=None, notes=("windowed",))
        found = named([gathered], [hop])
        assert found[written][0] == gathered.ring_bytes
        assert found["windowed"][1] == hop.ring_bytes


def test_what_is_expected_of_the_compiler_may_have_any_origin():
    """A collective by hand has its own; what the compiler does not insert is dropped."""
    expected = op("all-gather", (32, 4), trips=3, source="", notes=("expected",))
    inserted = op("all-gather", (32, 4), trips=2, source="jit(run)/dot_general")
    found = named([expected], [inserted])
    assert (
        found.keys() == {"as written", "dropped"}
        and found["as written"][0] == found["dropped"][0] * 2
    )
    assert named([expected], []).keys() == {"dropped"}
    by_hand = dataclasses.replace(expected, source=BY_HAND + "all_gather", notes=())
    assert named([by_hand], [inserted]).keys() == {"left over", "inserted"}


def test_what_trims_the_padding_belongs_to_it():
    padded = op("reduce-scatter", (1024, 96), trips=3, source="", notes=("padded",))
    trims = op("collective-permute", (24, 96), trips=3, n=None, source="")
    assert named([SCATTER], [padded, trims]).keys() == {"padded"}
    others = op("reduce-scatter", (60, 32)), op("reduce-scatter", (64, 32), notes=("padded",))
    assert named([SCATTER, others[0]], [padded, others[1], trims]).keys() == {"padded"}
    assert "inserted" in named([SCATTER], [padded, op("collective-permute", (7,), n=None)])


@given(st.lists(st.sampled_from([pair for pair in REASONS.values()]), max_size=6))
def test_no_byte_is_lost(pairs):
    named([o for w, _ in pairs for o in w], [o for _, m in pairs for o in m])


# --- Programs of known content, compiled


def compiled(f, devices, *arrays):
    """Differences of f under a shard_map of `devices`, of arrays [8, 16] cut by rows."""
    spec = P("fsdp")
    run = jax.shard_map(f, mesh=devices, in_specs=spec, out_specs=P(), check_vma=False,
                        axis_names={"fsdp"})  # fmt: skip
    sharding = NamedSharding(devices, spec)
    given = [jax.ShapeDtypeStruct(x, jnp.float32, sharding=sharding) for x in arrays]
    lowered = jax.jit(run).lower(*given)
    return measure.differences(lowered, lowered.compile())


def gather(x):
    return jax.lax.all_gather(x, "fsdp", tiled=True)


def test_a_program_as_written():
    found = compiled(lambda x, y: gather(x).sum() + gather(y).sum(), mesh.make(fsdp=8), *SHAPES)
    assert found.keys() <= {"as written", "combined"}
    assert sum(d.compiled for d in found.values()) == 7 * 4 * (16 + 3 * 5)


SHAPES = (8, 16), (24, 5)


def test_a_gather_written_twice_is_dropped_once():
    found = compiled(lambda x: gather(x).sum() * gather(x).max(), mesh.make(fsdp=8), SHAPES[0])
    assert found["dropped"] == (0, 7 * 4 * 16, 0) and found["as written"].static == 1


def test_what_the_compiler_inserts_is_told_apart():
    """Rows are summed by hand along one axis, columns by the compiler along the other."""
    devices = mesh.make(fsdp=4, model=2)

    def f(x):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(inner(), P(None, "model")))
        return jax.lax.psum(x, "fsdp").sum()

    def inner():  # as `layouts.meanings.Pins`: JAX 0.7 takes the mesh outside
        return devices if jax.__version_info__ < (0, 8) else jax.sharding.get_abstract_mesh()

    found = compiled(f, devices, (8, 16))
    assert found.keys() == {"divided", "inserted"} and found["inserted"].written == 0
    assert found["divided"].written == 2 * found["divided"].compiled
    assert found["inserted"].compiled > 0 and found["inserted"].static == 1


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
def test_on_a_torus_scatters_become_all_reduces(tmp_path, monkeypatch):
    """On v5p:2x2x2 a scatter is a sum over all three axes; on v5e:2x4 it stays one."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    names = {}
    for name in ("v5p:2x2x2", "v5e:2x4"):
        chips = topology.chips(name).mesh(fsdp=8)
        run = jax.shard_map(
            lambda x: jax.lax.psum_scatter(x, "fsdp", tiled=True) * 2.0,
            mesh=chips.abstract, in_specs=P(), out_specs=P("fsdp"), check_vma=False,
        )  # fmt: skip
        whole = NamedSharding(chips.abstract, P())
        x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16, sharding=whole)
        lowered = chips.lower(jax.jit(run), x)
        found = measure.differences(lowered, topology.compile(lowered, chips))
        names[name] = set(found)
    assert names == {"v5p:2x2x2": {"all-reduce"}, "v5e:2x4": {"as written"}}


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
def test_a_tpus_compiler_leaves_scatters_in_the_loop_of_microbatches(tmp_path, monkeypatch):
    """It would take the head's out, and add up its gradient whole; libtpu 0.0.41 fails at that."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    config = model.Config(
        vocab=2048, embed=256, layers=2, heads=2, kv_heads=2, head_dim=128, mlp=512,
        dtype=jnp.bfloat16,
    )  # fmt: skip
    whole = plan.Plan(config, topology.chips("v5e:2x4"), 32, 128, (), (), ())
    each = roles.Roles(fsdp=8, microbatches=4, remat=True)
    given = config, arrays.of_decoder(config), whole.chips, 32, 128
    said = compiling.check(planning.candidate(each, *given), whole)
    assert said.fit and said.lowered == sum(s.bytes for s in said.candidate.sent)
    dropped = said.differences.get("dropped", Difference(0, 0, 0))
    assert dropped.written < 100 and said.differences["as written"].static > 8
