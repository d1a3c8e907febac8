import itertools
import pathlib
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import checkpoint, mesh
from shardwise.checkpoint import saving
from shardwise.checkpoint.items import by_path


@pytest.fixture
def root(tmp_path):
    yield str(tmp_path / "run")
    checkpoint.wait()


def test_the_last_k_steps_are_kept(root):
    assert checkpoint.latest(root) is None
    for step in 1, 2, 5, 9:
        checkpoint.save(root, step, {"params": {"w": jnp.full(3, step)}}, keep=2)
    checkpoint.wait(root)
    assert checkpoint.latest(root) == 9
    target = {"params": {"w": jnp.zeros(3, int)}}
    for step in 5, 9:
        assert checkpoint.restore(root, target, step)["params"]["w"][0] == step
    with pytest.raises(FileNotFoundError, match=r"no step 2 .*Complete steps: \[5, 9\]"):
        checkpoint.restore(root, target, 2)
    checkpoint.save(root, 10, target, keep=None)
    checkpoint.save(root, 11, target, keep=None)
    checkpoint.wait(root)
    assert checkpoint.restore(root, target, 5)["params"]["w"][0] == 5


def test_a_folder_named_by_a_number_is_neither_counted_nor_deleted(root, tmp_path):
    mine = tmp_path / "run" / "100"
    mine.mkdir(parents=True)
    (mine / "notes.txt").write_text("mine")
    state = {"params": {"w": jnp.ones(3)}}
    for step in 1, 2, 3:
        checkpoint.save(root, step, state, keep=1)
    checkpoint.wait()
    assert checkpoint.latest(root) == 3 and (mine / "notes.txt").read_text() == "mine"
    with pytest.raises(ValueError, match=r"run/100 is there already and is no checkpoint"):
        checkpoint.save(root, 100, state)
    assert (mine / "notes.txt").read_text() == "mine"
    with pytest.raises(FileNotFoundError, match=r"no step 100 .*Complete steps: \[3\]"):
        checkpoint.restore(root, state, 100)


