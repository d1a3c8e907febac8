"""What only other processes show: what each reads, what is left when one is killed, who may run."""

import functools
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import checkpoint, data, fsdp, marks, mesh, pipeline, rules
from shardwise.checkpoint import chunks, directory, restoring

CHUNK = 2**12
WIDTH = 264  # bytes are below 256; 8 devices divide it
LOCK = ".shardwise-lock"


def start(function, *args):
    """`function(*args)` of this file, in a Python of its own."""
    source = f"import test_processes as t; t.{function}(*{args!r})"
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
        outputs = [child.communicate(timeout=1800) for child in children]
    finally:
        for child in children:
            child.kill()
    for child, (out, err) in zip(children, outputs, strict=True):
        assert child.returncode == 0, out + err
    return [out for out, _ in outputs]


SHAPES = {"even": (24, 256, 256), "odd": (24, 24760), "short": (16,)}


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


def touched(root, sharded):
    """Bytes of the chunks that the devices of this process touch, each device by itself."""
    found = checkpoint.stored(root, 1, "params")
    return sum(
        found[path].places[chunk][2]
        for path, x in sharded.items()
        for index in x.sharding.addressable_devices_indices_map(x.shape).values()
        for chunk in found[path].touched(index)
        if chunk in found[path].places
    )


def join(process, address, devices):
    """Become one of two processes, who listen to each other and to nobody else."""
    jax.distributed.initialize(
        address, 2, process, initialization_timeout=1800, coordinator_bind_address=address
    )
    mesh.simulate(devices)


def start_two(function, *args):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return [start(function, *args, process, address) for process in range(2)]


def listens_at(port):
    """The addresses at which this machine listens on a port, as Linux tells them."""
    lines = [
        line.split()
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in (Path(table).read_text().splitlines() if Path(table).exists() else [])
    ]
    listening = [line[1].split(":") for line in lines if line[3] == "0A"]
    return {host for host, each in listening if int(each, 16) == port}


def work_together(root, process, address):
    join(process, address, 4)
    found = listens_at(int(address.rsplit(":", 1)[1]))
    assert all(host.endswith("0100007F") for host in found), found  # 127.0.0.1, backwards
    read_shares(root, process)
    agree(root, process)
    print("agreed")


def read_shares(root, process):
    checkpoint.restore(
        Path(root) / "one", {"params": {"short": np.zeros(16, np.uint32)}}, partial=True
    )
    for name, spec in ("one", P("data")), ("one", P(None, "data")), ("eight", P(None, "data")):
        before = bytes_read()
        wanted = target(spec)
        found = checkpoint.restore(Path(root) / name, {"params": wanted}, partial=True)["params"]
        jax.block_until_ready(found)
        report = {
            "read": bytes_read() - before,
            "touched": touched(Path(root) / name, wanted),
            "share": sum(x.nbytes for x in found.values()) / 2,
        }
        print(json.dumps(report), flush=True)
        expected = values()
        for path, x in found.items():
            for shard in x.addressable_shards:
                np.testing.assert_array_equal(shard.data, expected[path][shard.index])
    checkpoint.save(Path(root) / "two", 1, {"params": found, "data": {"next_index": 3}})
    held = rules.place(MIXED, fsdp.rule(), mesh.make(fsdp=-1))
    checkpoint.save(Path(root) / "mixed", 1, {"params": held})
    zeros = jax.tree.map(jnp.zeros_like, held)
    checkpoint.wait()
    again = checkpoint.restore(Path(root) / "mixed", {"params": zeros})["params"]
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(held), strict=True):
        for mine, whole in zip(x.addressable_shards, y.addressable_shards, strict=True):
            np.testing.assert_array_equal(mine.data, whole.data)
    with pytest.raises(ValueError, match=f"rng: rng lies on devices of process {process} alone"):
        checkpoint.save(Path(root) / "local", 1, {"rng": jax.random.key(0)})


# One is cut over eight devices, one whole on all.
MIXED = {"w": np.arange(10.0, dtype=np.float32), "v": np.ones((4, 304, 3), np.float32)}


