"""Fresh Python processes on this machine, for what one process alone cannot show."""

import inspect
import os
import socket
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any


def command(function: Callable, *args: Any) -> list[str]:
    """The argument list of a Python that calls `function(*args)`, for whatever starts processes.

    It gets the source of the function, and of those beside it that this names, and imports the
    modules, classes and functions that these name and that the caller imported. The arguments go
    there as their `repr`, and nothing else goes.
    """
    sources, imports = {}, set()
    _gather(function, sources, imports)
    call = f"{function.__name__}(*{args!r})"
    return [sys.executable, "-c", "\n".join([*sorted(imports), *sources.values(), call])]


def start(function: Callable, *args: Any, xla_flags: str = "") -> subprocess.Popen:
    """A fresh Python on CPU that runs `command(function, *args)`; its output is captured as text.

    `xla_flags` are added to this process's XLA_FLAGS.
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
    """The output of each of `count` processes, which call `function(process, address, *args)`.

    `process` counts from 0, and `address` is one of this machine alone, at a free port, where
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


def _gather(function: Callable, sources: dict[Callable, str], imports: set[str]) -> None:
    """Add the source of a function and of those beside it that it names, and what they import."""
    sources[function] = textwrap.dedent(inspect.getsource(function))
    here = function.__module__
    for name in sorted(set(_names(function.__code__)) & function.__globals__.keys()):
        found = function.__globals__[name]
        # Of data there is none: what has a place in another module is a class or a function.
        module, original = (getattr(found, a, "") for a in ("__module__", "__qualname__"))
        if isinstance(found, types.ModuleType):
            imports.add(f"import {found.__name__} as {name}")
        elif isinstance(found, types.FunctionType) and (module, found.__name__) == (here, name):
            if found not in sources:
                _gather(found, sources, imports)
        elif module not in ("", None, "__main__", here) and original.isidentifier():
            imports.add(f"from {module} import {original} as {name}")


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)