def test_one_directory_under_several_names_is_one(tmp_path, monkeypatch):
    state = {"params": {"w": np.zeros(2**18)}}
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for step, name in enumerate([tmp_path / "run", "link", "run", "~/run", "else/../run"]):
        checkpoint.save(name, step, state, keep=None)
    monkeypatch.chdir("else")
    checkpoint.save("../run", 9, state, keep=None)
    checkpoint.wait("../link")
    assert sorted(p.name for p in (tmp_path / "run").iterdir() if p.name.isdigit()) == [*"012349"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["else", "link", "run"]
    assert not any((tmp_path / "else").iterdir())


def test_threads_take_turns(root):
    """Each step is there, or refused because a later one is."""
    state, errors = {"params": {"w": np.zeros(2**18)}}, []

    def work(steps):
        for step in steps:
            try:
                checkpoint.save(root, step, state, keep=None)
            except ValueError as error:
                errors.append(str(error))
            checkpoint.wait(root)

    threads = [
        threading.Thread(target=work, args=(range(k, 16, 4),), daemon=True) for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    saved = [p for p in pathlib.Path(root).iterdir() if p.name.isdigit()]
    assert len(saved) + len(errors) == 16 and all("is behind step" in e for e in errors)
    assert checkpoint.latest(root) == 15


def test_paths_are_found_in_linear_time():
    """Counted in calls, for the clock of a busy machine tells nothing."""

    def calls(layers):
        tree = {f"layer{i}": {"q": 0, "k": 0} for i in range(layers)}
        count = itertools.count()
        sys.setprofile(lambda *_: next(count))
        try:
            by_path("params", tree)
        finally:
            sys.setprofile(None)
        return next(count)

    assert calls(400) < 3 * calls(200)


def test_what_cut_off_saves_left_is_deleted_by_the_next(root, tmp_path):
    left = tmp_path / "run" / "4.orbax-checkpoint-tmp" / "params.orbax-checkpoint-tmp"
    left.mkdir(parents=True)
    (left / "data").write_bytes(bytes(1000))
    (tmp_path / "run" / "notes.orbax-checkpoint-tmp").mkdir()
    checkpoint.save(root, 5, {"params": {"w": jnp.ones(3)}})
    checkpoint.wait()
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert names == {".shardwise-lock", "5", "notes.orbax-checkpoint-tmp"}


def test_a_directory_that_was_deleted_starts_anew(root, tmp_path):
    target = {"params": {"w": jnp.ones(3)}}
    checkpoint.save(root, 3, target)
    checkpoint.wait()
    (tmp_path / "run").rename(tmp_path / "away")
    checkpoint.save(root, 1, target)
    checkpoint.wait()
    assert checkpoint.latest(root) == 1


@pytest.mark.parametrize(
    ("given", "arrives"),
    [("gs://bucket/a//run", "gs://bucket/a//run"), ("run", "{cwd}/run"), ("a/../run", "{cwd}/run")],
)
def test_a_path_on_a_bucket_reaches_orbax_untouched(monkeypatch, tmp_path, given, arrives):
    class Reached(Exception):
        pass

    def manager(directory, *args, **kwargs):
        raise Reached(directory)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ocp, "CheckpointManager", manager)
    state = {"params": {"w": jnp.ones(3)}}
    for call in (
        lambda: checkpoint.save(given, 1, state),
        lambda: checkpoint.restore(given, state),
        lambda: checkpoint.latest(given),
    ):
        with pytest.raises(Reached) as reached:
            call()
        assert reached.value.args == (arrives.format(cwd=tmp_path),)


@pytest.mark.parametrize(
    ("shape", "thin"),
    [
        ((4, 512, 64), (0,)),  # layers, embed, heads: the last would leave too little
        ((512, 4, 8), (1,)),
        ((1024, 1024), ()),
        ((), ()),
    ],
)
def test_short_axes_are_cut_to_one(shape, thin):
    array = jax.ShapeDtypeStruct(shape, jnp.float32)
    cut = saving.save_args(array, 2**10)
    assert cut.shard_axes == thin and cut.chunk_byte_size == 2**10


def test_stored_reads_one_item_of_many_and_orbax_warns_of_no_other(root, caplog):
    checkpoint.save(root, 1, {"params": {"w": jnp.ones(3)}, "opt": {"v": jnp.ones(4)}, "data": 5})
    checkpoint.wait()
    caplog.clear()
    found = checkpoint.stored(root, 1, "opt")
    assert {path: chunks.shape for path, chunks in found.items()} == {"v": (4,)}
    assert "could not be restored" not in caplog.text


def test_stored_tells_each_chunk_and_its_bytes_in_a_file(root):
    w = np.random.default_rng(0).integers(0, 2**32, (96, 70), np.uint32)
    rows = NamedSharding(mesh.make(a=2, b=4), P(("a", "b")))
    state = {"blocks": {"w": jax.device_put(w, rows), "v": w.T}, "b": w[0]}
    checkpoint.save(root, 3, {"params": state}, chunk_bytes=2**11)
    checkpoint.wait()
    found = checkpoint.stored(root, 3, "params")
    assert found.pop("b") == checkpoint.Chunks((70,), (70,), {})  # it lies in the index
    assert found.keys() == {"blocks/w", "blocks/v"}
    folder = pathlib.Path(root) / "3" / "params"
    values = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result()
    for path, stored in found.items():
        counts = [-(-n // width) for n, width in zip(stored.shape, stored.chunk, strict=True)]
        assert set(stored.places) == set(np.ndindex(*counts))
        assert 4 * np.prod(stored.chunk) <= 2**11
        for chunk, (file, offset, size) in stored.places.items():
            key = f"{path.replace('/', '.')}/{chunk[0]}.{chunk[1]}"
            assert values.read(key).result().value == (folder / file).read_bytes()[offset:][:size]
    rows, columns = found["blocks/w"].chunk
    one = found["blocks/w"].touched((slice(rows - 1, rows + 1), slice(0, columns)))
    assert one == [(0, 0), (1, 0)]