@pytest.mark.slow
def test_two_processes_read_their_shares_and_save_together(tmp_path):
    whole = values()
    checkpoint.save(tmp_path / "one", 1, {"params": jax.device_put(whole)}, chunk_bytes=CHUNK)
    cut = jax.device_put(whole, NamedSharding(mesh.make(data=8), P("data")))
    checkpoint.save(tmp_path / "eight", 1, {"params": cut}, chunk_bytes=CHUNK)
    checkpoint.wait()
    outputs = finish(*start_two("work_together", str(tmp_path)))
    for out in outputs:
        reports = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        assert len(reports) == 3 and out.rstrip().endswith("agreed"), out
        for report in reports:
            metadata = 2**16
            assert report["share"] <= report["read"] <= report["touched"] + metadata
            assert report["touched"] < 1.5 * report["share"]
        assert reports[0]["read"] < reports[0]["share"] + metadata
    del whole["short"]
    found = checkpoint.restore(tmp_path / "two", {"params": whole, "data": None})
    jax.tree.map(np.testing.assert_array_equal, found["params"], whole)
    assert found["data"] == {"next_index": 3}
    found = checkpoint.restore(tmp_path / "mixed", {"params": MIXED})["params"]
    jax.tree.map(np.testing.assert_array_equal, found, MIXED)


def multiply(weights, x):
    return jnp.tanh(x @ weights[0])


def chain(stack, batch, run):
    return jnp.mean((run(stack, batch["x"]) - batch["y"]) ** 2)


def one_by_one(stack, x, mark=False):
    for i in range(8):
        x = multiply(stack[i : i + 1], marks.stage_boundary(x) if mark and i else x)
    return x


def numbers():
    draw = np.random.default_rng(3)
    stack = draw.normal(size=(8, 6, 6)).astype(np.float32)
    return stack, {name: draw.normal(size=(12, 6)).astype(np.float32) for name in "xy"}


def run_pipelines(process, address):
    """Any schedule runs in both processes, for it is one program; and so does `gpipe`."""
    join(process, address, 4)
    stages, (stack, batch) = mesh.make(stage=8), numbers()
    loss = functools.partial(chain, run=pipeline.gpipe(multiply, stages, 4))
    stack = jax.make_array_from_callback(
        stack.shape, NamedSharding(stages, P("stage")), lambda index: stack[index]
    )
    marked = functools.partial(chain, run=functools.partial(one_by_one, mark=True))
    laid = dict(specs=lambda params: [P("stage")])
    scheduled = pipeline.value_and_grad(marked, stages, "1f1b", 4, **laid)
    for run in jax.value_and_grad(loss), scheduled:
        value, grads = jax.jit(run)(stack, batch)
        own = {shard.index[0].start: shard.data.tolist() for shard in grads.addressable_shards}
        print(json.dumps({"loss": float(value), "grads": own}))


@pytest.mark.slow
def test_pipelines_on_two_processes_equal_one_device():
    stack, batch = numbers()
    loss, grads = jax.value_and_grad(functools.partial(chain, run=one_by_one))(stack, batch)
    seen = set()
    for out in finish(*start_two("run_pipelines")):
        reports = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        for i, found in enumerate(reports):
            np.testing.assert_allclose(found["loss"], loss, rtol=1e-5)
            for stage, g in found["grads"].items():
                np.testing.assert_allclose(g[0], grads[int(stage)], rtol=1e-4, atol=1e-6)
                seen.add((i, int(stage)))
    assert seen == {(i, stage) for i in range(2) for stage in range(8)}


