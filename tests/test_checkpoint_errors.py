import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import checkpoint, mesh
from shardwise.checkpoint import matching

EIGHT = NamedSharding(mesh.make(a=8), P("a"))


@pytest.fixture
def root(tmp_path):
    yield str(tmp_path / "run")
    checkpoint.wait()


@pytest.fixture
def saved(root):
    state = {
        "params": {"blocks": {"q": jnp.ones((8, 4)), "k": jnp.ones((8, 2))}, "head": jnp.ones(3)},
        "rng": jax.random.key(0),
        "data": {"next_index": 1},
    }
    checkpoint.save(root, 5, state)
    checkpoint.wait()
    return state


@pytest.fixture
def nothing_read(monkeypatch):
    """Orbax's restore fails the test: errors come before any array is read."""

    def read(*args, **kwargs):
        raise AssertionError("arrays were read before the error")

    monkeypatch.setattr("orbax.checkpoint.CheckpointManager.restore", read)


def array(shape, dtype="float32", sharding=None):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


def test_a_missing_directory_is_named_and_not_made(tmp_path, nothing_read):
    with pytest.raises(FileNotFoundError, match=r"no directory .*nowhere; give the one"):
        checkpoint.restore(tmp_path / "nowhere", {"params": jnp.ones(3)})
    assert not (tmp_path / "nowhere").exists()


def test_a_missing_step_is_named_with_those_there_are(root, saved, nothing_read):
    with pytest.raises(FileNotFoundError, match=r"no step 4 is complete.*Complete steps: \[5\]"):
        checkpoint.restore(root, saved, step=4)


def test_an_incomplete_step_is_named_and_never_the_latest(root, saved, tmp_path, nothing_read):
    (tmp_path / "run" / "9.orbax-checkpoint-tmp").mkdir()
    assert checkpoint.latest(root) == 5
    with pytest.raises(FileNotFoundError, match=r"no step 9 .*saving: \['9\.orbax-checkpoint-tmp"):
        checkpoint.restore(root, saved, step=9)
    shutil.rmtree(tmp_path / "run" / "5")
    with pytest.raises(FileNotFoundError, match=r"no step is complete.*steps: none; incomplete"):
        checkpoint.restore(root, saved)


def test_a_step_without_metadata_is_incomplete(root, saved, tmp_path, nothing_read):
    (tmp_path / "run" / "5" / "params" / "_METADATA").unlink()
    with pytest.raises(FileNotFoundError, match=r"step 5 .* incomplete: item 'params' has no meta"):
        checkpoint.restore(root, saved)


def test_another_models_checkpoint_is_told_leaf_by_leaf(root, saved, nothing_read):
    target = {
        "params": {"blocks": {"q": array((8, 5)), "v": array((2,))}, "head": array((3,))},
        "rng": jax.random.key(0, impl="rbg"),
    }
    with pytest.raises(ValueError) as error:
        checkpoint.restore(root, target)
    lines = str(error.value).splitlines()
    assert lines[1:-1] == [
        "  params: blocks/k float32[8, 2] is only in the checkpoint",
        "  params: blocks/q is float32[8, 4] in the checkpoint and float32[8, 5] in the target",
        "  params: blocks/v float32[2] is only in the target",
        "  rng: rng is key<fry>[] in the checkpoint and key<rbg>[] in the target",
    ]
    assert "step 5" in lines[0] and "partial=True" in lines[-1]


def test_a_long_list_of_differences_is_cut(root, nothing_read):
    checkpoint.save(root, 1, {"params": {f"w{i:02}": jnp.ones(2) for i in range(14)}})
    with pytest.raises(ValueError, match=r"w09 [^\n]*\n  and 4 more\n"):
        checkpoint.restore(root, {"params": {f"w{i:02}": array((3,)) for i in range(14)}})


