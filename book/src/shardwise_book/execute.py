"""Runs one notebook in a fresh kernel of this interpreter, and says what went wrong where.

`python -m shardwise_book.execute chapters/*.ipynb` runs notebooks for nothing but their errors.
That needs ipykernel and nbclient only, so that it works in environments without Jupyter Book.
"""

import argparse
import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import nbformat
import psutil
from ipykernel.kernelspec import make_ipkernel_cmd
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from traitlets.config import Config

from . import compiler

PRINTED = 20  # lines of what a kernel that died had written
ANSI = re.compile(r"\x1b\[[0-9;]*m")
# Both are for cells that hang, on however slow a machine: no clock on the wall ends one that works.
STILL_S = 600  # without a hundredth of it in processor time
BUSY_S = 1800  # of processor time: a whole chapter takes well under a minute
LOOK_S = 5

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # the book speaks of simulated devices, whatever the machine has
    "TF_CPP_MIN_LOG_LEVEL": "3",  # the compiler's remarks on this machine belong on no page
    "GRPC_VERBOSITY": "ERROR",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}

DEVICES = """\
import sys
if "jax" in sys.modules:
    mesh = sys.modules.get("shardwise.mesh")
    devices = mesh.devices() if mesh else sys.modules["jax"].devices()
    print(len(devices), devices[0].device_kind)
"""


@dataclasses.dataclass
class Run:
    """One execution: the notebook with outputs, seconds, "8 cpu" and the like, what went wrong."""

    notebook: nbformat.NotebookNode
    seconds: float
    devices: str = ""
    failure: str | None = None


class ThisInterpreter(AsyncKernelManager):
    """Starts kernels with `sys.executable`, whatever a python3 kernelspec at home may say."""

    arguments = ()  # more of them for the kernel's command line

    @property
    def kernel_spec(self) -> KernelSpec:
        # Errors only: each kernel warns that its traffic on this machine is not encrypted.
        quiet = "--IPKernelApp.log_level=40"
        # JAX keeps what it traced: millions of objects, which the collector would go through
        # again and again, a tenth of a chapter's time.
        rarely = "--IPKernelApp.exec_lines=import gc; gc.set_threshold(2000, 20, 50)"
        command = make_ipkernel_cmd(extra_arguments=[quiet, rarely, *self.arguments])
        return KernelSpec(argv=command, display_name="Python 3", language="python")


class Client(NotebookClient):
    """Executes a notebook in a kernel, a session of its own: Ctrl-C alone does not reach it."""

    @property
    def process(self) -> subprocess.Popen | None:
        return getattr(getattr(self.km, "provisioner", None), "process", None)

    def kill(self) -> None:
        """Kill the kernel with all that it has started; whoever executes gets an exception."""
        process = self.process
        if process and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    def processor_seconds(self) -> float:
        """Of the kernel and all that it has started, ended ones included."""
        total, process = 0.0, self.process
        with contextlib.suppress(psutil.Error):
            kernel = psutil.Process(process.pid) if process else None
            for member in [kernel, *kernel.children(recursive=True)] if kernel else []:
                with contextlib.suppress(psutil.Error):  # it ended, and counts with its parent's
                    total += sum(member.cpu_times()[:4])  # user, system, both of ended children
        return total


class Kernels:
    """Those that run now."""

    def __init__(self) -> None:
        self.clients: set[Client] = set()
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True
        for client in list(self.clients):
            client.kill()


class Watchdog:
    """A thread that kills a kernel whose cell hangs, and remembers why in `verdict`."""

    def __init__(self, spent: Callable[[], float], kill: Callable[[], None]) -> None:
        self.verdict: str | None = None
        self._spent, self._kill, self._ended = spent, kill, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.begin()

    def begin(self) -> None:
        """A cell begins."""
        now = self._spent()
        self._cell, self._moved = now, (time.monotonic(), now)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self):
        while not self._ended.wait(LOOK_S):
            now, spent = time.monotonic(), self._spent()
            if spent - self._moved[1] >= STILL_S / 100:
                self._moved = now, spent
            if now - self._moved[0] > STILL_S:
                self.verdict = f"it stood still: no work of the processor in {STILL_S:g} s."
            elif spent - self._cell > BUSY_S:
                self.verdict = f"no end after {BUSY_S:g} s of the processor's time."
            if self.verdict:
                return self._kill()


