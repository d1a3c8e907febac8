"""processes: fresh Pythons get the function, its imports and its arguments, and none is left."""

import functools
import json
import os

import jax
import pytest
from jax.sharding import PartitionSpec as P

from shardwise import mesh, processes

devices = functools.partial(print)  # shares its name with an attribute below, and stays here


def named(process, address, word):
    spec = P("data")
    inner = lambda: mesh.devices.__name__  # noqa: E731
    print(json.dumps([process, word, str(spec), inner()]))


def unlucky(process, address):
    print("before")
    if process:
        raise ValueError("on purpose")


def ends(code):
    print(os.environ["XLA_FLAGS"], flush=True)  # before an end that writes nothing more
    os._exit(code)


def twice(x):
    return 2 * x if x < 3 else once(x)


def once(x):
    return os.path.join(str(x), str(twice(1)))


def neighbours(x):
    print(twice(x), flush=True)


def test_functions_beside_it_go_with_it_and_bring_their_imports():
    assert processes.start(neighbours, 5).communicate(timeout=1800)[0] == "5/2\n"


def test_each_process_calls_the_function_with_what_it_names():
    found = [json.loads(out) for out in processes.run(named, 2, "it's")]
    assert found == [[i, "it's", str(P("data")), "devices"] for i in range(2)]


def test_a_failure_says_what_all_printed():
    with pytest.raises(
        RuntimeError, match=r"unlucky ended with \[0, 1\](?s:.)*before(?s:.)*on purp"
    ):
        processes.run(unlucky, 2)


def test_what_is_too_large_for_an_argument_is_refused():
    with pytest.raises(ValueError, match=r"named, with its arguments .* takes 13\d,\d{3} char"):
        processes.start(named, 0, "", "x" * 2**17)


def test_start_leaves_the_end_to_the_caller():
    child = processes.start(ends, 7, xla_flags="--xla_dump_to=")
    assert child.communicate(timeout=1800)[0].split()[-1] == "--xla_dump_to="
    assert child.returncode == 7


def joined(process, address):
    processes.join(address, 2, process, devices=4)
    rows = mesh.make(data=-1)
    facts = jax.process_count(), jax.local_device_count(), rows.size, len(mesh.devices())
    facts += (jax.config.jax_enable_compilation_cache,)  # what is read back has stood still
    print(json.dumps(facts), flush=True)
    processes.leave()


@pytest.mark.slow
def test_processes_that_join_share_their_devices():
    for out in processes.run(joined, 2):
        assert json.dumps([2, 2, 4, 4, False]) in out.splitlines()
