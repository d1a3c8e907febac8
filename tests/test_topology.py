"""Chips that are not here: their arithmetic, their meshes, and what their compiler says."""

import functools
import importlib.util
import inspect
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sampling import IN_FULL, sample

from shardwise import layouts, marks, measure, rules, topology
from shardwise.layouts import meanings
from shardwise.topology import child, compiling, gpu

needs_libtpu = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"),
    reason="libtpu, the TPU compiler, is not installed: pip install 'shardwise[tpu]'",
)
refuses = pytest.mark.skipif(
    jax.__version_info__ < (0, 8), reason="libtpu 0.0.23 counts temporaries only"
)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))


def sharded(mesh, shape, spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh.abstract, spec))


@pytest.mark.parametrize(
    "name, slices, number, devices",
    [
        ("v5p:4x4x8", 1, 128, 128),
        ("v5e:16x16", 2, 512, 512),
        ("v4:2x2x1", 1, 4, 4),
        ("tpu7x:2x2x2", 1, 8, 16),
        ("h100:16x8", 1, 128, 128),
        ("h100:1x4", 1, 4, 4),
        ("gb200:2x72", 1, 144, 144),
    ],
)
def test_chips_are_counted_not_cores(name, slices, number, devices):
    chips = topology.chips(name, slices)
    assert (chips.number, chips.devices) == (number, devices)
    assert chips == topology.chips(name, slices) and len({chips, topology.chips(name, slices)}) == 1
    assert str(chips).startswith(name)


