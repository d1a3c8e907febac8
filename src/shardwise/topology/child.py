"""The child process in which compilers run, and a cache on disk of what they said there."""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib

from shardwise.topology import gpu
from shardwise.topology.chip import Chip

# libtpu asks for a machine's TPU, its metadata server and a lock, and logs that it has none; the
# GPUs' compiler, that there is no driver.
_QUIET = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
_FORM = 1  # of a cache's entry: raise it when an entry's content changes
# What would change the program without being part of the request.
_DROPPED = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_COMPILATION_CACHE_DIR")


def versions(chip: Chip | None = None) -> dict[str, str]:
    """The versions of jax, jaxlib and a chip's compiler, libtpu by default; or an ImportError."""
    told = {"jax": jax.__version__, "jaxlib": jaxlib.__version__}
    if chip and chip.node:
        return told | {"compiler": gpu.find()[1]}
    try:
        return told | {"libtpu": importlib.metadata.version("libtpu")}
    except importlib.metadata.PackageNotFoundError:
        how = "by pip install 'shardwise[tpu]' (Google Cloud's terms apply to it)."
        raise gpu.absent("Google's TPU compiler", "libtpu", how) from None


def run(request: Mapping[str, Any], module: str) -> dict[str, Any]:
    """The result of the compiler: sizes, text and report, or a refusal; an error where it fails."""
    with tempfile.TemporaryDirectory(prefix="shardwise-") as name:
        folder = Path(name)
        (folder / "module.mlir").write_text(module)
        options = {**request["options"], "xla_dump_to": str(folder / "dump")}
        library = str(gpu.find()[0]) if "target" in request else ""
        told = {**request, "options": options, "library": library}
        (folder / "request.json").write_text(json.dumps(told))
        worker = str(Path(__file__).with_name("worker.py"))
        command = [sys.executable, "-P", worker, name]  # -P: import nothing from this folder
        env = {k: v for k, v in os.environ.items() if k not in _DROPPED} | _QUIET
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode or not (folder / "result.json").exists():
            raise _failure(request["name"], done)
        result = json.loads((folder / "result.json").read_text())
        # Where the compiler refuses, what it had made until then stands in the dump.
        result["text"] = _read(folder, "hlo.txt") or _read(folder, "dump/*after_optimizations.txt")
        result["report"] = _read(folder, "dump/*memory-usage-report.txt")
        result["assignment"] = _read(folder, "dump/*after_optimizations-buffer-assignment.txt")
        return result


def _failure(name, done):
    printed = done.stdout + done.stderr
    if "Invalid TPU external name" in printed:
        version = importlib.metadata.version("libtpu")
        how = "it needs a newer JAX, with the libtpu beside it."
        return ValueError(f"topology.compile: libtpu {version} does not know {name}; {how}")
    if missing := re.search(r"FFI handler registered for (\w+)|(cu\w+) internal error", printed):
        return ValueError(
            f"topology.compile: the program calls {missing[1] or missing[2]}, of CUDA's own "
            f"libraries (solvers, decompositions), which are not here; leave that part out of it."
        )
    said = "\n".join(printed.strip().splitlines()[-8:])
    return RuntimeError(
        f"topology.compile: the compiler for {name} ended with {done.returncode}:\n{said}"
    )


def _read(folder, pattern):
    """The text of the last file of that pattern, which is the whole program's; "" without one."""
    found = sorted(folder.glob(pattern))
    return found[-1].read_text() if found else ""


def folder() -> Path:
    """The folder of the cache: $SHARDWISE_CACHE, or shardwise/ in the user's cache."""
    if chosen := os.environ.get("SHARDWISE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise"


def cached(asked: list[Any], module: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` returned when so much was asked of a program first; kept in `folder()`, where a
    reader finds all of an entry, or nothing.
    """
    name = hashlib.sha256(f"{json.dumps([_FORM, *asked], sort_keys=True)}\n{module}".encode())
    path = folder() / "compiled" / f"{name.hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError):
        if isinstance(entry := json.loads(path.read_text()), dict):
            return entry
    entry = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(entry, file)
    os.replace(file.name, path)
    return entry
