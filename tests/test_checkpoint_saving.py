import pathlib

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
    cut = saving._chunks(array, 2**10)
    assert cut.shard_axes == thin and cut.chunk_byte_size == 2**10


def test_stored_tells_each_chunk_and_its_bytes_in_a_file(root):
    w = np.random.default_rng(0).integers(0, 2**32, (96, 70), np.uint32)
    rows = NamedSharding(mesh.make(a=2, b=4), P(("a", "b")))
    state = {"blocks": {"w": jax.device_put(w, rows), "v": w.T}, "b": w[0]}
    checkpoint.save(root, 3, {"params": state}, chunk_bytes=2**11)
    checkpoint.wait()
    found = checkpoint.stored(root, 3, "params")
    assert found.keys() == {"blocks/w", "blocks/v"}  # the third lies in the index
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
