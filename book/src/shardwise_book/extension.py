"""The build: pairs checked, chapters executed, every warning an error.

config-inited   the record of the last good end is read, and other builds wait for this one's
builder-inited  pairs are checked, then stale chapters execute in parallel; now pages may change
the build       MyST-NB reads each page with its outputs, and executes nothing; the gallery of
                failures is filled when every page was read
build-finished  the record of a good end, which no warning has, and no page that was edited

The record is of the state that the book was made from; from another, or none, all is made anew.
Sphinx compares the times of source files. It keeps what an interrupted build left behind, pages
that left the table of contents, and pages that an older version of this extension made.
"""

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import nbformat
from myst_nb.core.read import is_myst_markdown_notebook, read_myst_markdown_notebook
from myst_parser.config.main import MdParserConfig
from sphinx.application import Sphinx
from sphinx.errors import SphinxError

from . import cache, failures, observatory, pairs, site, times

try:
    import fcntl
except ImportError:  # Windows: there, builds at the same time are not kept apart
    fcntl = None

CHAPTERS = "chapters"
FINISHED = "finished"  # the file with the record
STATIC = "_sphinx_design_static"  # sphinx-design writes it before any page, and only where it lacks
CHANGED = "changed while the book was built: run `make book` again."
# By page: its text, and the outputs of its code cells. Sphinx's processes, which read pages, fork.
PAGES: dict[str, tuple[str | None, list]] = {}


class BookError(SphinxError):
    """Stops the build; its text names the chapter, and the cell where there is one."""

    category = "The book was not built"


def setup(app: Sphinx) -> dict[str, Any]:
    # As `-W --keep-going`, also for a plain `jupyter-book build .`: all warnings are shown, and
    # any of them makes the exit status non-zero.
    app.keep_going = True
    app.shardwise_runs = {}  # by page, as `cache.update` returns them
    app.add_directive("run-times", times.RunTimes)
    app.add_directive("observatory", observatory.Observatory)
    app.connect("config-inited", _configure, priority=950)  # when the table of contents is known
    app.connect("builder-inited", _execute, priority=900)  # when MyST's settings are there
    app.connect("env-get-outdated", _outdated)
    app.connect("doctree-read", times.add_run_time)
    app.connect("build-finished", _finish)
    site.setup(app)
    failures.setup(app)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def _configure(app, config):
    for folder in (Path(app.srcdir, package) for package in cache.PACKAGES):
        # Chapters would import another copy than the one whose edits are watched.
        spec = importlib.util.find_spec(folder.name)
        found = spec and Path(spec.origin or "").parent
        if folder.is_dir() and (not found or found.resolve() != folder.resolve()):
            where = "is not installed" if not found else "is imported from elsewhere"
            remedy = "run `pip install -r requirements.txt` in this folder"
            raise BookError(f"{folder.name} {where}: {remedy}.")
    app.shardwise_record = Record(app)


def _execute(app):
    root = Path(app.srcdir)
    path = Path(app.outdir).parent / ".results" / cache.fingerprint(root)
    texts = {name: _text(root, name) for name in app.config.external_site_map}
    notebooks = {n: found for n, text in texts.items() if (found := _notebook(app, n, text))}
    chapters = [root / f"{name}.md" for name in notebooks if name.startswith(f"{CHAPTERS}/")]
    problems = [one.replace(f"{root}/", "") for one in map(pairs.problem, chapters) if one]
    for name, notebook in notebooks.items():
        problems += failures.problems(f"{name}.md", notebook)
    if problems:
        raise BookError("\n".join(problems))
    try:
        runs, failed, _ = cache.update(notebooks, path, root, _say)
    except cache.Changed as error:
        raise BookError(f"{error}: run `make book` again.") from None
    if failed:
        # Place and error on one line each, to read below long tracebacks.
        lines = [one.strip().split("\n") for one in failed]
        short = [" ".join([first, *(line.strip() for line in rest[-1:])]) for first, *rest in lines]
        raise BookError("\n\n".join([*failed, "In short:", *short]))
    for name, notebook in notebooks.items():
        found, silent = failures.collect(f"{name}.md", notebook, runs[name]["outputs"])
        app.shardwise_failures[name] = found
        problems += silent
        given = {"name": name, "config": app.env.myst_config}
        app.env.mystnb_config.custom_formats[f"{name}.md"] = f"{__name__}.read", given, False
    if problems:
        raise BookError("\n".join(problems))
    app.shardwise_runs = runs
    PAGES.clear()  # of a build before it in this process
    for name, text in texts.items():
        PAGES[name] = text, runs[name]["outputs"] if name in runs else []
    app.shardwise_record.begin()


def read(text: str, name: str, config: MdParserConfig) -> nbformat.NotebookNode:
    """A page's notebook with the outputs of its run: the reader of MyST-NB."""
    known, outputs = PAGES[name]
    if text != known:
        raise BookError(f"{name}.md {CHANGED}")
    notebook = read_myst_markdown_notebook(text, config, add_source_map=True)
    for cell, printed in zip(cache.code(notebook), outputs, strict=True):
        cell.outputs = printed
    return notebook


def _text(root, name):
    """A page's text, None where it has no file."""
    path = root / f"{name}.md"
    return path.read_text(encoding="utf-8") if path.exists() else None


def _notebook(app, name, text):
    """That of a page which is executed."""
    if text is not None and is_myst_markdown_notebook(text):
        return read_myst_markdown_notebook(text, app.env.myst_config, add_source_map=True)
    if name.startswith(f"{CHAPTERS}/"):
        raise BookError(
            f"{name}.md: named in _toc.yml, and not there: write it, or take its line out."
            if text is None
            else f"{name}.md: would not be executed: its front matter needs `jupytext: "
            "text_representation: {extension: .md, format_name: myst}`, as in other chapters."
        )
    return None


def _say(text):
    """A line for whoever builds: also where Sphinx, which has one for each page, is quiet."""
    print(f"{text}\n", end="", flush=True)  # at once: several threads tell of chapters


def _outdated(app, env, added, changed, removed):
    """Pages executed since Sphinx last read them: their text may be the same, not their outputs."""
    known = getattr(env, "shardwise_finished", {})
    env.shardwise_finished = {name: run["finished"] for name, run in app.shardwise_runs.items()}
    return [name for name, time in env.shardwise_finished.items() if known.get(name) != time]


def _finish(app, exception):
    if exception:
        return
    # Sphinx would take an edit that came while it read a page for one that it has read.
    root = Path(app.srcdir)
    if changed := [f"{name}.md" for name, (text, _) in PAGES.items() if _text(root, name) != text]:
        raise BookError(f"{', '.join(changed)} {CHANGED}")
    # After a warning too the next build starts over: a page that is up to date repeats none.
    if not app._warncount:
        app.shardwise_record.end()


class Record:
    """The record of one builder's output; as long as it lives, other builds of this book wait."""

    def __init__(self, app: Sphinx) -> None:
        self.output, doctrees = Path(app.outdir), Path(app.doctreedir)
        self.path = doctrees / FINISHED
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
    return cache.digest("\0".join(parts))