def agree(root, process):
    """What goes wrong in one of two processes is told in both."""
    run, every = Path(root) / "run", NamedSharding(mesh.make(data=-1), P("data"))
    rows = jax.device_put(np.arange(8.0, dtype=np.float32), every)
    state = {"params": {"w": rows}, "data": {"next_index": 1}}
    for step in 1, 2:
        checkpoint.save(run, step, state)
    checkpoint.wait()
    with pytest.raises(ValueError, match=r"Process 0 has step 3; Process 1 has step 4$"):
        checkpoint.save(run, 3 + process, state)
    with pytest.raises(ValueError, match=r"item 'params' \w+.*; Process 1 has .*item 'params' \w+"):
        checkpoint.save(run, 3, {"params": {"w" if process else "v": rows}})
    with pytest.raises(ValueError, match=r"the processes differ.*item 'data' \d+.*; Process 1"):
        checkpoint.save(run, 3, state | {"data": {"next_index": process}})
    whole = NamedSharding(every.mesh, P())
    drift = jax.make_array_from_callback((3,), whole, lambda _: np.full(3, process, np.float32))
    with pytest.raises(ValueError, match=r"processes differ.*has params: w \(.*same seed\?\) \d"):
        checkpoint.save(Path(root) / "new", 1, {"params": {"w": drift}})
    assert not (Path(root) / "new").exists()
    bad = {"bad": {"x": np.array("a"), "w": rows}} if process else {}
    kind = ValueError if process else RuntimeError
    with pytest.raises(kind, match=r"(process 1 cannot, so none does: .*)?bad: x is array"):
        checkpoint.save(run, 3, state | bad)
    restore_one_step(run, process, {"params": {"w": jnp.zeros_like(rows)}})


def restore_one_step(run, process, target):
    """Process 1 does not see step 2 yet, as on a file system that takes its time."""
    labels, seen, told = [], directory.Steps.find_all, restoring.together
    if process:
        directory.Steps.find_all = lambda *args: (s for s in seen(*args) if s.step < 2)
    restoring.together = lambda who: (labels.append(who), told(who))[1]
    checkpoint.restore(run, target, partial=True)
    assert labels[-1].startswith("checkpoint.restore: step 1 in"), labels
    with pytest.raises(FileNotFoundError, match=r"no step 2 is complete.*Complete steps: \[1\]"):
        checkpoint.restore(run, target, 2)
    wrong = {"params": {"w": np.zeros(5)}} if process else target
    kind = ValueError if process else RuntimeError
    with pytest.raises(kind, match=r"w is float32\[8\] in .* and float64\[5\] in the target"):
        checkpoint.restore(run, wrong, partial=True)


def hold(root):
    """Save a step whose writing never ends."""

    def stuck(*args, **kwargs):
        print("writing", flush=True)
        threading.Event().wait()

    checkpoint.save(root, 1, {"params": {"w": np.zeros(3)}})
    checkpoint.wait()
    ocp.PyTreeCheckpointHandler.finalize = stuck
    checkpoint.save(root, 2, {"params": {"w": np.zeros(3)}})


def test_one_program_writes_a_directory_until_it_ends_even_by_kill_9(tmp_path):
    root, state = tmp_path / "run", {"params": {"w": np.ones(3)}}
    child = start("hold", str(root))
    try:
        assert child.stdout.readline() == "writing\n", child.stderr.read()
        (tmp_path / "link").symlink_to(root)
        with pytest.raises(
            RuntimeError, match=rf"another program \(process {child.pid} on .* saves"
        ):
            checkpoint.save(tmp_path / "link", 2, state)
        assert checkpoint.latest(root) == 1
    finally:
        child.kill()
        child.communicate()
    assert any("orbax-checkpoint-tmp" in path.name for path in root.iterdir())
    checkpoint.save(root, 2, state)
    checkpoint.wait()
    assert sorted(path.name for path in root.iterdir()) == [LOCK, "1", "2"]
    assert checkpoint.restore(root, state)["params"]["w"].tolist() == [1, 1, 1]


def digest(params):
    return hashlib.sha256(np.asarray(params["w"]).tobytes()).hexdigest()


def kill_at(place):
    """Let this process die at a known place of the save that comes next."""

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    owner, name = {
        "begun": (ocp.CheckpointManager, "save"),
        "written": (chunks, "write_sums"),
        "joined": (ocp.StandardCheckpointHandler, "finalize"),
        "whole": (ocp.JsonCheckpointHandler, "finalize"),
        "complete": (checkpoint, "wait"),
    }[place]
    if place == "whole":
        before = ocp.JsonCheckpointHandler.finalize
        ocp.JsonCheckpointHandler.finalize = lambda *args: (before(*args), die())
    elif place == "complete":
        before = checkpoint.wait
        checkpoint.wait = lambda: (before(), die())
    else:
        setattr(owner, name, die)


