"""GPUs that are not here: their nodes, and what XLA's compiler for them says."""

import importlib.metadata
import math
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sampling import marked

from shardwise import layouts, measure, model, topology
from shardwise.plan import links
from shardwise.topology import __name__ as package
from shardwise.topology import child, gpu


def _found():
    try:
        return gpu.find()
    except ImportError:
        return None


needs_compiler = pytest.mark.skipif(
    not _found(), reason=f"XLA's compiler for GPUs is not installed: python -m {package}"
)
H100 = topology.CHIPS["h100"]
SHARES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    for name in SHARES:
        monkeypatch.delenv(name, raising=False)


def sharded(mesh, shape, *spec, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh.abstract, P(*spec)))


def test_a_program_may_hold_what_jax_takes_of_a_gpu(monkeypatch):
    chips = topology.chips("h100:2x8")
    assert chips.usable_hbm == H100.hbm_bytes * 3 // 4
    for name, said in zip(SHARES, (".9", "9e-1"), strict=True):
        with monkeypatch.context() as patch:
            patch.setenv(name, said)
            assert chips.usable_hbm == int(H100.hbm_bytes * 0.9)
    monkeypatch.setenv(SHARES[0], "")  # as unset
    assert chips.usable_hbm == H100.hbm_bytes * 3 // 4
    assert topology.chips("v5e:2x2").usable_hbm == topology.CHIPS["v5e"].usable_hbm
    for wrong in ("most", "0", "-1", "nan", "inf"):
        monkeypatch.setenv(SHARES[0], wrong)
        with pytest.raises(ValueError, match=r"FRACTION=.*expected the share of a GPU's memory"):
            _ = chips.usable_hbm


def test_nodes_are_outermost():
    mesh = topology.chips("h100:4x8").mesh(data=2, fsdp=4, tensor=4)
    assert mesh.across_slices() == (2, 2, 1)
    with pytest.raises(ValueError, match="lies along 6 nodes, which cut it unevenly"):
        topology.chips("h100:6x8").mesh(stage=4, fsdp=-1)


def test_a_switch_gives_each_gpu_its_bandwidth_whoever_takes_part():
    """By hand: half of a node as a group, beside the other half; four nodes, rails apart."""
    chips, sent = topology.chips("h100:4x8"), 7e9
    ways = links.lay(chips, (("data", 8), ("fsdp", 4)))
    assert [(way.inside, way.across) for way in ways.values()] == [(4, 1), (2, 4)]
    inside, both = ways["fsdp"], ways["data"]
    assert links.ring_seconds(H100, [inside], sent) == pytest.approx(sent / 450e9)
    assert links.hop_seconds(H100, inside, sent) == pytest.approx(sent / 450e9)
    assert links.exchange_seconds(H100, inside, sent) == pytest.approx(sent / 450e9)
    whole = sent * 8 / 7
    within, between = whole / 2 / 450e9, whole / 2 * 3 / 4 / 50e9
    assert links.ring_seconds(H100, [both], sent) == pytest.approx(within + between)
    away = sent / 7  # to each of the others: one in the node, six beyond
    exchanged = away / 450e9 + 6 * away / 50e9
    assert links.exchange_seconds(H100, both, sent) == pytest.approx(exchanged)
    assert links.hop_seconds(H100, both, sent) == pytest.approx(sent / 50e9)
    # Two roles in one node share its switch: 8 GPUs, no more bandwidth than 4 have.
    pair = links.lay(topology.chips("h100:8"), (("data", 2), ("fsdp", 4))).values()
    assert links.ring_seconds(H100, pair, sent) == pytest.approx(sent / 450e9)
    assert str(both) == "4 nodes, 2 devices of each"


