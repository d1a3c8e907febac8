import fnmatch
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import mesh
from shardwise.processes import system


def in_fresh_python(code):
    """Run code where JAX has not yet touched a device; its standard output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


ROOT = Path(__file__).parent.parent
SIMULATE = "from shardwise import mesh; mesh.simulate(8); assert len(mesh.devices()) == 8"
TRAIN = "import sys; from shardwise.__main__ import main; sys.exit(main(['train', '--help']))"
MISTAKE = """
import contextlib, io
from shardwise import __main__ as command
with contextlib.redirect_stderr(io.StringIO()):  # what the command itself says
    assert command.main(['train', '--processes.count', '2']) == 1
"""


def first_cell():
    """Of a chapter, as a notebook runs it where JAX_PLATFORMS is not set."""
    notebook = json.loads((ROOT / "chapters/device_meshes.ipynb").read_text())
    cell = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    return re.sub("%pip .*", "pass", "".join(cell["source"]))


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(SIMULATE, id="simulate"),
        pytest.param(first_cell(), id="cell", marks=pytest.mark.slow),
        pytest.param(TRAIN, id="train", marks=pytest.mark.slow),
        pytest.param(MISTAKE, id="mistake", marks=pytest.mark.slow),
    ],
)
def test_libtpu_without_a_tpu_says_nothing(code):
    unset = {key: os.environ[key] for key in os.environ if key != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=unset)
    said = [line for line in done.stderr.splitlines() if not line.startswith("WARNING:absl:Grain")]
    assert (done.returncode, said) == (0, [])


@pytest.mark.parametrize(
    ("asked", "installed", "files", "expected"),
    [
        (None, {"libtpu"}, [], "cpu"),
        ("", {"libtpu"}, [], "cpu"),
        (None, set(), [], None),
        (None, {"libtpu"}, ["/dev/accel0"], None),
        (None, {"libtpu"}, ["/dev/vfio/0"], None),
        (None, {"libtpu", "jax_plugins"}, [], None),
        ("tpu,cpu", {"libtpu"}, [], "tpu,cpu"),
    ],
)
def test_only_a_compiler_without_a_chip_makes_cpu_the_one_platform(
    monkeypatch, asked, installed, files, expected
):
    """Where there may be a TPU or a GPU, or somebody chose, JAX looks for itself."""
    before = jax.config.jax_platforms
    jax.devices()  # the backend is up from here on, and only what would be asked of it changes
    monkeypatch.setattr(mesh.util, "find_spec", lambda name: name in installed or None)
    monkeypatch.setattr(mesh.metadata, "entry_points", lambda group: ())
    monkeypatch.setattr(
        mesh.glob, "glob", lambda pattern: [f for f in files if fnmatch.fnmatch(f, pattern)]
    )
    try:
        jax.config.update("jax_platforms", asked)
        mesh.simulate(8)
        assert jax.config.jax_platforms == expected
    finally:
        jax.config.update("jax_platforms", before)


def test_simulate_too_late_says_what_to_do():
    jax.devices()  # the backend is up from here on
    with pytest.raises(RuntimeError, match=r"simulate\(9\).*8 CPU device.*Restart Python"):
        mesh.simulate(9)


def test_simulate_needs_a_device():
    with pytest.raises(ValueError, match=r"simulate\(0\).*at least one"):
        mesh.simulate(0)


def test_simulate_can_be_called_again_for_fewer():
    jax.devices()  # the backend is up from here on
    try:
        mesh.simulate(4)
        assert mesh.devices() == jax.devices()[:4]
        assert mesh.make(data=-1).shape == {"data": 4}
    finally:
        mesh.simulate(8)
    assert mesh.devices() == jax.devices()


def test_simulate_takes_the_first_cpu_device_as_default_where_accelerators_are_too_few(monkeypatch):
    jax.devices()  # the backend is up from here on
    try:
        with monkeypatch.context() as patch:
            patch.setattr(jax, "default_backend", lambda: "gpu")
            patch.setattr(jax, "local_device_count", lambda: 1)
            mesh.simulate(4)
        assert jax.config.jax_default_device == jax.devices("cpu")[0]
        assert mesh.devices() == jax.devices("cpu")[:4]
    finally:
        mesh.simulate(8)
    assert jax.config.jax_default_device is None


@given(st.data())
def test_make_resolves_every_factorisation(draw):
    devices = len(mesh.devices())
    names = draw.draw(st.permutations(["data", "fsdp", "model"]))
    first = draw.draw(st.sampled_from([1, 2, 4, 8]))
    second = draw.draw(st.sampled_from([n for n in (1, 2, 4, 8) if first * n <= devices]))
    rest = devices // (first * second)
    sizes = dict(zip(names, (first, second, rest), strict=True))
    hidden = draw.draw(st.sampled_from(names))
    made = mesh.make(**{**sizes, hidden: -1})
    assert dict(made.shape) == sizes
    assert made.axis_names == tuple(names)
    assert list(made.devices.flat) == mesh.devices()
    assert set(made.axis_types) == {jax.sharding.AxisType.Auto}


def test_make_may_use_fewer_devices():
    made = mesh.make(data=2, model=3)
    assert math.prod(made.shape.values()) == 6
    assert list(made.devices.flat) == mesh.devices()[:6]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"data": 3, "model": -1}, r"data=3, model=-1.*8 devices.*3, which must divide 8"),
        ({"data": 16}, r"data=16.*8 devices.*16, which must be at most 8"),
        ({"data": -1, "model": -1}, r"data=-1, model=-1.*at most one -1"),
        ({"data": 0}, r"data=0.*positive"),
        ({}, "at least one axis"),
    ],
)
def test_make_says_what_does_not_fit(axes, message):
    with pytest.raises(ValueError, match=message):
        mesh.make(**axes)


def test_accelerators_are_taken_however_few_where_real_ones_are_asked_for(monkeypatch):
    """Two, of a platform that is said to be one; without any, devices are simulated."""
    mesh.simulate(8)
    two = jax.devices()[:2]
    monkeypatch.setattr(mesh, "_devices", None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_device_count", lambda: len(two))
    of_gpus = lambda backend=None: two if backend == "gpu" else two * 4  # noqa: E731
    monkeypatch.setattr(jax, "local_devices", of_gpus)
    monkeypatch.setattr(jax, "devices", of_gpus)
    mesh.simulate(8, real=True)
    assert mesh.devices() == two
    mesh.simulate(8)
    assert len(mesh.devices()) == 8
    jax.config.update("jax_default_device", None)


@pytest.mark.parametrize(
    "where, devices, taken",
    [
        ((None, None, None), None, (8, True)),
        ((None, None, None), 4, (4, False)),
        (("10.0.0.7:1234", 2, 0), None, (4, True)),
        (("127.0.0.1:1234", 2, 0), None, (4, False)),
        (("127.0.0.1:1234", 2, 0), 2, (1, False)),
    ],
)
def test_processes_of_one_machine_do_not_each_take_its_accelerators(
    monkeypatch, where, devices, taken
):
    asked, told = [], {}
    for name in ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(system, "_initialize", lambda options: None)
    monkeypatch.setattr(jax.config, "update", told.__setitem__)  # the backend is up already
    monkeypatch.setattr(mesh, "simulate", lambda n, real: asked.append((n, real)))
    system.join(*where, devices=devices)
    assert asked == [taken]
    of_one_machine = where[0] is not None and where[0].startswith("127.")
    assert (told.get("jax_platforms") == "cpu") == (of_one_machine and devices is None)


def test_eight_simulated_devices_do_not_divide_among_three_processes(monkeypatch):
    monkeypatch.setattr(jax.config, "update", lambda *given: None)
    with pytest.raises(ValueError, match="8 devices do not divide among 3 processes"):
        system.join("127.0.0.1:1234", 3, 0, devices=None)


@pytest.mark.parametrize("n", [1, 3])
def test_simulate_gives_n_devices_and_no_cache_whose_collectives_stand_still(n):
    """Before the backend is up. Most runs that found a step of several devices there hung."""
    code = f"from shardwise import mesh; mesh.simulate({n}); "
    code += "import jax; print(len(mesh.devices()), jax.config.jax_enable_compilation_cache)"
    assert in_fresh_python(code) == f"{n} {n == 1}"
