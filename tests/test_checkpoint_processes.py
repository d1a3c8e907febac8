"""What only other processes show: what each one reads, and what is left when one is killed."""

import functools
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import checkpoint, data, mesh

CHUNK = 2**14


def start(function, *args):
    """`function(*args)` of this file, in a Python of its own."""
    source = f"import test_checkpoint_processes as t; t.{function}(*{args!r})"
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-c", source],
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*children):
    try:
        outputs = [child.communicate(timeout=300) for child in children]
    finally:
        for child in children:
            child.kill()
    for child, (out, err) in zip(children, outputs, strict=True):
        assert child.returncode == 0, out + err
    return [out for out, _ in outputs]


SHAPES = {"even": (24, 512, 512), "odd": (24, 99000), "short": (16,)}


def values():
    """Random bits, which do not compress; an eighth of "odd" does not end where a chunk ends."""
    draw = np.random.default_rng(0)
    return {path: draw.integers(0, 2**32, shape, np.uint32) for path, shape in SHAPES.items()}


def target(spec):
    sharding = NamedSharding(mesh.make(data=-1), spec)
    return {
        path: jax.ShapeDtypeStruct(shape, np.uint32, sharding=sharding)
        for path, shape in SHAPES.items()
        if len(spec) <= len(shape)
    }


def bytes_read():
    metric = "/tensorstore/kvstore/file/bytes_read"
    found = tensorstore.experimental_collect_matching_metrics(metric)
    return sum(value["value"] for each in found for value in each["values"])


