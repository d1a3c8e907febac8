"""The build: pairs checked, chapters executed, every warning an error.

config-inited   the folder of results is named for the state of the stack
builder-inited  pairs are checked, then stale chapters execute in parallel; now pages may change
the build       MyST-NB reads each page with its outputs, and executes nothing; the gallery of
                failures is filled when every page was read
build-finished  the record of a good end, which no warning has
"""

import importlib.util
from pathlib import Path
from typing import Any

import nbformat
from myst_nb.core.read import is_myst_markdown_notebook, read_myst_markdown_notebook
from myst_parser.config.main import MdParserConfig
from sphinx.application import Sphinx
from sphinx.errors import SphinxError

from . import cache, failures, observatory, pairs, record, site, times

CHAPTERS = "chapters"


class BookError(SphinxError):
    """Stops the build; its text names the chapter, and the cell where there is one."""

    category = "The book was not built"


def setup(app: Sphinx) -> dict[str, Any]:
    # As `-W --keep-going`, also for a plain `jupyter-book build .`: all warnings are shown, and
    # any of them makes the exit status non-zero.
    app.keep_going = True
    app.shardwise_runs = {}
    app.add_directive("run-times", times.RunTimes)
    app.connect("config-inited", _configure, priority=950)  # when the table of contents is known
    app.connect("builder-inited", _execute, priority=900)  # when MyST's settings are there
    app.connect("env-get-outdated", _outdated)
    app.connect("doctree-read", times.add_run_time)
    app.connect("build-finished", _finish)
    site.setup(app)
    failures.setup(app)
    observatory.setup(app)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def _configure(app, config):
    for package in cache.PACKAGES:
        _check_package(Path(app.srcdir, package))
    app.shardwise_record = record.Record(app)
    state = cache.fingerprint(Path(app.srcdir))
    app.shardwise_results = Path(app.outdir).parent / ".results" / state


def _check_package(folder):
    """Chapters would import another copy than the one whose edits are watched."""
    spec = importlib.util.find_spec(folder.name)
    found = spec and Path(spec.origin or "").parent
    if folder.is_dir() and (not found or found.resolve() != folder.resolve()):
        where = "is not installed" if not found else "is imported from elsewhere"
        remedy = "run `pip install -r requirements.txt` in this folder"
        raise BookError(f"{folder.name} {where}: {remedy}.")


def _execute(app):
    root, path = Path(app.srcdir), app.shardwise_results
    notebooks = dict(_notebooks(app))
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
        given = {"name": name, "path": path, "config": app.env.myst_config}
        app.env.mystnb_config.custom_formats[f"{name}.md"] = f"{__name__}.read", given, False
    if problems:
        raise BookError("\n".join(problems))
    app.shardwise_runs = runs
    app.shardwise_record.begin()


def read(text: str, name: str, path: Path, config: MdParserConfig) -> nbformat.NotebookNode:
    """A page's notebook with the outputs of its run in the folder `path`: the reader of MyST-NB."""
    notebook = read_myst_markdown_notebook(text, config, add_source_map=True)
    run = cache.Results(path, Path()).read(notebook)
    if run is None:
        raise BookError(f"{name}.md changed while the book was built: run `make book` again.")
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell, outputs in zip(cells, run["outputs"], strict=True):
        cell.outputs = outputs
    return notebook


def _notebooks(app):
    """(docname, notebook) for each page of the table of contents that is executed, in its order."""
    for docname in app.config.external_site_map:
        path = Path(app.srcdir, docname + ".md")
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if is_myst_markdown_notebook(text):
            settings = app.env.myst_config
            yield docname, read_myst_markdown_notebook(text, settings, add_source_map=True)
        elif docname.startswith(f"{CHAPTERS}/") and not path.exists():
            remedy = "write it, or take its line out"
            raise BookError(f"{docname}.md: named in _toc.yml, and not there: {remedy}.")
        elif docname.startswith(f"{CHAPTERS}/"):
            raise BookError(
                f"{docname}.md: would not be executed: its front matter needs `jupytext: "
                "text_representation: {extension: .md, format_name: myst}`, as in other chapters."
            )


def _say(text):
    """A line for whoever builds: also where Sphinx, which has one for each page, is quiet."""
    print(f"{text}\n", end="", flush=True)  # at once: several threads tell of chapters


def _outdated(app, env, added, changed, removed):
    """Pages executed since Sphinx last read them: their text may be the same, not their outputs."""
    known = getattr(env, "shardwise_finished", {})
    env.shardwise_finished = {name: run["finished"] for name, run in app.shardwise_runs.items()}
    return [name for name, time in env.shardwise_finished.items() if known.get(name) != time]


def _finish(app, exception):
    # After a warning too the next build starts over: a page that is up to date repeats none.
    if not exception and not app._warncount:
        app.shardwise_record.end()
