"""A list of the project's files that this Python process opens, kept by Python's own audit events.

Python imports this module whenever it starts, in the kernel and in every process that a chapter
starts, where the build has put its folder on PYTHONPATH: `inputs` does, and reads the list.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
import sys


def watch(root: str, log: str) -> None:
    """Append a line to `log` for each file below the folder `root` when it is first read.

    A line is the path below `root`, then what `stat` says of it: what was opened is known to be
    what is there later. `.venv`, `_build` and the like are no part of the project.
    """
    roots = {os.path.join(folder, "") for folder in (root, os.path.realpath(root))}
    seen = set()

    def opened(event, arguments):
        if event != "open":  # as most are not, and they are many
            return
        path, _, flags = arguments
        if path in seen or not isinstance(path, str) or flags & (os.O_WRONLY | os.O_RDWR):
            return
        seen.add(path)
        path = os.path.abspath(path)
        below = next((path[len(folder) :] for folder in roots if path.startswith(folder)), "")
        if not below or below.startswith((".", "_build" + os.sep)):
            return
        with contextlib.suppress(ValueError):  # compiled code stands for its source
            below = importlib.util.source_from_cache(below)
            path = importlib.util.source_from_cache(path)
        # One write for each line, so that processes do not mix theirs.
        handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, f"{below}\t{state(path)}\n".encode())
        os.close(handle)

    sys.addaudithook(opened)


def state(path: str) -> str:
    """What `stat` says of a file that changes with each edit; empty where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"


def another() -> None:
    """Import the sitecustomize that stands behind this one, as Python would have done."""
    here = os.path.dirname(os.path.abspath(__file__))
    folders = [folder for folder in sys.path if os.path.abspath(folder) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", folders)
    if spec and spec.loader:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if "SHARDWISE_WATCHED" in os.environ:
    watch(os.environ["SHARDWISE_WATCHED"], os.environ["SHARDWISE_OPENED"])
    another()