def test_where_the_compiler_is_missing_one_command_installs_it(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "folder", lambda: tmp_path)
    monkeypatch.setattr(gpu, "_installed", lambda: ())
    monkeypatch.setattr(gpu.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(gpu.sys, "platform", "linux")
    with pytest.raises(ImportError, match=r"no CUDA\. Install it .* -m shardwise\.topology$"):
        gpu.find()
    jaxlib = importlib.metadata.version("jaxlib")
    packages = f"jax-cuda12-pjrt=={jaxlib}", "nvidia-cuda-nvcc-cu12"
    assert gpu.command()[-3:] == [str(tmp_path), *packages]
    monkeypatch.setattr(gpu.platform, "machine", lambda: "aarch64")
    with pytest.raises(ImportError, match="does not exist for linux on aarch64"):
        gpu.find()


def test_a_compiler_of_another_jaxlib_is_none(monkeypatch, tmp_path):
    """Else an update of JAX alone would compile by one that does not know its programs."""
    monkeypatch.setattr(gpu, "folder", lambda: tmp_path)
    monkeypatch.setattr(gpu, "_installed", lambda: ())
    for version, found in (("0.1", False), (importlib.metadata.version("jaxlib"), True)):
        info = tmp_path / f"jax_cuda12_pjrt-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: jax-cuda12-pjrt\nVersion: {version}\n")
        library = tmp_path / "jax_plugins/xla_cuda12/xla_cuda_plugin.so"
        library.parent.mkdir(parents=True, exist_ok=True)
        library.touch()
        if found:
            assert gpu.find() == (library, f"jax-cuda12-pjrt {version}")
        else:
            with pytest.raises(ImportError):
                gpu.find()


@pytest.mark.slow
def test_the_installer_hands_pip_its_options(tmp_path):
    """From an empty folder of packages, so that no network is asked."""
    options = ["--no-index", "--find-links", str(tmp_path)]
    command = [sys.executable, "-m", "shardwise.topology", *options]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode != 0 and "No matching distribution found for jax-cuda12" in ran.stderr


def gathered(mesh):
    """The gradient of FSDP by hand, nodes × GPUs: weights are gathered over all, sums scattered."""

    def loss(w, x):
        whole = jax.lax.all_gather(w, ("data", "fsdp"), tiled=True)
        return jax.lax.psum(jnp.sum(jax.nn.relu(x @ whole) ** 2), ("data", "fsdp"))

    cut = P(("data", "fsdp"))
    mean = jax.shard_map(loss, mesh=mesh.abstract, in_specs=(cut, cut), out_specs=P())
    return jax.jit(jax.grad(mean))


@needs_compiler
def test_what_is_written_is_what_gpus_get():
    """A scatter stays a scatter, and bfloat16 bfloat16; with nothing to run beside, they wait.

    Versions stand beside what was compiled.
    """
    mesh = topology.chips("h100:2x8").mesh(data=2, fsdp=8)
    size, n = 4096, 16
    w, x = (sharded(mesh, (rows, size), ("data", "fsdp")) for rows in (size, 8192))
    compiled = topology.compile(mesh.lower(gathered(mesh), w, x), mesh)
    found = measure.collectives(compiled)
    assert {op.kind for op in found.ops} == {"all-gather", "reduce-scatter"}
    for op in found.ops:
        assert not op.asynchronous and op.group_size == n and op.trips == 1
        assert op.ring_bytes == 2 * size * size * (n - 1) // n
    assert measure.flops(compiled) == 2 * 2 * 8192 // n * size * size
    assert compiled.coordinates[:9] == (*((i, 0) for i in range(8)), (0, 1))
    held = compiled.memory_analysis()
    assert held.argument_size_in_bytes == 2 * (size + 8192) // n * size
    assert (
        compiled.buffers[0].bytes == 2 * size * size and "all_gather" in compiled.buffers[0].source
    )
    # Both over nodes: each GPU's part of what its node has goes through its own network card.
    told = measure.overlap(compiled, H100)
    whole = 2 * size * size
    assert told.seconds == pytest.approx(2 * (whole * 7 / 8 / 450e9 + whole / 8 / 2 / 50e9))
    versions = child.versions(H100)
    assert re.fullmatch(r"jax-cuda1\d-pjrt [\d.]+", versions["compiler"])
    assert versions["jax"] == jax.__version__ and "libtpu" not in versions
    # Compiled once: the second time it is read back, with another share of memory too.
    assert topology.compile(mesh.lower(gathered(mesh), w, x), mesh) == compiled


