import pathlib
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import checkpoint, mesh
from shardwise.checkpoint import restoring

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
    monkeypatch.setattr(restoring.jax, "devices", lambda *_: there)
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
        ({"data": {"it": object()}}, "item 'data' holds no arrays and is not JSON.* at it, of"),
        ({"params": {"a": {"b": jnp.ones(3)}, "a/b": jnp.ones(3)}}, "has leaves at a/b and a/b"),
        ({"params": {"a": jnp.ones(3), "a/b": jnp.ones(3)}}, "leaf at a and others below it"),
        (
            {"params": {"a": {"b": jnp.ones(3)}, "a.b": jnp.zeros(3)}},
            "has leaves at (a/b and a.b|a.b and a/b), which have one name on disk",
        ),
        ({"params": {"w": jnp.ones(3), "act": "gelu"}}, "params: act is 'gelu', of type str and"),
        (
            {"params": {"w": jnp.ones(3), "f": {"g": jnp.sin}}},
            "params: f/g is .*Save the arrays al",
        ),
        ({"params": {"w": np.array(["a", "b"])}}, "params: w is array.* of type ndarray and dtype"),
        ({"params": {"w": np.longdouble(1)}}, "params: w is .* and dtype (float128|longdouble)"),
        ({"params": {"w": 2**70, "x": jnp.ones(3)}}, "params: w is 1180.* of type int and dtype"),
        ({"params": {"w": jnp.zeros((0, 3))}}, r"params: w has the shape \(0, 3\) and no elements"),
        ({"a/b": {"w": jnp.ones(3)}}, "an item cannot be named 'a/b'.* no slashes"),
        ({"a\\b": {"w": jnp.ones(3)}}, r"an item cannot be named 'a\\\\b'"),
        ({"a\0b": {"w": jnp.ones(3)}}, r"an item cannot be named 'a\\x00b'"),
        ({"..": {"w": jnp.ones(3)}}, r"an item cannot be named '\.\.'.* no dot in front"),
        ({"": {"w": jnp.ones(3)}}, "an item cannot be named ''"),
        ({"metrics": {"w": jnp.ones(3)}}, "an item cannot be named 'metrics'"),
    ],
)
def test_a_state_that_cannot_be_saved_is_named(tmp_path, state, message):
    with pytest.raises(ValueError, match=message):
        checkpoint.save(tmp_path / "run", 1, state)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("keep", [0, -1, True, 2.0])
def test_keeping_fewer_than_one_step_is_refused(root, saved, keep):
    with pytest.raises(ValueError, match=f"keep is {keep}; expected how many"):
        checkpoint.save(root, 6, saved, keep=keep)
    assert checkpoint.latest(root) == 5


@pytest.mark.parametrize("step", [-1, 2.5, True, "7", None])
def test_a_step_is_a_whole_number(tmp_path, step):
    with pytest.raises(ValueError, match=f"step is {step!r}; expected a whole number"):
        checkpoint.save(tmp_path / "run", step, {"params": {"w": jnp.ones(3)}})
    assert not (tmp_path / "run").exists()
    checkpoint.save(tmp_path / "run", np.int64(7), {"params": {"w": jnp.ones(3)}})
    checkpoint.wait()
    assert checkpoint.latest(tmp_path / "run") == 7


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({0: "a", "b": 1}, r"a dict with the keys \[0, 'b'\], of type dict"),
        ({"epochs": {"at": (1, 2)}}, r"\(1, 2\) at epochs/at, of type tuple, would not come back"),
        ({"list": [{"x": b"abc"}]}, "b'abc' at list/0/x, of type bytes"),
        ({"base64": "AAAA"}, "a dict with the one key 'base64', which stands for bytes"),
    ],
)
def test_plain_data_that_would_change_is_refused(tmp_path, item, message):
    with pytest.raises(ValueError, match=message):
        checkpoint.save(tmp_path / "run", 1, {"data": item})
    assert not (tmp_path / "run").exists()


def test_plain_data_comes_back_exactly(root):
    items = {
        "a": {"base64": "AAAA", "n": 2**80, "f": 0.1, "t": [True, None, 1, 1.0], "s": "\ud800é/"},
        "b": b"\x00\xff",
        "c": [[], {}, [float("inf")]],
        "d": 7,
    }
    checkpoint.save(root, 1, items)
    found = checkpoint.restore(root, dict.fromkeys(items))
    assert repr(found) == repr(items)


