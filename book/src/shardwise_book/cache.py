"""Executes what is stale, several chapters at a time, and keeps what cells printed.

A file holds one run, and is named for its code cells; the folder is named for what all outputs
depend on besides: the environment and what is installed. With each run stand the project's files
that it read (`inputs`), and it holds as long as these are the same.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import nbformat
from packaging.requirements import Requirement

from . import execute, inputs

STACK = ["jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "matplotlib"]
STACK += ["libtpu"]  # one chapter compiles for chips where it is there
ROOTS = (*STACK, "shardwise", "shardwise-book", "ipykernel", "ipython")
PACKAGES = ("src/shardwise", "book/src/shardwise_book")
KEPT = 4  # other stacks, and runs of a page: so that going back to one executes nothing
# Of the environment: what the libraries of the stack and Python itself take settings from.
SETTINGS = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "TF_", "FLAX_", "ORBAX_", "MPL")
SETTINGS += ("PYTHONOPTIMIZE", "PYTHONWARNINGS", "PYTHONHASHSEED", "OMP_NUM_THREADS", "TZ", "LC_")

Data = dict[str, Any]


class Changed(Exception):
    """A file was edited while chapters ran: their outputs may be of either state."""


def versions() -> dict[str, str]:
    """Python's and the stack's versions, by name; packages that are not installed are left out."""
    found = closure()
    return {"Python": platform.python_version()} | {n: found[n] for n in STACK if n in found}


@functools.cache
def closure() -> dict[str, str]:
    """Versions, by name, of what is installed of ROOTS and all that they require."""
    found, left = {}, [Requirement(root) for root in ROOTS]
    while left:
        one = left.pop()
        if one.name in found or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[one.name] = importlib.metadata.version(one.name)
            left += map(Requirement, importlib.metadata.requires(one.name) or [])
    return found


def fingerprint(root: Path) -> str:
    """A name for what every output depends on beside the notebook and the files that it read."""
    settings = {k: v for k, v in execute.environment().items() if k.startswith(SETTINGS)}
    parts = [
        platform.python_version(),
        *(Path(m.__file__).read_text() for m in (execute, inputs, inputs.sitecustomize)),
        sorted(closure().items()),
        sorted(settings.items()),
        # What stands here may be imported in place of an installed package of that name.
        sorted(
            path.name
            for package in PACKAGES
            for path in (root / package).parent.glob("[!_.]*")
            if path.suffix != ".egg-info"
        ),
    ]
    return digest(repr(parts))[:16]


def jobs() -> int:
    """How many chapters run at a time: SHARDWISE_JOBS, or the cores that this process may use."""
    asked = os.environ.get("SHARDWISE_JOBS")
    if asked is None:
        usable = getattr(os, "sched_getaffinity", None)
        return len(usable(0)) if usable else os.cpu_count() or 1
    if not asked.isdigit() or int(asked) < 1:
        raise ValueError(f"SHARDWISE_JOBS={asked!r}: expected a whole number from 1 up.")
    return int(asked)


class Results:
    """The runs in the folder `path`; `root` is the project's folder."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self.files = path, inputs.Files(root)

    def read(self, name: str, notebook: nbformat.NotebookNode) -> Data | None:
        """A page's run of the same cells; None where none is, or is no longer what was written."""
        try:
            written, text = self.place(name, notebook).read_text(encoding="utf-8").split("\n")
        except (OSError, ValueError):
            return None
        return nbformat.from_dict(json.loads(text)) if written == digest(text) else None

    def find(self, name: str, notebook: nbformat.NotebookNode) -> Data | None:
        """That run, or None where the notebook must be executed (again)."""
        known = self.read(name, notebook)
        if not known or not self.files.same(known["files"]):
            return None
        used(self.place(name, notebook))
        return known

    def keep(
        self, name: str, notebook: nbformat.NotebookNode, run: execute.Run, opened: inputs.Opened
    ) -> Data:
        """Store a good run of the notebook that was asked for; nothing where a file `Changed`."""
        files = inputs.Files(self.files.root)  # as they are now, not as they were before
        if edited := files.edited(opened):
            raise Changed(f"{', '.join(edited)} changed while chapters ran")
        data = {
            "files": {path: files.digest(path) for path in opened},
            "execution_seconds": run.seconds,
            "devices": run.devices,
            "finished": time.time(),
            "outputs": [cell.outputs for cell in code(run.notebook)],
        }
        text, path = json.dumps(data), self.place(name, notebook)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{digest(text)}\n{text}", encoding="utf-8")
        return data

    def place(self, name: str, notebook: nbformat.NotebookNode) -> Path:
        """The file of a page's run of these cells, in a folder of the page."""
        # Tags too change what an execution means.
        cells = [(cell.source, cell.metadata.get("tags", [])) for cell in code(notebook)]
        return self.path / name.replace("/", ".") / f"{digest(repr(cells))}.json"