@needs_compiler
def test_more_than_jax_takes_of_a_gpu_is_refused(monkeypatch):
    mesh = topology.chips("h100:8").mesh(x=8)
    x = sharded(mesh, (90_112, 8192), "x")
    lowered = mesh.lower(jax.jit(lambda x: jnp.tanh(x @ x.T) @ x), x)
    monkeypatch.setenv(SHARES[0], "0.01")
    with pytest.raises(topology.DoesNotFit, match=r"and JAX takes 0\.79") as refused:
        topology.compile(lowered, mesh)
    assert refused.value.needed > refused.value.allowed == topology.chips("h100:8").usable_hbm
    assert not measure.fits(refused.value) and refused.value.buffers
    monkeypatch.delenv(SHARES[0])
    fit = measure.fits(topology.compile(lowered, mesh))
    assert fit and fit.needed == refused.value.needed


SIZES = [dict(data=2, fsdp=4), dict(fsdp=8), dict(fsdp=4, context=2), dict(data=4, context=2)]


@needs_compiler
@pytest.mark.parametrize("sizes", marked(SIZES, [], 1), ids=str)
def test_a_layout_by_hand_sends_on_gpus_what_predict_says(sizes):
    """The compiled training step of a decoder: nothing is inserted, and nothing widened."""
    config = model.Config(
        vocab=512, embed=256, layers=2, heads=4, kv_heads=2, head_dim=64, mlp=512,
        dtype=jnp.bfloat16, remat=True,
    )  # fmt: skip
    mesh = topology.chips("h100:8").mesh(**sizes)
    layout = layouts.Layout(mesh.abstract, **{role: role for role in sizes}, dtype=jnp.bfloat16)
    graphdef = nnx.split(nnx.eval_shape(lambda: model.Decoder(config, nnx.Rngs(0))))[0]
    tx = optax.sgd(1e-3)

    def create(key):
        return nnx.state(model.Decoder(config, nnx.Rngs(key)))

    def loss(params, batch):
        return model.loss(params, batch, graphdef=graphdef)

    params = jax.eval_shape(create, jax.random.key(0))
    placed = jax.tree.map(
        lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to),
        (params, jax.eval_shape(tx.init, params)),
        layouts.shardings(layout, params, tx),
    )
    spec = P(*(entry or None for entry in (layout.rows, layout.context)))
    to = NamedSharding(mesh.abstract, spec)
    ints, floats = (
        jax.ShapeDtypeStruct((16, 512), dtype, sharding=to) for dtype in (jnp.int32, jnp.float32)
    )
    batch = {"tokens": ints, "targets": ints, "mask": floats}
    step = mesh.lower(layouts.step(layout, loss, tx, check=False), *placed, batch)
    found = measure.collectives(topology.compile(step, mesh))
    predicted = layouts.predict(layout, params, batch, tx, remat=True)
    sent = sum(predicted.sent.values())
    if "context" in sizes:
        # It takes K and V around once for a layer done again and its backward pass, on two devices,
        # and narrows what the last hop of their gradients sends.
        assert 0.8 * sent < found.ring_bytes < sent
    else:
        assert math.isclose(found.ring_bytes, sent, rel_tol=1e-5)  # but for a few scalars
    if sizes == dict(fsdp=8):
        assert any(op.asynchronous and op.kind == "all-gather" for op in found.ops)