@pytest.mark.parametrize(
    "name, slices, said",
    [
        ("v9:2x2", 1, "v4, v5e, v5p, v6e, tpu7x, a100, h100, h200, b200, gb200"),
        ("h100:16", 1, "joins the 8 GPUs of a node of h100"),
        ("h100:2x9", 1, "'h100:16x8', or up to 8 of one node, as in 'h100:4'"),
        ("h100:0x8", 1, "nodes and GPUs of each"),
        ("h100:2x2x2", 1, "nodes and GPUs of each"),
        ("h100:8", 2, "topology.chips('h100:8', slices=2): NVLink joins the 8 GPUs"),
        ("v5p:4x4", 1, "3 axes; write its chips along each, as in 2x2x2 or 4x4x4"),
        ("v5e:2x2x2", 1, "2 axes"),
        ("v5e:", 1, "2x2 or 4x4"),
        ("v5e:axb", 1, "2x2 or 4x4"),
        ("v5e:3x4", 1, "the first two sizes are even"),
        ("v5p:4x4x0", 1, "even"),
        ("v5e:16x32", 1, "512 chips; a slice of v5e has 256 at most"),
        ("v5e:2x2", 0, "one slice or more"),
    ],
)
def test_a_name_that_is_wrong_says_what_would_do(name, slices, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        topology.chips(name, slices)


@pytest.mark.parametrize(
    "axes", [{}, {"a": 3}, {"a": 0}, {"a": -1, "b": -1}, {"a": 4}, {"a": -2}, {"a": 3, "b": -1}]
)
def test_axes_multiply_to_the_devices(axes):
    with pytest.raises(ValueError, match=r"8 chips of 2 devices each, mesh\("):
        topology.chips("tpu7x:2x2x2").mesh(**axes)


@given(st.sampled_from([1, 2, 3, 4, 6, 8]), st.lists(st.sampled_from([1, 2, 3, 4, 8]), max_size=3))
def test_slices_are_outermost(slices, sizes):
    """What crosses between slices is a prefix of the axes' product, as the hybrid mesh has it."""
    chips = topology.chips("v5e:2x4", slices)
    rest = chips.devices
    for size in sizes:
        rest //= math.gcd(rest, size)
    axes = {f"a{i}": math.gcd(chips.devices, size) for i, size in enumerate(sizes)}
    if chips.devices % math.prod(axes.values()):
        return
    try:
        mesh = chips.mesh(**axes, last=-1)
    except ValueError as error:
        assert "slices, which cut it unevenly" in str(error)
        return
    parts = mesh.across_slices()
    assert math.prod(parts) == slices
    inside = [size // part for size, part in zip(mesh.shape.values(), parts, strict=True)]
    assert math.prod(inside) == 8
    # Once an axis has a part inside a slice, the next ones lie within it.
    cut = next((i for i, size in enumerate(inside) if size > 1), len(parts))
    assert all(part == 1 for part in parts[cut + 1 :])


def test_a_mesh_has_no_devices_and_auto_axes():
    abstract = topology.chips("v5e:2x4").mesh(data=-1, model=4).abstract
    assert dict(abstract.shape) == {"data": 2, "model": 4}
    assert set(abstract.axis_types) == {AxisType.Auto}


def test_a_chip_has_a_torus_or_is_in_a_node():
    assert all(bool(chip.node) != bool(chip.dimensions) for chip in topology.CHIPS.values())


def test_a_chip_says_its_peak_and_its_rings():
    v7x, v5e, v5p = (topology.CHIPS[kind] for kind in ("tpu7x", "v5e", "v5p"))
    assert v7x.peak() * v7x.devices == dict(v7x.flops)["bfloat16"]
    assert [v5e.is_ring(n) for n in (4, 8, 16)] == [False, False, True]
    assert [v5p.is_ring(n) for n in (2, 4, 6, 8)] == [False, True, False, True]
    assert not topology.CHIPS["h100"].is_ring(8)
    with pytest.raises(ValueError, match="no peak of v4 in float8 is known; known are bfloat16"):
        topology.CHIPS["v4"].peak("float8")


def test_where_libtpu_is_missing_the_error_says_whether_it_can_be_had(monkeypatch):
    monkeypatch.setattr(child.importlib.metadata, "version", _absent)
    for system, machine in (("darwin", "arm64"), ("linux", "aarch64"), ("win32", "AMD64")):
        monkeypatch.setattr(gpu.sys, "platform", system)
        monkeypatch.setattr(gpu.platform, "machine", lambda machine=machine: machine)
        with pytest.raises(ImportError, match=f"does not exist for {system} on {machine}") as said:
            child.versions()
        assert "pip" not in str(said.value)
    monkeypatch.setattr(gpu.sys, "platform", "linux")
    monkeypatch.setattr(gpu.platform, "machine", lambda: "x86_64")
    with pytest.raises(ImportError, match=r"pip install 'shardwise\[tpu\]'"):
        child.versions()


def _absent(name):
    raise child.importlib.metadata.PackageNotFoundError(name)


def test_a_program_is_the_same_whoever_lowers_it():
    """Or a chapter would compile anew what a script has compiled; names of operations are in it."""
    mesh = topology.chips("v5e:2x4").mesh(fsdp=8)
    x = sharded(mesh, (64, 64), P("fsdp"))

    def total(x):
        step = jax.checkpoint(lambda c, _: (jnp.tanh(c @ c.T @ x), None))
        return jax.lax.scan(step, x, None, length=3)[0].sum() + gathered(x).sum()

    @functools.partial(jax.shard_map, mesh=mesh.abstract, in_specs=P("fsdp"), out_specs=P("fsdp"))
    def gathered(x):
        return jax.lax.all_gather(x, "fsdp")[0]

    def here():
        return mesh.lower(jax.jit(jax.grad(total)), x)

    def there():
        return (lambda: here())()

    one, other = here(), there()
    assert one.as_text(debug_info=True) != other.as_text(debug_info=True)
    assert compiling.program_text(one) == compiling.program_text(other)
    assert 'loc("jit(total)/' in compiling.program_text(one)
    assert "#loc" not in compiling.program_text(one)  # or it could not be read back


def test_an_entry_of_the_cache_is_all_there_or_not_at_all(tmp_path):
    made, asked = {"text": "x" * 100}, ([{"a": 1}, {"jax": "1"}], "module")
    assert child.cached(*asked, lambda: made) == child.cached(*asked, dict) == made
    for other in (([{"a": 2}, {"jax": "1"}], "module"), ([{"a": 1}, {"jax": "2"}], "module")):
        assert child.cached(*other, dict) == {}
    assert child.cached(asked[0], "m", dict) == {}
    (file,) = (f for f in (tmp_path / "compiled").iterdir() if "xxx" in f.read_text())
    whole = file.read_text()
    for text in (whole[:50], "[]"):
        file.write_text(text)
        assert child.cached(*asked, lambda: made) == made and file.read_text() == whole


def test_an_array_is_named_as_jax_names_it():
    """HLO escapes the quotes of a tree's path; of a report both forms are read."""
    line = r"""  %p.1 = f32[2]{0} parameter(0), metadata={op_name="p[\'up\']"}"""
    assert compiling._source(line, "p.1") == "p['up']" and compiling._source(line, "p.2") == ""
    assert compiling.total("Memory Space: default (color=0)\nTotal bytes: 12 (12B)\n") == 12
    assert compiling.total("Total bytes used: 34 (34B)\n") is None  # VMEM is in it
    assert compiling.total("Memory Space: vmem (color=1)\nTotal bytes: 56 (56B)\n") is None


def test_what_is_not_lowered_or_for_other_axes_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setattr(child, "run", None)
    ours = topology.chips("v5e:2x4").mesh(data=2, model=4)
    lowered = ours.lower(jax.jit(jnp.sin), sharded(ours, (8, 8), P("data")))
    for other, said in (
        (topology.chips("v5e:4x4").mesh(data=4, model=4), "and not for v5e:4x4, tpu, 16 devices"),
        (topology.chips("v5e:2x4").mesh(data=4, model=2), "8 devices, the mesh {'data': 4,"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            topology.compile(lowered, other)
    with pytest.raises(TypeError, match="takes a lowered program, and got function"):
        topology.compile(lambda x: x, ours)
    with pytest.raises(TypeError, match=r"made by jax\.jit or rules\.jit, and got function"):
        ours.lower(lambda x: x, 1.0)


def program(mesh):
    """A product, laid out by the compiler, a sum by hand, a donated argument, a scan."""

    def fn(x, w, old):
        y = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh.abstract, P("data")))
        total = jax.shard_map(
            lambda a: jax.lax.psum(a, "data"),
            mesh=mesh.abstract,
            in_specs=P("data"),
            out_specs=P(),
        )(y)
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ c.T) @ c, None), total, None, 3)[0], old + 1

    return jax.jit(fn, donate_argnums=2)


