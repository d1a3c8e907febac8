"""Fresh Python processes on this machine, for what one process alone cannot show."""

import functools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle

_registering = threading.Lock()


def command(function: Callable, *args: Any) -> list[str]:
    """The command, a list of words, of a Python that calls `function(*args)`, for `subprocess`.

    Function and arguments are pickled by value, with what the function uses of its own module (or
    of modules below it, if that is a package's __init__); the rest of that module is not run there.
    Other modules are imported.

    Raises:
      ValueError: the pickle is longer than an argument may be, 128 KiB on Linux.
    """
    own = sys.modules[function.__module__]
    with _registering:
        asked = own.__name__ in cloudpickle.list_registry_pickle_by_value()
        cloudpickle.register_pickle_by_value(own)
        try:
            called = cloudpickle.dumps(functools.partial(function, *args))
        finally:
            if not asked:
                cloudpickle.unregister_pickle_by_value(own)
    code = f"import pickle; pickle.loads({called!r})()"
    if len(code) >= 2**17:
        raise ValueError(
            f"processes: {function.__name__}, with its arguments and all that it names of its "
            f"module, takes {len(code):,} characters, and a command's argument has up to 131,071; "
            f"let it read large arrays from a file, or make them."
        )
    return [sys.executable, "-c", code]


def start(function: Callable, *args: Any, xla_flags: str = "") -> subprocess.Popen:
    """The `subprocess.Popen` of a fresh Python on CPU that calls `function(*args)`, by `command`.
    Its pipes capture the output as text, and `xla_flags` are added to this process's XLA_FLAGS.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} {xla_flags}".strip()
    return subprocess.Popen(
        command(function, *args),
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(function: Callable, count: int, *args: Any, xla_flags: str = "") -> list[str]:
    """A list of the texts that `count` processes print by `function(process, address, *args)`.

    `process` counts from 0, and `address` is 127.0.0.1 with a free port, at which
    `jax.distributed.initialize(address, count, process, coordinator_bind_address=address)` lets
    them find each other. None outlives this call, which waits an hour for each at most. `xla_flags`
    are as in `start`.

    Raises:
      RuntimeError: one of them failed or took too long; the message holds what all printed.
    """
    address = free_address()
    children = [start(function, i, address, *args, xla_flags=xla_flags) for i in range(count)]
    try:
        printed = [_output(child) for child in children]
    finally:
        for child in children:
            child.kill()
    codes = [child.returncode for child in children]
    if any(codes):
        told = "\n".join(f"process {i}:\n{out}\n{err}" for i, (out, err) in enumerate(printed))
        raise RuntimeError(f"processes.run: {function.__name__} ended with {codes}.\n{told}")
    return [out for out, _ in printed]


def free_address(host: str = "127.0.0.1", bind: str = "127.0.0.1") -> str:
    """An address of this machine, by default for itself alone, at a port that is free now."""
    with socket.socket() as free:
        free.bind((bind, 0))
        return f"{host}:{free.getsockname()[1]}"


def _output(child):
    try:
        return child.communicate(timeout=3600)
    except subprocess.TimeoutExpired:  # another may have failed, and this one waits for it
        child.kill()
        return child.communicate()