def run(
    notebook: nbformat.NotebookNode,
    name: str,
    kernels: Kernels | None = None,
    settings: Mapping[str, str] | None = None,
) -> Run:
    """Execute a copy of `notebook` in an empty directory; `name` stands in messages.

    The kernel sees this process's environment, which wins over ENVIRONMENT, and `settings` before
    both; temporary files that a chapter leaves behind go with it. `kernels` can stop it. What
    compiled code writes past Python goes to a file, whose end is told where the kernel dies.
    """
    kernels = kernels or Kernels()
    notebook = nbformat.from_dict(notebook)
    lines = notebook.metadata.pop("source_map", None)
    notebook.cells.append(nbformat.v4.new_code_cell(DEVICES))
    started, current = time.perf_counter(), [0]

    def begin(cell, cell_index):
        if kernels.stopped:  # while this one was still starting
            raise DeadKernelError("stopped")
        current[0] = cell_index
        guard.begin()

    failure = None
    with (
        tempfile.TemporaryDirectory() as empty,
        tempfile.TemporaryDirectory() as temporary,
        tempfile.TemporaryDirectory() as sockets,
        tempfile.TemporaryFile() as printed,
    ):
        # By files where the system can: a port that was free when it was chosen may be another
        # program's when the kernel takes it.
        reached = {"transport": "ipc", "connection_file": str(Path(sockets, "kernel.json"))}
        settled = {"ThisInterpreter": reached if hasattr(socket, "AF_UNIX") else {}}
        hooks = {"kernel_manager_class": ThisInterpreter, "on_cell_start": begin}
        options = {"timeout": None, "record_timing": False, "config": Config(settled)}
        client = Client(notebook, **hooks, **options)
        guard = Watchdog(client.processor_seconds, client.kill)
        client.resources["metadata"] = {"path": empty}
        kernels.clients.add(client)
        try:
            seen = {**environment(), **(settings or {}), "TMPDIR": temporary}
            with guard:
                _in_a_loop(client, env=seen, stdout=printed, stderr=printed)
        except (CellExecutionError, DeadKernelError) as error:
            reason = guard.verdict or _reason(error, printed)
            where = describe(name, notebook, current[0], lines)
            failure = f"{where} failed:\n{textwrap.indent(reason.rstrip(), '    ')}"
        finally:
            kernels.clients.discard(client)
        _clean(notebook, empty)
    devices = "".join(output.get("text", "") for output in notebook.cells.pop().outputs).strip()
    for index, cell in enumerate(notebook.cells):
        raised = any(output.output_type == "error" for output in cell.get("outputs", []))
        if "raises-exception" in cell.metadata.get("tags", []) and not raised and not failure:
            where = describe(name, notebook, index, lines)  # it would teach what is no longer so
            told = "is tagged raises-exception, and raised nothing: mend it or untag it."
            failure = f"{where} {told}"
    return Run(notebook, time.perf_counter() - started, devices, failure)


def describe(
    name: str, notebook: nbformat.NotebookNode, index: int, lines: Sequence[int] | None = None
) -> str:
    """The cell's place and first line; code cells are counted from 1, as In[…] counts them."""
    number = sum(cell.cell_type == "code" for cell in notebook.cells[: index + 1])
    where = f" (line {lines[index] + 1})" if lines and index < len(lines) else ""
    first = next(filter(str.strip, notebook.cells[index].source.split("\n")), "")
    return f"{name}: cell {number}{where} `{first.strip()}`"


def environment() -> dict[str, str]:
    """What kernels see."""
    # A backend that a test or a shell asked for would leave the chapters without figures.
    inline = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    xla = {"XLA_FLAGS": f"{compiler.flags()} {os.environ.get('XLA_FLAGS', '')}".strip()}
    return {**ENVIRONMENT, **os.environ, **inline, **xla}


def _reason(error, printed):
    if isinstance(error, DeadKernelError):
        printed.seek(0)
        end = printed.read().decode(errors="replace").splitlines()[-PRINTED:]
        died = "the kernel died (out of memory, perhaps, or a crash in compiled code)."
        return "\n".join([died, *end])
    return ANSI.sub("", error.traceback)


def _in_a_loop(client, **options):
    """Execute in an event loop that is closed; in a thread where one of the caller's runs here."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(client.async_execute(**options))
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(client.async_execute(**options))).result()


def _clean(notebook, directory):
    """Take this machine's paths out of what cells print: a page shows none."""
    folders = [directory, os.path.realpath(directory), os.path.dirname(os.__file__)]
    printed = r"[/~][^\s'\"<>:\\]*"  # of a path, in JSON
    paths = [rf"{printed}/site-packages/", rf"{printed}/src/(?=shardwise(?:_book)?/)"]
    path = re.compile("|".join([*paths, *(f"{re.escape(folder)}/?" for folder in folders)]))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            told = json.dumps(cell.outputs, ensure_ascii=False)
            cell.outputs = nbformat.from_dict(json.loads(path.sub("", told)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named notebooks one after the other; exit status 1 where a cell of any failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--preload", metavar="MODULE", help="what the kernel has imported already")
    options = parser.parse_args(arguments)
    if options.preload:
        ThisInterpreter.arguments = (f"--IPKernelApp.exec_lines=import {options.preload}",)
    failed = 0
    for path in options.notebooks:
        result = run(nbformat.read(path, as_version=4), path.name)
        told = f"FAILED\n{result.failure}" if result.failure else f"{result.seconds:.1f} s"
        print(f"  {path.name}: {told}", flush=True)
        failed += bool(result.failure)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
