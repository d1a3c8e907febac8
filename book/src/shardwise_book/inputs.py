"""The project's files that an execution has read, so that an edit executes what read the file.

Modules that were imported, files of other kinds, and what child processes read: every Python
process of a chapter writes down what it opens (`watch/sitecustomize.py`), and nothing has to be
declared.
"""

import functools
import hashlib
import os
from collections.abc import Mapping
from importlib import machinery
from pathlib import Path

from .watch import sitecustomize

FOLDER = Path(sitecustomize.__file__).parent
FINDERS = (
    (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
    (machinery.SourceFileLoader, machinery.SOURCE_SUFFIXES),
)

Opened = dict[str, set[str]]  # {path below the root: what stat said each time}


def environment(root: Path, log: Path) -> dict[str, str]:
    """The variables that make Python processes write to `log` what they open below `root`."""
    paths = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "SHARDWISE_WATCHED": str(root),
        "SHARDWISE_OPENED": str(log),
    }


def opened(log: Path) -> Opened:
    """What the processes wrote there."""
    found: Opened = {}
    for line in log.read_text().splitlines() if log.exists() else []:
        path, _, state = line.partition("\t")
        found.setdefault(path, set()).add(state)
    return found


class Files:
    """The project's files as they are now, below the folder `root`; each is read once."""

    def __init__(self, root: Path) -> None:
        self.root, self.digest = root, functools.cache(self._digest)

    def same(self, digests: Mapping[str, str]) -> bool:
        """Whether all files are as they were when `digests` was made."""
        return all(self.digest(path) == digest for path, digest in digests.items())

    def edited(self, opened: Opened) -> list[str]:
        """The paths of those that are no longer what was opened."""
        now = {path: {sitecustomize.state(str(self.root / path))} for path in opened}
        return sorted(path for path in opened if opened[path] != now[path])

    def _digest(self, below: str) -> str:
        """A hash of the file's content; empty where an import would not find it there.

        A module may be gone, or another one stand before it: a package goes before a module.
        """
        path = self.root / below
        if path.suffix == ".py":
            module = path.parent if path.name == "__init__.py" else path
            found = machinery.FileFinder(str(module.parent), *FINDERS).find_spec(module.stem)
            if not found or found.origin != str(path):
                return ""
        try:
            return hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:
            return ""
