import math
import subprocess
import sys

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import mesh


def in_fresh_python(code):
    """Run code where JAX has not yet touched a device; its standard output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_simulate_gives_n_devices_before_the_backend_is_up():
    code = "from shardwise import mesh; mesh.simulate({}); print(len(mesh.devices()))"
    assert in_fresh_python(code.format(3)) == "3"


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
