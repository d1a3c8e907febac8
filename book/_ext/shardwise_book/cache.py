"""Executes what is stale, several chapters at a time; results lie in a jupyter-cache for MyST-NB.

jupyter-cache knows a notebook by its code cells alone, so the cache's folder is named for all else
that outputs depend on: the package's source and the versions of the stack.
"""

import concurrent.futures
import hashlib
import importlib.metadata
import os
import platform
import shutil
import time
from pathlib import Path

from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn

from . import execute

STACK = ["jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "matplotlib"]
KEPT = 4  # caches of earlier states, so that going back to one executes nothing


def versions():
    """Python's and the stack's versions, by name; packages that are not installed are left out."""
    found = {"Python": platform.python_version()}
    for name in STACK:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def fingerprint(package):
    """A name for what outputs depend on beside the notebook: `package`'s files and the stack."""
    digest = hashlib.sha256(repr(sorted(versions().items())).encode())
    digest.update(Path(execute.__file__).read_bytes())
    for path in sorted(Path(package).rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and ".egg-info" not in str(path):
            digest.update(path.relative_to(package).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def jobs():
    """How many chapters run at a time: SHARDWISE_JOBS, or the cores that this process may use."""
    asked = os.environ.get("SHARDWISE_JOBS")
    if asked is None:
        usable = getattr(os, "sched_getaffinity", None)
        return len(usable(0)) if usable else os.cpu_count() or 1
    if not asked.isdigit() or int(asked) < 1:
        raise ValueError(f"SHARDWISE_JOBS={asked!r}: expected a whole number from 1 up.")
    return int(asked)


class Results:
    """What is known of executions in the jupyter-cache at `path`."""

    def __init__(self, path):
        self.cache = get_cache(path)

    def find(self, notebook):
        """The data stored with `notebook`'s last good run, or None where it must run (again)."""
        try:
            record = self.cache.match_cache_notebook(notebook)
        except KeyError:
            return None
        # Tags change what an execution means, and jupyter-cache does not look at them.
        return record.data if record.data.get("tags") == _tags(notebook) else None

    def keep(self, name, notebook, run):
        """Store a good run; `notebook` is the one that was asked for."""
        data = {
            "execution_seconds": run.seconds,
            "devices": run.devices,
            "tags": _tags(notebook),
            "finished": time.time(),
        }
        bundle = CacheBundleIn(run.notebook, name, data=data)
        self.cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
        return data


def update(notebooks, path, say):
    """Execute those of `notebooks` (a dict by name) that the cache at `path` has no run of.

    Returns `(data, failures, executed)`: what is stored for each name, a message for each that
    failed, and the names that ran now. Progress goes, line by line, to the function `say`.
    """
    prune(Path(path))
    results = Results(path)
    data = {name: results.find(notebook) for name, notebook in notebooks.items()}
    stale = [name for name, known in data.items() if known is None]
    if not stale:
        say(f"Chapters: all {len(notebooks)} unchanged since they were executed.")
        return data, [], []
    at_once = min(jobs(), len(stale))
    say(f"Chapters: {len(stale)} of {len(notebooks)} to execute, {at_once} at a time.")
    failures = []
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        pending = {pool.submit(_run, name, notebooks[name], say): name for name in stale}
        for done, future in enumerate(concurrent.futures.as_completed(pending), start=1):
            name, run = pending[future], future.result()
            verdict = "FAILED after" if run.failure else "done in"
            say(f"  {name}: {verdict} {run.seconds:.1f} s ({done} of {len(stale)})")
            if run.failure:
                failures.append(run.failure)
            else:
                data[name] = results.keep(name, notebooks[name], run)
    return data, failures, stale


def table(data, executed=()):
    """The run times as lines of text; `executed` are those that ran in this build."""
    width = max(map(len, data), default=0)
    lines = [
        f"  {name:<{width}}  {entry['execution_seconds']:7.1f} s"
        + ("" if name in executed else "  (earlier)")
        for name, entry in data.items()
    ]
    total = sum(entry["execution_seconds"] for entry in data.values())
    return ["Run times", *lines, f"  {'all':<{width}}  {total:7.1f} s"]


def prune(path):
    """Delete the oldest of the caches beside `path`, beyond the KEPT newest."""
    if path.parent.is_dir():
        others = [other for other in path.parent.iterdir() if other.is_dir() and other != path]
        for old in sorted(others, key=lambda other: other.stat().st_mtime)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)


def _run(name, notebook, say):
    say(f"  {name}: runs")
    return execute.run(notebook, name)


def _tags(notebook):
    return [cell.metadata.get("tags", []) for cell in notebook.cells if cell.cell_type == "code"]