def test_a_program_of_another_platform_is_refused():
    """It would run the other's branches."""
    branches = jax.jit(
        lambda x: jax.lax.platform_dependent(x, tpu=jnp.sin, cuda=jnp.cos, default=jnp.tanh)
    )
    gpus, tpus = topology.chips("h100:8").mesh(x=8), topology.chips("v5e:2x4").mesh(x=8)
    x = sharded(gpus, (8,), "x")
    assert "cosine" in gpus.lower(branches, x).as_text()
    assert "sine" in tpus.lower(branches, x).as_text()
    for lowered, platform, mesh in (
        (tpus.lower(branches, x), "tpu", gpus),
        (gpus.lower(branches, x), "cuda", tpus),
        (branches.trace(x).lower(lowering_platforms=("cpu",)), "another platform", gpus),
    ):
        with pytest.raises(ValueError, match=f"lowered for {platform}, .* not for {mesh.chips}, "):
            topology.compile(lowered, mesh)
    with pytest.raises(TypeError, match=r"made by flax\.nnx"):
        gpus.lower(nnx.jit(jnp.sin), x)


@needs_compiler
def test_what_calls_cuda_s_libraries_is_named():
    mesh = topology.chips("b200:1").mesh(x=1)
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh.abstract, P()))
    with pytest.raises(ValueError, match=r"(?i)calls cusolver\w*, of CUDA's own libraries"):
        topology.compile(mesh.lower(jax.jit(jnp.linalg.cholesky), x), mesh)


SENT = """HloModule m, is_scheduled=true, num_partitions=16

%sum (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %c = bf16[] add(%a, %b)
}

%scattered (p: bf16[4096,4096]) -> bf16[512,4096] {
  %p = bf16[4096,4096] parameter(0)
  ROOT %s = bf16[512,4096] reduce-scatter(%p), GROUPS, dimensions={0}, to_apply=%sum
}

ENTRY %main (x: bf16[4096,4096]) -> bf16[512,4096] {
  %x = bf16[4096,4096] parameter(0)
  %q = ((bf16[4096,4096]), bf16[4096,4096]) collective-permute-start(%x), source_target_pairs=PAIRS
  %r = bf16[4096,4096] collective-permute-done(%q)
  %e = bf16[4096,4096] all-to-all(%r), GROUPS, dimensions={0}
  %t = ((bf16[4096,4096]), bf16[512,4096]) async-start(%e), calls=%scattered, backend_config=CONFIG
  ROOT %d = bf16[512,4096] async-done(%t)
}
"""


@pytest.mark.parametrize("waits", ["true", "false"])
@pytest.mark.parametrize("apart", [False, True], ids=["in a node", "between nodes"])
def test_seconds_follow_the_nodes_of_a_collective(waits, apart):
    """By hand: eight GPUs of one node, or every second of two nodes; 32 MiB each."""
    first = range(0, 16, 2) if apart else range(8)
    groups = [list(first), [i for i in range(16) if i not in first]]
    text = "{" + ",".join("{" + ",".join(map(str, g)) + "}" for g in groups) + "}"
    pairs = "{{0,8},{8,0}}" if apart else "{{0,1},{1,0}}"
    program = SENT.replace("GROUPS", f"replica_groups={text}").replace("PAIRS", pairs)
    config = f'{{"collective_backend_config":{{"is_sync":{waits}}}}}'
    told = measure.overlap(program.replace("CONFIG", config), H100).found
    seconds = {b.op.kind: b.seconds for b in told}
    size = 2 * 4096 * 4096
    if apart:
        expected = {
            "collective-permute": size / 50e9,
            "all-to-all": size * 3 / 8 / 450e9 + size * 4 / 8 / 50e9,
            "reduce-scatter": size * 3 / 4 / 450e9 + size / 4 / 2 / 50e9,
        }
    else:
        expected = {"collective-permute": size / 450e9}
        expected |= dict.fromkeys(["all-to-all", "reduce-scatter"], size * 7 / 8 / 450e9)
    assert seconds == pytest.approx(expected)
    (scatter,) = [b.op for b in told if b.op.kind == "reduce-scatter"]
    assert scatter.asynchronous == (waits == "false")