def arguments(mesh):
    x = sharded(mesh, (256, 384), P("data", "model"), jnp.bfloat16)
    w = sharded(mesh, (384, 256), P(None, "model"), jnp.bfloat16)
    return x, w, sharded(mesh, (512, 640), P("data"))


@needs_libtpu
def test_a_compiled_program_is_a_value_and_nothing_reaches_the_caller(capfd, monkeypatch):
    mesh = topology.chips("v5e:2x4").mesh(data=2, model=4)
    before = dict(os.environ)
    lowered = mesh.lower(program(mesh), *arguments(mesh))
    first = topology.compile(lowered, mesh)
    assert dict(os.environ) == before
    assert "libtpu.so" not in Path("/proc/self/maps").read_text()
    assert capfd.readouterr() == ("", "")
    sizes = first.memory_analysis()
    assert sizes.argument_size_in_bytes == 2 * 128 * 96 + 2 * 384 * 64 + 4 * 256 * 640
    assert sizes.alias_size_in_bytes == 4 * 256 * 640
    assert "is_scheduled=true" in first.as_text()
    fit = measure.fits(first)
    assert fit and fit.allowed == mesh.chips.chip.usable_hbm
    held = fit.memory.arguments + fit.memory.outputs - fit.memory.aliased
    assert held <= fit.needed < held + fit.memory.temporaries + 2**20  # padded, and some beside
    if first.hbm_bytes is None:  # libtpu 0.0.23
        assert fit.needed == fit.memory.total
    else:
        assert str(fit.needed) in first.report
    assert {b.source for b in fit.buffers if b.kind == "argument"} == {"x", "w", "old"}
    held = sum(b.bytes for b in fit.buffers if b.kind == "argument")
    assert held == sizes.argument_size_in_bytes
    temporaries = [b.bytes for b in fit.buffers if b.kind == "temporary"]
    assert max(temporaries) <= max(sizes.temp_size_in_bytes, 4096)  # scalars have 512 bytes each
    monkeypatch.setattr(child, "run", None)  # From here on, only what is kept.
    again = topology.compile(mesh.lower(program(mesh), *arguments(mesh)), mesh)
    assert again == first and hash(again) == hash(first)
    with pytest.raises(TypeError):
        topology.compile(lowered, mesh, options={"xla_tpu_enable_latency_hiding_scheduler": True})