def test_dtypes_are_not_cast(root, saved, nothing_read):
    half = jax.tree.map(lambda x: array(x.shape, "bfloat16"), saved["params"])
    with pytest.raises(
        ValueError, match=r"head is float32\[3\] .* and bfloat16\[3\] in the target"
    ):
        checkpoint.restore(root, {"params": half})


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"ema": jnp.ones(3)}, r"has the items \['data', 'params', 'rng'\], and not \['ema'\]"),
        ({"ema": None}, r"and not \['ema'\]; ask for"),
        ({"rng": None}, "item 'rng' holds arrays; the target has none"),
        ({"data": jnp.ones(3)}, "item 'data' holds plain data; the target has arrays"),
    ],
)
def test_items_that_are_not_there_or_of_another_kind(root, saved, nothing_read, target, message):
    with pytest.raises(ValueError, match=message):
        checkpoint.restore(root, target)


def test_an_uneven_sharding_is_named(root, saved, nothing_read):
    target = {"params": {"head": array((3,), sharding=EIGHT)}}
    with pytest.raises(
        ValueError, match=r"params: head, P.*'a'.* not fit its shape \(3,\).*mesh\."
    ):
        checkpoint.restore(root, target, partial=True)


def test_a_mesh_without_devices_is_named(root, saved, nothing_read):
    sharding = NamedSharding(EIGHT.mesh.abstract_mesh, P("a"))
    target = {"params": {"blocks": {"q": array((8, 4), sharding=sharding)}}}
    with pytest.raises(ValueError, match=r"blocks/q.*is on no devices, and JAX has.*mesh\.make"):
        checkpoint.restore(root, target, partial=True)


def test_devices_that_are_not_there_are_named(root, saved, nothing_read, monkeypatch):
    there = jax.devices()[:4]
    monkeypatch.setattr(matching.jax, "devices", lambda *_: there)
    target = {"params": {"blocks": {"q": array((8, 4), sharding=EIGHT)}}}
    with pytest.raises(ValueError, match=r"blocks/q.*is on \['[^']*4'.*7'\], and JAX has"):
        checkpoint.restore(root, target, partial=True)


@pytest.mark.parametrize(
    ("step", "message"), [(5, "step 5 is saved already.*save 6"), (3, "step 3 is behind step 5")]
)
def test_steps_only_grow(root, saved, step, message):
    with pytest.raises(ValueError, match=message):
        checkpoint.save(root, step, saved)
    assert checkpoint.latest(root) == 5


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([jnp.ones(3)], "the state is a list; expected a dict"),
        ({1: jnp.ones(3)}, "the state is a dict; expected a dict of named"),
        ({"opt_state": ((), ())}, r"nothing to save in the items \['opt_state'\]"),
        ({"data": {"it": object()}}, "item 'data' holds no arrays and is not JSON"),
        ({"params": {"a": {"b": jnp.ones(3)}, "a/b": jnp.ones(3)}}, "has two leaves at a/b; ren"),
        ({"params": {"a": jnp.ones(3), "a/b": jnp.ones(3)}}, "leaf at a and others below it"),
    ],
)
def test_a_state_that_cannot_be_saved_is_named(tmp_path, state, message):
    with pytest.raises(ValueError, match=message):
        checkpoint.save(tmp_path / "run", 1, state)
    assert not (tmp_path / "run").exists()


def test_what_goes_wrong_in_the_background_is_raised_by_wait(root, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr("orbax.checkpoint.PyTreeCheckpointHandler.finalize", full)
        checkpoint.save(root, 1, {"params": {"w": jnp.ones(3)}})
        with pytest.raises(OSError, match="no space left"):
            checkpoint.wait(root)
    assert checkpoint.latest(root) is None
    checkpoint.save(root, 2, {"params": {"w": jnp.ones(3)}})
    checkpoint.wait()
    assert checkpoint.latest(root) == 2
    np.testing.assert_array_equal(
        checkpoint.restore(root, {"params": {"w": jnp.zeros(3)}})["params"]["w"], 1
    )
