"""The launcher with real processes of JAX, which die and hang while the others wait for them."""

import json
import re
import sys
import time

import pytest
from sampling import IN_FULL

from shardwise.run import launch

CHILD = """
import json, os, signal, sys, time
import jax
import jax.numpy as jnp

given = sys.argv[1:]
def flag(name): return given[given.index(name) + 1]
index, count, run = int(flag("--processes.index")), int(flag("--processes.count")), flag("--run")

def note(step, doing, line=""):
    state = dict(process=index, pid=os.getpid(), host="here", step=step, doing=doing,
                 time=time.time(), line=line)
    os.makedirs(f"{run}/processes", exist_ok=True)
    file = f"{run}/processes/{index}.json"
    open(file + ".new", "w").write(json.dumps(state))
    os.replace(file + ".new", file)

note(0, "starting")
address = flag("--processes.address")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(address, count, index, coordinator_bind_address=address)
mesh = jax.make_mesh((jax.device_count(),), ("data",), (jax.sharding.AxisType.Auto,))
rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
x = jax.make_array_from_callback((6,), rows, lambda at: jnp.arange(6.0)[at])
total = jax.jit(jnp.sum)
for step in range(1, 1000):
    note(step, "reading")
    if step == 17 and index == WHO:
        print("about to", END, flush=True)
        exec(END)
    time.sleep(0.02)
    note(step, "stepping")
    assert float(total(x)) == 15.0
"""


@pytest.fixture
def run(tmp_path, capfd):
    """run(who, end, flag, ...): what became of three processes, one of which ends so at step 17."""

    def go(who, end, *flags):
        body = tmp_path / "child.py"
        body.write_text(CHILD.replace("WHO", repr(who)).replace("END", repr(end)))
        argv = ["local", "--processes", "3", *flags, "--", "train", "--run", str(tmp_path)]
        status = launch.main(argv, (sys.executable, str(body)))
        notes = [json.loads(file.read_text()) for file in tmp_path.glob("processes/*.json")]
        [last] = [note["time"] for note in notes if note["process"] == who]
        assert time.time() - last < 90  # sooner than JAX by itself, whose heartbeat takes 100 s
        assert len(notes) == 3 and {note["step"] for note in notes} <= {16, 17}
        return status, capfd.readouterr()

    return go


@pytest.mark.slow
@pytest.mark.parametrize(
    "who, end, status, told",
    [
        (0, "os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL (9)"),
        (2, "os._exit(7)", 7, "exited with status 7"),
    ][: None if IN_FULL else 1],
)
def test_a_process_that_dies_ends_the_others_and_is_named(run, who, end, status, told):
    found, printed = run(who, end)
    last = printed.err.splitlines()[-1]
    assert last.startswith(f"[launch] process {who} (pid"), printed.err
    assert last.endswith(f"at step 17, reading, {told}") and found == status
    assert f"[{who}] about to {end}" in printed.out


@pytest.mark.slow
def test_a_process_that_raises_waits_for_the_others_at_its_exit_and_is_named(run):
    """JAX joins all processes before Python exits, so that this one hangs until it is ended."""
    _, printed = run(2, "raise ValueError('no batch 18')", "--hang-after", "5")
    *lines, last = printed.err.splitlines()
    assert last.startswith("[launch] process 2 (pid") and "at step 17, reading, hangs" in last
    # The runtime may print after it that the others are gone.
    assert "[launch] [2] ValueError: no batch 18" in lines
    assert last.endswith("; its last traceback ends: ValueError: no batch 18")


@pytest.mark.slow
@pytest.mark.parametrize(
    "who, end",
    [(0, "os.kill(os.getpid(), signal.SIGSTOP)"), (2, "time.sleep(1000)")][not IN_FULL :],
)
def test_a_process_that_hangs_is_named_and_all_end(run, who, end):
    found, printed = run(who, end, "--hang-after", "5")
    last = printed.err.splitlines()[-1]
    assert last.startswith(f"[launch] process {who} (pid"), printed.err
    what = "is stopped (SIGSTOP, or a debugger)" if "SIGSTOP" in end else "hangs"
    assert f"at step 17, reading, {what}, while the others wait (" in last
    # A process that is stopped may leave its part of the step before unsent.
    waiting = re.search(r"others wait \((.*)\)", last)[1].split("; ")
    assert {*waiting} <= {"step 16, stepping", "step 17, stepping"}
    assert found in (134, 137, 143)