def peak():
    """The most memory this process has held, in bytes; 0 where only Linux could tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def touched(root, sharded):
    """Bytes of the chunks that the devices of this process touch, each device by itself."""
    found = checkpoint.stored(root, 1, "params")
    return sum(
        found[path].places[chunk][2]
        for path, x in sharded.items()
        if path in found
        for index in x.sharding.addressable_devices_indices_map(x.shape).values()
        for chunk in found[path].touched(index)
    )


def read_shares(root, process, address):
    jax.distributed.initialize(address, 2, process, initialization_timeout=200)
    mesh.simulate(4)
    checkpoint.restore(
        Path(root) / "one", {"params": {"short": np.zeros(16, np.uint32)}}, partial=True
    )
    for name, spec in ("one", P("data")), ("one", P(None, "data")), ("eight", P(None, "data")):
        before, held = bytes_read(), peak()
        wanted = target(spec)
        found = checkpoint.restore(Path(root) / name, {"params": wanted}, partial=True)["params"]
        jax.block_until_ready(found)
        report = {
            "read": bytes_read() - before,
            "touched": touched(Path(root) / name, wanted),
            "peak": peak() - held,
            "share": sum(x.nbytes for x in found.values()) / 2,
        }
        print(json.dumps(report), flush=True)
        expected = values()
        for path, x in found.items():
            for shard in x.addressable_shards:
                np.testing.assert_array_equal(shard.data, expected[path][shard.index])
    checkpoint.save(Path(root) / "two", 1, {"params": found, "data": {"next_index": 3}})
    checkpoint.wait()
    with pytest.raises(ValueError, match=f"rng: rng lies on devices of process {process} alone"):
        checkpoint.save(Path(root) / "local", 1, {"rng": jax.random.key(0)})


def test_two_processes_read_their_shares_and_save_together(tmp_path):
    whole = values()
    checkpoint.save(tmp_path / "one", 1, {"params": jax.device_put(whole)}, chunk_bytes=CHUNK)
    cut = jax.device_put(whole, NamedSharding(mesh.make(data=8), P("data")))
    checkpoint.save(tmp_path / "eight", 1, {"params": cut}, chunk_bytes=CHUNK)
    checkpoint.wait()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    outputs = finish(*(start("read_shares", str(tmp_path), p, address) for p in range(2)))
    for out in outputs:
        reports = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        assert len(reports) == 3
        for report in reports:
            metadata = 2**16
            assert report["share"] <= report["read"] <= report["touched"] + metadata
            assert report["touched"] < 1.5 * report["share"]
        assert reports[0]["read"] < reports[0]["share"] + metadata
        # Orbax holds what it read while JAX copies it; the whole state would be a share more.
        assert reports[0]["peak"] < 2.8 * reports[0]["share"]
    del whole["short"]
    found = checkpoint.restore(tmp_path / "two", {"params": whole, "data": None})
    jax.tree.map(np.testing.assert_array_equal, found["params"], whole)
    assert found["data"] == {"next_index": 3}


def digest(params):
    return hashlib.sha256(np.asarray(params["w"]).tobytes()).hexdigest()


def train_and_save(root, log, steps, large):
    """Train from the newest complete step on; log each step's state, then save it.

    The state depends on the data's position, the key and every step before. `large` bytes of
    ballast make a save last.
    """
    mesh.simulate(8)
    placed = NamedSharding(mesh.make(data=8), P("data"))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(params, key, tokens):
        noise = jax.random.normal(key, params["w"].shape)
        counts = jax.numpy.bincount(tokens.ravel(), length=256) + noise
        return {"w": 0.9 * params["w"] + counts, "ballast": params["ballast"] + 1}

    batches, key = data.batches(4, 32), jax.random.key(0)
    ballast = np.random.default_rng(0).normal(size=large // 4).astype(np.float32)
    params = {"w": np.zeros(256, np.float32), "ballast": ballast}
    state = {"params": jax.device_put(params, placed), "rng": key, "data": None}
    if done := checkpoint.latest(root) or 0:
        state = checkpoint.restore(root, state)
        batches.set_state(state["data"])
    params, key = state["params"], state["rng"]
    with open(log, "a", buffering=1) as lines:
        for n in range(done + 1, steps + 1):
            key, used = jax.random.split(key)
            params = step(params, used, next(batches)["tokens"])
            checkpoint.wait()  # so that a start in the log comes after the commit before it
            print("start", n, digest(params), file=lines)
            checkpoint.save(
                root, n, {"params": params, "rng": key, "data": batches.get_state()}, keep=2
            )
    checkpoint.wait()


@pytest.mark.parametrize(
    ("kills", "between"), [(1, 0), pytest.param(20, 15, marks=pytest.mark.slow)]
)
def test_training_survives_kill_9_as_if_uninterrupted(tmp_path, kills, between):
    root, log, large = str(tmp_path / "run"), tmp_path / "log", 2**25
    draw, during, newest = random.Random(0), 0, 0
    log.touch()
    for _ in range(kills):
        lines = log.read_text().count("start")
        child = start("train_and_save", root, str(log), 10**6, large)
        try:
            while child.poll() is None and log.read_text().count("start") < lines + 2:
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.2))
        finally:
            child.send_signal(signal.SIGKILL)
        _, errors = child.communicate()
        assert child.returncode == -signal.SIGKILL, errors
        complete = checkpoint.latest(root) or 0
        assert complete > newest
        newest = complete
        during += int(log.read_text().split()[-2]) > newest
    assert during >= between
    print(f"{during} of {kills} kills came between a save's start and its commit")
    finish(start("train_and_save", root, str(log), newest + 2, large))
    steps = [line.split()[1:] for line in log.read_text().splitlines()]
    assert int(steps[-1][0]) == checkpoint.latest(root) == newest + 2
    alone = tmp_path / "alone"
    train_and_save(str(tmp_path / "uninterrupted"), alone, newest + 2, 2**10)
    expected = dict(line.split()[1:] for line in alone.read_text().splitlines())
    assert len(expected) == newest + 2
    assert all(expected[n] == found for n, found in steps)


def save_and_leave(root):
    checkpoint.save(root, 1, {"params": {"w": np.random.default_rng(0).normal(size=2**22)}})


def save_and_fail(root):
    def full(*args, **kwargs):
        raise OSError("no space left")

    ocp.PyTreeCheckpointHandler.finalize = full
    save_and_leave(root)


threads_until_the_end = pytest.mark.skipif(
    sys.version_info[:3] in ((3, 12, 0), (3, 12, 1)),
    reason="these two start no threads while they shut down (CPython issue 113964)",
)


@threads_until_the_end
def test_the_end_of_a_program_waits_for_its_saves(tmp_path):
    finish(start("save_and_leave", str(tmp_path / "run")))
    assert checkpoint.latest(tmp_path / "run") == 1


@threads_until_the_end
def test_an_error_at_the_end_of_a_program_is_told_last(tmp_path):
    child = start("save_and_fail", str(tmp_path / "run"))
    _, errors = child.communicate(timeout=300)
    assert errors.rstrip().endswith("OSError: no space left")
    assert "in _finish" in errors