def update(
    notebooks: Mapping[str, nbformat.NotebookNode],
    path: Path,
    root: Path,
    say: Callable[[str], None],
) -> tuple[dict[str, Data], list[str], list[str]]:
    """Execute those of `notebooks` that the folder `path` has no run of; their names lack the .md.

    Returns `(data, failures, executed)`: what is stored for each name, a message for each that
    failed, and the names that ran now. Progress goes, line by line, to the function `say`; `root`
    is the project's folder. Whatever ends this early ends what runs, too.

    Raises:
      Changed: a file was edited after a chapter had read it; that run is not stored.
    """
    results = Results(path, root)
    data = {name: results.find(name, notebook) for name, notebook in notebooks.items()}
    used(path)
    prune(path.parent, KEPT + 1)
    for name, notebook in notebooks.items():  # runs of pages out of the contents stay
        prune(results.place(name, notebook).parent, KEPT)
    stale = [name for name, known in data.items() if known is None]
    if not stale:
        say(f"Chapters: all {len(notebooks)} unchanged since they were executed.")
        return data, [], []
    at_once = min(jobs(), len(stale))
    say(f"Chapters: {len(stale)} of {len(notebooks)} to execute, {at_once} at a time.")
    failures, kernels = [], execute.Kernels()
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        lengths = {n: _length(notebooks[n], results.read(n, notebooks[n])) for n in stale}
        ordered = sorted(stale, key=lengths.get, reverse=True)
        pending = {pool.submit(_run, n, notebooks[n], root, say, kernels): n for n in ordered}
        try:
            for done, future in enumerate(concurrent.futures.as_completed(pending), start=1):
                name, (run, opened) = pending[future], future.result()
                verdict = "FAILED after" if run.failure else "done in"
                say(f"  {name}.md: {verdict} {run.seconds:.1f} s ({done} of {len(stale)})")
                if run.failure:
                    failures.append(run.failure)
                else:
                    data[name] = results.keep(name, notebooks[name], run, opened)
        except BaseException:  # Ctrl-C too
            pool.shutdown(wait=False, cancel_futures=True)
            kernels.stop()
            raise
    return data, failures, stale


def used(path: Path) -> None:
    """Note that a stack or a run was of use, which `prune` goes by; not if it is another user's."""
    with contextlib.suppress(OSError):
        os.utime(path)


def prune(folder: Path, kept: int) -> None:
    """Delete all but the `kept` newest of what is in a folder: stacks, or the runs of a page."""
    for old in sorted(folder.glob("*"), key=lambda one: one.stat().st_mtime)[:-kept]:
        with contextlib.suppress(OSError):  # another user's
            shutil.rmtree(old) if old.is_dir() else old.unlink()


def _run(name, notebook, root, say, kernels):
    say(f"  {name}.md: runs")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "opened")
        watched = inputs.environment(root, log)
        return execute.run(notebook, f"{name}.md", kernels, watched), inputs.opened(log)


def _length(notebook, known):
    """What to sort by: seconds of its known run; else cells that wait for processes, then code."""
    cells = [cell.source for cell in code(notebook)]
    waits = sum("subprocess" in cell or "processes." in cell for cell in cells)
    return known["execution_seconds"] if known else math.inf, waits, sum(map(len, cells))


def code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """A notebook's code cells."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def digest(text: str) -> str:
    """What tells a text from any other."""
    return hashlib.sha256(text.encode()).hexdigest()