@needs_libtpu
def test_a_failure_says_what_the_compiler_said():
    mesh = topology.chips("v5e:2x4").mesh(x=8)
    lowered = mesh.lower(jax.jit(jnp.sin), sharded(mesh, (8,), P("x")))
    with pytest.raises(RuntimeError, match=r"for v5e:2x4 (?s:.*)xla_no_such_option"):
        topology.compile(lowered, mesh, options={"xla_no_such_option": True})


PUBLIC = """
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import jax, jax.numpy as jnp
{functions}
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
class OnDevices:
    abstract = Mesh(
        mesh_utils.create_device_mesh((2, 4), devices=devices),
        ("data", "model"),
        axis_types=(AxisType.Auto,) * 2,
    )
compiled = program(OnDevices).lower(*arguments(OnDevices)).compile()
sizes = compiled.memory_analysis()
print(sizes.temp_size_in_bytes, sizes.output_size_in_bytes)
print(compiled.as_text())
"""


SOURCE = sharded, program, arguments


@needs_libtpu
@pytest.mark.slow
def test_it_is_what_jax_itself_compiles_where_the_devices_are_known():
    """The same program by JAX's public functions alone, in a process that loads libtpu."""
    mesh = topology.chips("v5e:2x4").mesh(data=2, model=4)
    ours = topology.compile(mesh.lower(program(mesh), *arguments(mesh)), mesh)
    code = PUBLIC.format(functions="\n".join(map(inspect.getsource, SOURCE)))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **child._QUIET},
        capture_output=True,
        text=True,
        check=True,
    )
    sizes, _, text = done.stdout.partition("\n")
    said = ours.memory_analysis()
    assert sizes == f"{said.temp_size_in_bytes} {said.output_size_in_bytes}"
    assert _bare(text) == _bare(ours.as_text())


def _bare(text):
    """Instructions without where they were written, and the names that come from it."""
    text = re.sub(r', metadata=\{(?:[^{}"]|"[^"]*")*\}', "", text)
    text = re.sub(r"(?ms)^(FileNames|FunctionNames|FileLocations|StackFrames)\n.*?\n\n", "", text)
    return [line.rstrip() for line in text.splitlines() if line.strip()]


@needs_libtpu
@pytest.mark.parametrize(
    "name, slices, axes",
    [
        ("v5p:4x4x8", 1, dict(fsdp=32, b=4)),
        pytest.param("v5e:4x4", 2, dict(fsdp=8, b=4), marks=pytest.mark.slow),
        pytest.param("v4:2x2x2", 1, dict(fsdp=8), marks=pytest.mark.slow),
    ],
)
def test_axes_are_laid_along_the_torus(name, slices, axes):
    mesh, compiled = made_by_rules(name, slices, **axes)
    places = np.array(compiled.coordinates).reshape(*axes.values(), -1)
    assert len(set(compiled.coordinates)) == mesh.chips.devices
    numbers = places[..., -1].reshape(-1)  # of slices
    assert sorted(numbers) == list(numbers) and set(numbers) == set(range(slices))
    # Neighbours along the last axis are one link apart.
    steps = np.abs(np.diff(places[..., :-2], axis=-2)).sum(-1)
    assert steps.max() == 1 or mesh.chips.shape[-1] == 2


