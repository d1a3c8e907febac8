"""What the last build that ended well was made from: another state, or none, and all is made anew.

Sphinx compares the times of source files. It keeps what an interrupted build left behind, pages
that left the table of contents, and pages that an older version of this extension made.
"""

import hashlib
import shutil
import sys
from pathlib import Path

from sphinx.application import Sphinx

try:
    import fcntl
except ImportError:  # Windows: there, builds at the same time are not kept apart
    fcntl = None

NAME = "finished"
STATIC = "_sphinx_design_static"  # sphinx-design writes it before any page, and only where it lacks


class Record:
    """The record of one builder's output; as long as it lives, other builds of this book wait."""

    def __init__(self, app: Sphinx) -> None:
        self.output, doctrees = Path(app.outdir), Path(app.doctreedir)
        self.path = doctrees / NAME
        self._lock = _lock(doctrees.with_name(".lock"))
        self.state = _state(app)
        self.kept = self.path.exists() and self.path.read_text() == self.state
        if not self.kept:
            shutil.rmtree(doctrees, ignore_errors=True)  # so Sphinx reads and writes every page

    def begin(self) -> None:
        """From here on, until `end`, what is on disk is no book."""
        self.path.unlink(missing_ok=True)
        if not self.kept:
            for old in self.output.iterdir():
                if old.is_dir() and old.name != STATIC:
                    shutil.rmtree(old)
                elif not old.is_dir():
                    old.unlink()

    def end(self) -> None:
        """All pages are written, without a warning."""
        self.path.write_text(self.state)


def _lock(path: Path):
    """An open file that one process holds at a time; the system frees it when that process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = path.open("w")
    if fcntl:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("Another build of this book runs: waiting for its end.", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def _state(app: Sphinx) -> str:
    """What the set of pages and their making depend on, and Sphinx does not look at."""
    static = [Path(app.srcdir, folder) for folder in app.config.html_static_path]
    parts = [
        Path(app.outdir).name,
        *app.config.external_site_map,
        *(path.name for folder in static for path in sorted(folder.rglob("*"))),
        *(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))),
        # What is installed, by the folders that say so: their names have the versions.
        *sorted({one.name for folder in sys.path for one in Path(folder).glob("*-info")}),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