@pytest.mark.parametrize(
    ("key", "other", "message"),
    [
        (jax.random.key(1), jax.random.PRNGKey(1), r"key<fry>\[\] in .* uint32\[2\] in the target"),
        (jax.random.PRNGKey(1), jax.random.key(1), r"uint32\[2\] in .* key<fry>\[\] in the target"),
        (
            jax.random.key(1, impl="rbg"),
            jax.random.key(1, impl="unsafe_rbg"),
            r"key<rbg>\[\] in the checkpoint and key<urbg>\[\] in the target",
        ),
        (
            jax.random.split(jax.random.key(1), 3),
            jax.random.key(1),
            r"key<fry>\[3\] in the checkpoint and key<fry>\[\] in the target",
        ),
    ],
)
def test_keys_of_another_kind_are_refused(root, nothing_read, key, other, message):
    checkpoint.save(root, 1, {"rng": {"dropout": key}})
    with pytest.raises(ValueError, match="rng: dropout is " + message):
        checkpoint.restore(root, {"rng": {"dropout": other}})


def test_64_bits_are_not_cut_to_32(root):
    saved = np.array([0, 2**40 + 5])
    checkpoint.save(root, 1, {"params": {"rows": saved}})
    with pytest.raises(ValueError, match=r"params: rows is int64 and .*jax_enable_x64, or give a"):
        checkpoint.restore(root, {"params": {"rows": array((2,), "int64")}})
    found = checkpoint.restore(root, {"params": {"rows": np.zeros(2, np.int64)}})["params"]
    np.testing.assert_array_equal(found["rows"], saved)


def flip(path, at=None):
    """Turn one bit of a file around, in the middle if no byte is said."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 0b100
    path.write_bytes(content)


def test_a_flipped_bit_in_an_array_is_found_by_whoever_reads_it(root):
    """Also by a layout that reads a part, and not by one that reads another part."""
    rows = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    checkpoint.save(root, 1, {"params": {"w": jax.device_put(rows, EIGHT), "v": rows[0]}})
    checkpoint.wait()
    file, offset, size = checkpoint.stored(root, 1, "params")["w"].places[5, 0]
    flip(pathlib.Path(root) / "1" / "params" / file, offset + size // 2)
    for sharding in None, EIGHT, NamedSharding(mesh.make(a=2, b=4), P("b", "a")):
        target = {"params": {"w": array((64, 64), sharding=sharding)}}
        with pytest.raises(ValueError, match=r"step 1 .* damaged: of params, chunk \(5, 0\) of w"):
            checkpoint.restore(root, target, partial=True)
    found = checkpoint.restore(root, {"params": {"v": np.zeros(64, np.float32)}}, partial=True)
    np.testing.assert_array_equal(found["params"]["v"], rows[0])


def test_no_flipped_bit_anywhere_changes_what_is_restored(root):
    """In every file of a step: found, or without effect."""
    state = {
        "params": {"w": np.random.default_rng(0).normal(size=(64, 64)), "b": np.arange(9)},
        "data": {"position": 12345, "name": "abcdef"},
        "rng": jax.random.key(3),
    }
    checkpoint.save(root, 1, state)
    checkpoint.wait()
    found, draw = 0, random.Random(0)
    for file in sorted(p for p in (pathlib.Path(root) / "1").rglob("*") if p.is_file()):
        content = file.read_bytes()
        flip(file, draw.randrange(len(content)))
        try:
            again = checkpoint.restore(root, state)
        except Exception:
            found += 1
        else:
            assert again["data"] == state["data"], file
            np.testing.assert_array_equal(jax.random.key_data(again["rng"]), [0, 3])
            jax.tree.map(np.testing.assert_array_equal, again["params"], state["params"])
        file.write_bytes(content)
    assert found >= 5


def test_several_saves_that_fail_are_all_told(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("no space left")

    state = {"params": {"w": jnp.ones(3)}}
    with monkeypatch.context() as patched:
        patched.setattr("orbax.checkpoint.PyTreeCheckpointHandler.finalize", full)
        checkpoint.save(tmp_path / "one", 1, state)
        checkpoint.save(tmp_path / "two", 1, state)
        with pytest.raises(ExceptionGroup, match="2 saves failed") as told:
            checkpoint.wait()
    assert [str(error) for error in told.value.exceptions] == ["no space left"] * 2
    checkpoint.save(tmp_path / "two", 2, state)
    checkpoint.wait()
    assert checkpoint.latest(tmp_path / "two") == 2


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