def train_and_save(root, log, steps, place=None):
    """Train from the newest complete step on; log each step's state, then save it.

    The state depends on the data's position, the key and every step before. Its arrays are
    cut, and the last save dies at `place`.
    """
    mesh.simulate(8)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(params, key, tokens):
        noise = jax.random.normal(key, (WIDTH,))
        counts = {"w": jnp.bincount(tokens.ravel(), length=WIDTH) + noise}
        counts = rules.constrain_tree(counts, fsdp.rule(), eight)
        return jax.tree.map(lambda w, c: 0.9 * w + c, params, counts)

    eight, batches, key = mesh.make(fsdp=8), data.batches(4, 32), jax.random.key(0)
    params = rules.place({"w": np.zeros(WIDTH, np.float32)}, fsdp.rule(), eight)
    state = {"params": params, "rng": key, "data": None}
    if done := checkpoint.latest(root) or 0:
        state = checkpoint.restore(root, state)
        batches.set_state(state["data"])
    params, key = state["params"], state["rng"]
    with open(log, "a", buffering=1) as lines:
        for n in range(done + 1, steps + 1):
            key, used = jax.random.split(key)
            params = step(params, used, next(batches)["tokens"])
            checkpoint.wait()
            print(n, digest(rules.whole(params)), file=lines)
            if n == steps and place:
                kill_at(place)
            checkpoint.save(
                root, n, {"params": params, "rng": key, "data": batches.get_state()}, keep=2
            )
    checkpoint.wait()


PLACES = {"begun": 1, "written": 1, "joined": 1, "whole": 1, "complete": 2}


@pytest.mark.parametrize("places", [["joined"], pytest.param(list(PLACES), marks=pytest.mark.slow)])
def test_training_survives_kill_9_as_if_uninterrupted(tmp_path, places):
    """A place says how many of two steps are complete when the second save dies there."""
    root, log, newest = str(tmp_path / "run"), tmp_path / "log", 0
    for place in places:
        child = start("train_and_save", root, str(log), newest + 2, place)
        _, errors = child.communicate(timeout=1800)
        assert child.returncode == -signal.SIGKILL, errors
        newest += PLACES[place]
        assert checkpoint.latest(root) == newest, place
    train_and_save(root, str(log), newest + 2)
    assert checkpoint.latest(root) == newest + 2
    assert sorted(os.listdir(root)) == sorted([LOCK, str(newest + 1), str(newest + 2)])
    steps = [line.split() for line in log.read_text().splitlines()]
    train_and_save(str(tmp_path / "uninterrupted"), tmp_path / "alone", newest + 2)
    expected = dict(line.split() for line in (tmp_path / "alone").read_text().splitlines())
    assert len(expected) == newest + 2
    assert len(steps) == newest + 2 + sum(2 - PLACES[place] for place in places)
    assert all(expected[n] == found for n, found in steps)


def save_and_leave(root, step=1):
    checkpoint.save(root, step, {"params": {"w": np.random.default_rng(0).normal(size=2**22)}})


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
    """Which it may make here since `wait` let other programs in."""
    checkpoint.save(tmp_path / "run", 1, {"params": {"w": np.zeros(3)}})
    checkpoint.wait()
    finish(start("save_and_leave", str(tmp_path / "run"), 2))
    assert checkpoint.latest(tmp_path / "run") == 2


@pytest.mark.slow
@threads_until_the_end
def test_an_error_at_the_end_of_a_program_is_told_last(tmp_path):
    child = start("save_and_fail", str(tmp_path / "run"))
    _, errors = child.communicate(timeout=1800)
    assert errors.rstrip().endswith("OSError: no space left")
    assert "in _finish" in errors and child.returncode == 1