@needs_libtpu
@pytest.mark.slow
def test_a_refusal_has_both_totals_and_the_largest_arrays(monkeypatch):
    mesh = topology.chips("v5e:2x4").mesh(x=8)
    size = 92160  # an array that alone is a little less than the memory

    def fn(x):
        with jax.named_scope("layer"):
            return jnp.tanh(x @ x.T) @ x

    lowered = mesh.lower(jax.jit(fn), sharded(mesh, (size, size), P(None, "x"), jnp.bfloat16))
    with pytest.raises(topology.DoesNotFit, match="GiB of HBM on a device") as refused:
        topology.compile(lowered, mesh)
    error, buffer = refused.value, refused.value.buffers[0]
    # Told to a hundredth of a GiB; libtpu 0.0.23 counts temporaries only.
    held = 2 * size * size + (4 * size * size // 8 if jax.__version_info__ >= (0, 8) else 0)
    assert error.needed >= held - 2**30 // 100 > error.allowed
    assert error.allowed == mesh.chips.chip.usable_hbm
    fit = measure.fits(error)
    assert not fit and (fit.needed, fit.allowed) == (error.needed, error.allowed)
    assert fit.buffers == error.buffers and "does not fit" in repr(fit)
    assert (buffer.bytes, buffer.kind) == (2 * size * size, "temporary")
    assert "layer/dot_general" in buffer.source
    assert {b.source for b in error.buffers if b.kind == "argument"} == {"x"}
    monkeypatch.setattr(child, "run", None)
    with pytest.raises(topology.DoesNotFit) as again:
        topology.compile(lowered, mesh)
    assert str(again.value) == str(error)


NAMES = """
from jax.experimental import topologies
for name in ("v4:2x2x1", "v5e:2x4", "v5p:2x2x1", "v6e:2x4", "tpu7x:2x2x1"):
    print(topologies.get_topology_desc(name, "tpu").devices[0].device_kind)
"""


@needs_libtpu
@pytest.mark.slow
def test_a_tpu_is_known_by_the_name_that_jax_has_for_it():
    done = subprocess.run(
        [sys.executable, "-c", NAMES], capture_output=True, text=True, env=os.environ | child._QUIET
    )
    found = [topology.of_device(name) for name in done.stdout.splitlines()]
    known = [chip.kind for chip in found if chip]
    assert known == ["v4", "v5e", "v5p", "v6e", "tpu7x"][: len(found)] and len(found) >= 4, done
    assert topology.of_device("cpu") is None and topology.of_device("NVIDIA H100 PCIe") is None


@refuses
@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", sample([k for k, c in topology.CHIPS.items() if c.dimensions], 1))
def test_the_usable_hbm_is_where_programs_begin_to_be_refused(kind):
    """Arguments and results of 1/2000 less compile, of 1/2000 more do not."""
    chip = topology.CHIPS[kind]
    mesh = topology.chips(f"{kind}:{'x'.join(['2'] * chip.dimensions)}").mesh(x=-1)

    def attempt(share):
        rows = int(chip.usable_hbm * share / 2 / 4096) // 8 * 8
        x = sharded(mesh, (rows * mesh.chips.devices, 1024), P("x"))
        return topology.compile(mesh.lower(jax.jit(lambda x: x + 1), x), mesh)

    assert attempt(1 - 1 / 2000).memory_analysis().argument_size_in_bytes
    with pytest.raises(topology.DoesNotFit):
        attempt(1 + 1 / 2000)


def doubled(mesh):
    """A function jitted by rules, lowered, that donates its only argument."""
    tree = {"w": jax.ShapeDtypeStruct((1024, 4096), jnp.float32)}
    jitted = rules.jit(
        lambda tree: jax.tree.map(lambda x: x * 2, tree),
        mesh.abstract,
        in_rules=rules.FSDPRule("fsdp"),
        out_rules=rules.FSDPRule("fsdp"),
        donate_argnums=0,
    )
    return mesh.lower(jitted, tree)


@functools.cache
def made_by_rules(name, slices, **axes):
    """(the mesh, the program of `doubled` compiled for it)."""
    mesh = topology.chips(name, slices).mesh(**axes)
    return mesh, topology.compile(doubled(mesh), mesh)


def test_rules_jit_is_lowered_for_a_mesh_without_devices():
    text = doubled(topology.chips("v5p:4x4x8").mesh(fsdp=128)).as_text()
    assert "mhlo.num_partitions = 128" in text and text.count('{"fsdp"}') >= 2
    assert "tf.aliasing_output" in text or "jax.buffer_donor" in text


@needs_libtpu
def test_rules_jit_compiles_on_abstract_arrays():
    sizes = made_by_rules("v5p:4x4x8", 1, fsdp=32, b=4)[1].memory_analysis()
    assert sizes.argument_size_in_bytes == sizes.alias_size_in_bytes == 4 * 1024 * 4096 // 32


@needs_libtpu
@pytest.mark.slow
@pytest.mark.skipif(not IN_FULL, reason="half a minute of the compiler's: make stacks runs it")
def test_what_waits_on_the_host_takes_no_hbm():
    """Of sixteen layers two are entered from HBM; a JAX that loses the host's part says so."""
    mesh = topology.chips("v5e:2x4").mesh(x=-1)
    layers, rows, size = 16, 8 * 8192, 1024
    x = sharded(mesh, (rows, size), P("x"), jnp.bfloat16)
    w = sharded(mesh, (layers, size, size), P(), jnp.bfloat16)
    needed = []
    for policy in (jax.checkpoint_policies.nothing_saveable, layouts.offload):
        layer = meanings.Remat(policy)(lambda x, w: (jnp.tanh(x @ w) @ w.T, None))

        def mean(w, x, layer=layer):
            return jnp.mean(jax.lax.scan(layer, x, w)[0].astype(jnp.float32))

        try:
            lowered = mesh.lower(jax.jit(jax.grad(mean)), w, x)
        except NotImplementedError as error:
            assert policy is layouts.offload and "leaves that out" in str(error)
            return
        needed.append(measure.fits(topology.compile(lowered, mesh)).needed)
    entering = rows // 8 * size * 2
    assert needed[0] - needed[1] > (layers - 4) * entering


@pytest.mark.slow
@needs_libtpu
def test_a_layout_with_stages_compiles_as_any_other():
    """Two rings turn at each tick, asynchronously, and no task passes anything round."""

    def loss(params, batch):
        x = marks.stage_boundary(batch @ params["a"]) @ params["b"]
        return jnp.mean(x)

    mesh = topology.chips("v5e:2x2").mesh(stage=2, fsdp=2)
    layout = layouts.Layout(mesh.abstract, stage="stage", fsdp="fsdp", microbatches=4)
    shapes = {name: jax.ShapeDtypeStruct((512, 512), jnp.bfloat16) for name in "ab"}
    tx = optax.sgd(1e-3)
    params, state = jax.tree.map(
        lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to),
        (shapes, jax.eval_shape(tx.init, shapes)),
        layouts.shardings(layout, shapes, tx),
    )
    rows = NamedSharding(mesh.abstract, P("fsdp"))
    batch = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=rows)
    step = mesh.lower(layouts.step(layout, loss, tx, check=False), params, state, batch)
    found = measure.collectives(topology.compile(step, mesh))
    rings = [op for op in found.ops if op.kind == "collective-permute"]
    ticks = 3 * (4 + 2 - 1)
    assert len(rings) == 2 and all(op.trips == ticks and op.asynchronous for op in rings)
    assert sum(op.ring_bytes for op in rings) == ticks * 2 * (512 // 2 // 4) * 512 * 2
    assert not any("turns" in op.source for op in rings)
